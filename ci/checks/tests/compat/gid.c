// The first entry of the GID table, its type, and the state in which a queue pair begins.
#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct ibv_gid_entry entry;
	if (!context || ibv_query_gid_ex(context, 1, 0, &entry, 0))
		return 1;
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_recv_wr receive = { 0 }, *bad;
	struct ibv_qp_attr attributes;
	if (!qp || ibv_query_qp(qp, &attributes, IBV_QP_STATE, &init))
		return 1;
	int early = ibv_post_recv(qp, &receive, &bad);
	init.qp_type = IBV_QPT_UD;
	struct ibv_qp *datagrams = ibv_create_qp(pd, &init);
	printf("gid type %u state %d receive %s datagrams %s\n", entry.gid_type, attributes.qp_state, early ? "refused" : "taken",
	       datagrams ? "given" : "refused");
	return 0;
}
