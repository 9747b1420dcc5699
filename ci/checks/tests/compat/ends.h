/* What the two ends of a connection have in common. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PORT "7250"
#define SIZE 4096
#define ALL_ACCESS \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND)
/* Time limit of a step that must happen at once. */
#ifndef LIMIT_MS
#define LIMIT_MS 20000
#endif

#define CHECK(what)                                                                               \
	do {                                                                                      \
		if (!(what)) {                                                                    \
			printf("line %d: %s does not hold (errno %d)\n", __LINE__, #what, errno); \
			exit(1);                                                                  \
		}                                                                                 \
	} while (0)

#define EXPECT(what, wanted)                                                                             \
	do {                                                                                             \
		long got_ = (long)(what), wanted_ = (long)(wanted);                                      \
		if (got_ != wanted_) {                                                                   \
			printf("line %d: %s is %ld, not %ld\n", __LINE__, #what, got_, wanted_);         \
			exit(1);                                                                         \
		}                                                                                        \
	} while (0)

/* The private data of a connection: where the sender's memory is. */
struct place {
	uint64_t address;
	uint32_t key;
} __attribute__((packed));

struct end {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id, *listener;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *memory;
	struct place peer;
	/* The connection has ended. */
	int gone;
};

static struct rdma_cm_event *next(struct end *end, enum rdma_cm_event_type type)
{
	struct pollfd fd = { .fd = end->channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;

	CHECK(poll(&fd, 1, LIMIT_MS) == 1);
	CHECK(rdma_get_cm_event(end->channel, &event) == 0);
	EXPECT(event->event, type);
	return event;
}

static void step(struct end *end, enum rdma_cm_event_type type)
{
	CHECK(rdma_ack_cm_event(next(end, type)) == 0);
}

/* A queue pair with the interface of ibv_wr_*, and memory for its peer. `cq` may be one of the case's own. */
static void equip(struct end *end, struct ibv_cq *cq, int limit)
{
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };

	end->pd = end->id->pd;
	end->cq = cq ? cq : ibv_create_cq(end->id->verbs, 64, NULL, NULL, 0);
	CHECK(end->cq);
	init.send_cq = init.recv_cq = end->cq;
	init.cap.max_send_wr = init.cap.max_recv_wr = 16;
	init.cap.max_send_sge = init.cap.max_recv_sge = 2;
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	init.pd = end->pd;
	init.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_SEND_WITH_INV |
			      IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_BIND_MW |
			      IBV_QP_EX_WITH_LOCAL_INV;
	if (limit) {
		CHECK(end->srq = ibv_create_srq(end->pd, &srq));
		init.srq = end->srq;
	}
	CHECK(rdma_create_qp_ex(end->id, &init) == 0);
	end->qp = end->id->qp;
	CHECK(end->memory = calloc(1, SIZE));
	CHECK(end->mr = ibv_reg_mr(end->pd, end->memory, SIZE, ALL_ACCESS));
}

static void receives(struct end *end, int number)
{
	for (int i = 0; i < number; i++) {
		struct ibv_sge sge = { (uintptr_t)end->memory + 64 * i, 64, end->mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = 100 + i, .sg_list = &sge, .num_sge = 1 }, *bad;

		if (end->srq)
			EXPECT(ibv_post_srq_recv(end->srq, &wr, &bad), 0);
		else
			EXPECT(ibv_post_recv(end->qp, &wr, &bad), 0);
	}
}

static struct rdma_conn_param parameters(struct end *end, struct place *place)
{
	place->address = (uintptr_t)end->memory;
	place->key = end->mr->rkey;
	return (struct rdma_conn_param){ .private_data = place, .private_data_len = sizeof *place,
					 .responder_resources = 1, .initiator_depth = 1 };
}

static void say(const char *what)
{
	puts(what);
	fflush(stdout);
}

/* Binds an identifier to an address (NULL: the wildcard of IPv4); returns the error number. */
static int bind_to(struct rdma_cm_id *id, const char *address)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *info;
	int error;

	CHECK(rdma_getaddrinfo((char *)address, PORT, &hints, &info) == 0);
	error = rdma_bind_addr(id, info->ai_src_addr) ? errno : 0;
	rdma_freeaddrinfo(info);
	return error;
}

/* The next request at the channel becomes the connection of `end`. */
static void await_peer(struct end *end)
{
	struct rdma_cm_event *event = next(end, RDMA_CM_EVENT_CONNECT_REQUEST);

	end->id = event->id;
	CHECK(event->param.conn.private_data_len >= sizeof end->peer);
	memcpy(&end->peer, event->param.conn.private_data, sizeof end->peer);
	CHECK(rdma_ack_cm_event(event) == 0);
}

/* The server's end of a new connection, before it accepts. */
static void await_request(struct end *end)
{
	CHECK(end->channel = rdma_create_event_channel());
	CHECK(rdma_create_id(end->channel, &end->listener, NULL, RDMA_PS_TCP) == 0);
	EXPECT(bind_to(end->listener, NULL), 0);
	CHECK(rdma_listen(end->listener, 4) == 0);
	say("listening");
	await_peer(end);
	/* To the channel that it is on: its events still come. */
	CHECK(rdma_migrate_id(end->id, end->channel) == 0);
}

static void accept_request(struct end *end)
{
	struct place place;
	struct rdma_conn_param conn = parameters(end, &place);

	CHECK(rdma_accept(end->id, &conn) == 0);
	step(end, RDMA_CM_EVENT_ESTABLISHED);
}

/* The client's end, before it connects. */
static void resolve(struct end *end, const char *address)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *info;

	CHECK(end->channel = rdma_create_event_channel());
	CHECK(rdma_create_id(end->channel, &end->id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_getaddrinfo(address, PORT, &hints, &info) == 0);
	CHECK(rdma_resolve_addr(end->id, NULL, info->ai_dst_addr, 5000) == 0);
	rdma_freeaddrinfo(info);
	step(end, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(rdma_resolve_route(end->id, 5000) == 0);
	step(end, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static void connect_to(struct end *end)
{
	struct place place;
	struct rdma_conn_param conn = parameters(end, &place);
	struct rdma_cm_event *event;

	CHECK(rdma_connect(end->id, &conn) == 0);
	event = next(end, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->param.conn.private_data_len >= sizeof end->peer);
	memcpy(&end->peer, event->param.conn.private_data, sizeof end->peer);
	CHECK(rdma_ack_cm_event(event) == 0);
}

/* The next completion, which must come. */
static struct ibv_wc completion(struct end *end)
{
	struct ibv_wc wc;
	int found;

	while ((found = ibv_poll_cq(end->cq, 1, &wc)) == 0)
		sched_yield();
	EXPECT(found, 1);
	return wc;
}

/* Ends the connection, and frees what belongs to it. */
static void hang_up(struct end *end)
{
	if (!end->gone) {
		rdma_disconnect(end->id);
		step(end, RDMA_CM_EVENT_DISCONNECTED);
	}
	rdma_destroy_qp(end->id);
	EXPECT(ibv_dereg_mr(end->mr), 0);
	if (end->srq)
		EXPECT(ibv_destroy_srq(end->srq), 0);
	EXPECT(ibv_destroy_cq(end->cq), 0);
	EXPECT(rdma_destroy_id(end->id), 0);
	end->gone = 0;
}

static void leave(struct end *end)
{
	hang_up(end);
	if (end->listener)
		EXPECT(rdma_destroy_id(end->listener), 0);
	rdma_destroy_event_channel(end->channel);
}

/* A request of `opcode` with the first `length` bytes of the memory. */
static void post(struct end *end, enum ibv_wr_opcode opcode, uint32_t length, uint32_t word, uint32_t rkey)
{
	struct ibv_sge sge = { (uintptr_t)end->memory, length, end->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = length > 0, .opcode = opcode, .imm_data = word }, *bad;

	wr.wr.rdma.remote_addr = end->peer.address;
	wr.wr.rdma.rkey = rkey;
	EXPECT(ibv_post_send(end->qp, &wr, &bad), 0);
}
