/* Remote invalidation, which a device announces by a flag: invalidate s|c ADDRESS. */
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define CHECK(x) do { if (!(x)) { perror(#x); exit(1); } } while (0)

static struct { uint32_t key; char rest[4092]; } page __attribute__((aligned(4096)));

int main(int argc, char **argv)
{
	int server = argc > 2 && argv[1][0] == 's';
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = server ? RAI_PASSIVE : 0 }, *info;
	struct ibv_qp_init_attr init = { .cap = { 4, 4, 1, 1, 0 }, .sq_sig_all = 1 };
	struct rdma_cm_id *listener, *id;
	struct ibv_device_attr device;
	struct ibv_wc wc;
	CHECK(argc == 3 && !rdma_getaddrinfo(argv[2], "7471", &hints, &info));
	if (server) {
		CHECK(!rdma_create_ep(&listener, info, NULL, &init) && !rdma_listen(listener, 1));
		printf("listening\n");
		fflush(stdout);
		CHECK(!rdma_get_request(listener, &id));
	} else
		CHECK(!rdma_create_ep(&id, info, NULL, &init));
	CHECK(!ibv_query_device(id->verbs, &device));
	printf("IBV_DEVICE_MEM_MGT_EXTENSIONS: %d\n", !!(device.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS));
	struct ibv_mr *mr = ibv_reg_mr(id->pd, &page, sizeof page, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_mr *data = ibv_reg_mr(id->pd, page.rest + 60, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr && data && !rdma_post_recv(id, NULL, &page, 64, mr));
	if (server) {
		CHECK(!rdma_accept(id, NULL) && rdma_get_recv_comp(id, &wc) == 1 && !wc.status);
		struct ibv_sge piece = { (uintptr_t)&page, 4, mr->lkey };
		struct ibv_send_wr send = { .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = page.key, .sg_list = &piece, .num_sge = 1 }, *bad;
		CHECK(!ibv_post_send(id->qp, &send, &bad) && rdma_get_send_comp(id, &wc) == 1);
		printf("Send with Invalidate: %s\n", ibv_wc_status_str(wc.status));
	} else {
		CHECK(!rdma_connect(id, NULL));
		page.key = data->rkey;
		CHECK(!rdma_post_send(id, NULL, &page, 4, mr, 0) && rdma_get_send_comp(id, &wc) == 1 && !wc.status);
		CHECK(rdma_get_recv_comp(id, &wc) == 1);
		printf("receive: %s, invalidated %d\n", ibv_wc_status_str(wc.status), !!(wc.wc_flags & IBV_WC_WITH_INV));
		rdma_disconnect(id);
	}
	return 0;
}
