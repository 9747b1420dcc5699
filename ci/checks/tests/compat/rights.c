/* The rights that qp_access_flags grant to the peer: rights s|c ADDRESS. The client names a case in its private data, for which the
   server sets the flags of its queue pair; the server's private data is the address and the key of memory that grants all. */
#include <arpa/inet.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) do { if (!(x)) { printf("%s: %s\n", #x, strerror(errno)); exit(1); } } while (0)
#define RIGHTS (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

static const struct { enum ibv_wr_opcode opcode; unsigned flags; int status; } CASES[] = {
	{ IBV_WR_RDMA_WRITE, RIGHTS & ~IBV_ACCESS_REMOTE_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_WC_SUCCESS },
	{ IBV_WR_RDMA_READ, RIGHTS & ~IBV_ACCESS_REMOTE_READ, IBV_WC_REM_ACCESS_ERR },
	{ IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ, IBV_WC_SUCCESS },
	{ IBV_WR_ATOMIC_FETCH_AND_ADD, RIGHTS & ~IBV_ACCESS_REMOTE_ATOMIC, IBV_WC_REM_ACCESS_ERR },
	{ IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC, IBV_WC_SUCCESS },
	{ IBV_WR_BIND_MW, 0, IBV_WC_SUCCESS },
};
#define NUMBER (sizeof CASES / sizeof CASES[0])

struct memory { uint64_t address; uint32_t key; };

static uint64_t words[8] __attribute__((aligned(4096)));
static struct rdma_event_channel *channel;

static struct rdma_cm_event *next(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;

	CHECK(!rdma_get_cm_event(channel, &event));
	if (event->event != type) {
		printf("%s, status %d\n", rdma_event_str(event->event), event->status);
		exit(1);
	}
	return event;
}

static struct ibv_mr *equip(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 }, .sq_sig_all = 1 };
	struct ibv_mr *mr;

	CHECK(!rdma_create_qp(id, NULL, &init));
	CHECK(mr = ibv_reg_mr(id->pd, words, sizeof words, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND | RIGHTS));
	return mr;
}

static void leave(struct rdma_cm_id *id, struct ibv_mr *mr)
{
	rdma_destroy_qp(id);
	ibv_dereg_mr(mr);
	rdma_destroy_id(id);
}

static void serve(void)
{
	struct rdma_cm_event *request = next(RDMA_CM_EVENT_CONNECT_REQUEST);
	unsigned which = *(const uint8_t *)request->param.conn.private_data;
	struct rdma_cm_id *id = request->id;
	struct ibv_mr *mr = equip(id);
	struct memory memory = { (uintptr_t)words, mr->rkey };
	struct rdma_conn_param param = { .private_data = &memory, .private_data_len = sizeof memory,
					 .responder_resources = 4, .initiator_depth = 4 };
	struct ibv_qp_attr flags = { .qp_access_flags = CASES[which].flags };
	uint64_t before = words[0] = 41 + which;

	CHECK(!ibv_modify_qp(id->qp, &flags, IBV_QP_ACCESS_FLAGS));
	CHECK(!rdma_accept(id, &param));
	rdma_ack_cm_event(request);
	rdma_ack_cm_event(next(RDMA_CM_EVENT_ESTABLISHED));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_DISCONNECTED));
	/* Denied operations change nothing. */
	CHECK(CASES[which].status == IBV_WC_SUCCESS || words[0] == before);
	leave(id, mr);
}

/* One operation of 8 bytes with the peer's memory; binds a window of type 2 with a flag that only regions have. */
static void post(struct rdma_cm_id *id, struct ibv_mr *mr, unsigned which, struct memory peer)
{
	struct ibv_sge piece = { (uintptr_t)&words[1], 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &piece, .num_sge = 1, .opcode = CASES[which].opcode }, *bad;

	if (wr.opcode == IBV_WR_BIND_MW) {
		struct ibv_mw *mw = ibv_alloc_mw(id->pd, IBV_MW_TYPE_2);

		CHECK(mw);
		wr.num_sge = 0;
		wr.bind_mw.mw = mw;
		wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
		wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)words, 8,
								  IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
	} else if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = peer.address;
		wr.wr.atomic.rkey = peer.key;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = peer.address;
		wr.wr.rdma.rkey = peer.key;
	}
	CHECK(!ibv_post_send(id->qp, &wr, &bad));
}

static void talk(struct sockaddr *address, uint8_t which)
{
	struct rdma_conn_param param = { .private_data = &which, .private_data_len = 1, .responder_resources = 4,
					 .initiator_depth = 4 };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct memory peer;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	int found;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, address, 2000));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_ADDR_RESOLVED));
	CHECK(!rdma_resolve_route(id, 2000));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_ROUTE_RESOLVED));
	mr = equip(id);
	CHECK(!rdma_connect(id, &param));
	event = next(RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->param.conn.private_data_len >= sizeof peer);
	memcpy(&peer, event->param.conn.private_data, sizeof peer);
	rdma_ack_cm_event(event);
	post(id, mr, which, peer);
	while (!(found = ibv_poll_cq(id->send_cq, 1, &wc)))
		;
	CHECK(found == 1);
	printf("case %d: %s\n", which, ibv_wc_status_str(wc.status));
	/* A Write may complete before the peer's Terminate arrives; the server checks its memory. */
	if ((int)wc.status != CASES[which].status && CASES[which].opcode != IBV_WR_RDMA_WRITE)
		exit(1);
	rdma_disconnect(id);
	rdma_ack_cm_event(next(RDMA_CM_EVENT_DISCONNECTED));
	leave(id, mr);
}

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(7778) };

	CHECK(count == 3 && inet_aton(arguments[2], &address.sin_addr));
	CHECK(channel = rdma_create_event_channel());
	if (arguments[1][0] == 's') {
		struct rdma_cm_id *listener;

		CHECK(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
		CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address));
		CHECK(!rdma_listen(listener, 4));
		printf("listening\n");
		fflush(stdout);
		for (unsigned i = 0; i < NUMBER; i++)
			serve();
	} else {
		for (unsigned i = 0; i < NUMBER; i++)
			talk((struct sockaddr *)&address, i);
	}
	printf("done\n");
	return 0;
}
