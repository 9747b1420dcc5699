/* Sends with immediate data and a payload: "immediate server - own/srq/refused" and "immediate client ADDRESS own/srq/refused". */
#include "ends.h"

/* Bytes of the long message: several segments. */
#define LONG 3000

static const struct message {
	uint32_t length, data;
	int extended, inlined, solicited, plain;
} messages[] = {
	{ 5, 0x01020304, 0, 0, 0, 0 },
	{ LONG, 0xa0b0c0d0, 0, 0, 0, 0 },
	{ 7, 0, 0, 0, 0, 1 },
	{ 9, 0xffffffff, 0, 1, 0, 0 },
	{ 11, 0x7f, 1, 0, 0, 0 },
	{ LONG - 1, 0x80000000, 1, 0, 0, 0 },
	{ 0, 0x33, 0, 0, 0, 0 },
	{ 13, 0x0a0b0c0d, 1, 1, 1, 0 },
};
#define MESSAGES (sizeof messages / sizeof *messages)

static char letter(size_t number)
{
	return 'a' + number;
}

/* Posts message `number`; returns the error number. */
static int send_message(struct end *end, size_t number, char *from)
{
	const struct message *m = &messages[number];
	struct ibv_sge sge = { (uintptr_t)from, m->length, end->mr->lkey };
	unsigned flags = (m->inlined ? IBV_SEND_INLINE : 0) | (m->solicited ? IBV_SEND_SOLICITED : 0);
	struct ibv_send_wr wr = { .wr_id = number, .sg_list = &sge, .num_sge = m->length > 0, .send_flags = flags }, *bad = NULL;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(end->qp);
	int error;

	if (!m->extended) {
		wr.opcode = m->plain ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM;
		wr.imm_data = htonl(m->data);
		error = ibv_post_send(end->qp, &wr, &bad);
		CHECK(!error || bad == &wr);
		return error;
	}
	ibv_wr_start(qp);
	qp->wr_id = number;
	qp->wr_flags = m->solicited ? IBV_SEND_SOLICITED : 0;
	ibv_wr_send_imm(qp, htonl(m->data));
	if (m->inlined)
		ibv_wr_set_inline_data(qp, from, m->length);
	else
		ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)from, m->length);
	return ibv_wr_complete(qp);
}

static void server(struct end *end, int shared)
{
	static char inbox[MESSAGES][SIZE];
	struct ibv_comp_channel *channel;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	void *context;
	struct pollfd fd;

	await_request(end);
	CHECK(channel = ibv_create_comp_channel(end->id->verbs));
	CHECK(cq = ibv_create_cq(end->id->verbs, 64, NULL, channel, 0));
	equip(end, cq, shared);
	CHECK(mr = ibv_reg_mr(end->pd, inbox, sizeof inbox, IBV_ACCESS_LOCAL_WRITE));
	for (size_t i = 0; i < MESSAGES; i++) {
		struct ibv_sge sge = { (uintptr_t)inbox[i], SIZE, mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;

		EXPECT(shared ? ibv_post_srq_recv(end->srq, &wr, &bad) : ibv_post_recv(end->qp, &wr, &bad), 0);
	}
	EXPECT(ibv_req_notify_cq(cq, 1), 0);
	accept_request(end);
	/* Only the last message is solicited: all have come when it wakes. */
	fd = (struct pollfd){ .fd = channel->fd, .events = POLLIN };
	EXPECT(poll(&fd, 1, LIMIT_MS), 1);
	EXPECT(ibv_get_cq_event(channel, &cq, &context), 0);
	ibv_ack_cq_events(cq, 1);
	for (size_t i = 0; i < MESSAGES; i++) {
		const struct message *m = &messages[i];
		struct ibv_wc wc;

		EXPECT(ibv_poll_cq(cq, 1, &wc), 1);
		EXPECT(wc.status, IBV_WC_SUCCESS);
		EXPECT(wc.wr_id, i);
		EXPECT(wc.opcode, IBV_WC_RECV);
		EXPECT(wc.byte_len, m->length);
		EXPECT(wc.wc_flags & IBV_WC_WITH_IMM, m->plain ? 0 : IBV_WC_WITH_IMM);
		if (!m->plain)
			EXPECT(ntohl(wc.imm_data), m->data);
		for (size_t at = 0; at < SIZE; at++)
			EXPECT(inbox[i][at], at < m->length ? letter(i) : 0);
	}
	/* Tells the client that all is checked. */
	post(end, IBV_WR_SEND, 1, 0, 0);
	EXPECT(completion(end).opcode, IBV_WC_SEND);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	EXPECT(ibv_dereg_mr(mr), 0);
	rdma_disconnect(end->id);
	leave(end);
}

static void client(struct end *end, const char *address)
{
	static char outbox[SIZE];
	struct ibv_mr *mr;

	resolve(end, address);
	equip(end, NULL, 0);
	receives(end, 1);
	mr = end->mr;
	CHECK(end->mr = ibv_reg_mr(end->pd, outbox, SIZE, 0));
	connect_to(end);
	for (size_t i = 0; i < MESSAGES; i++) {
		struct ibv_wc wc;

		memset(outbox, letter(i), SIZE);
		EXPECT(send_message(end, i, outbox), 0);
		wc = completion(end);
		EXPECT(wc.status, IBV_WC_SUCCESS);
		EXPECT(wc.wr_id, i);
		EXPECT(wc.opcode, IBV_WC_SEND);
	}
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	EXPECT(ibv_dereg_mr(mr), 0);
	leave(end);
}

/* The peer has not agreed: every way is refused, and the connection stays. */
static void refused_server(struct end *end)
{
	await_request(end);
	equip(end, NULL, 0);
	receives(end, 2);
	accept_request(end);
	EXPECT(completion(end).byte_len, 7);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	rdma_disconnect(end->id);
	leave(end);
}

static void refused_client(struct end *end, const char *address)
{
	resolve(end, address);
	equip(end, NULL, 0);
	connect_to(end);
	for (size_t i = 0; i < MESSAGES; i++)
		if (messages[i].length && !messages[i].plain)
			EXPECT(send_message(end, i, end->memory), EOPNOTSUPP);
	EXPECT(send_message(end, 2, end->memory), 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	leave(end);
}

int main(int argc, char **argv)
{
	struct end end = { 0 };

	CHECK(argc == 4);
	if (strcmp(argv[1], "client") == 0) {
		if (strcmp(argv[3], "refused") == 0)
			refused_client(&end, argv[2]);
		else
			client(&end, argv[2]);
	} else if (strcmp(argv[3], "refused") == 0) {
		refused_server(&end);
	} else {
		server(&end, strcmp(argv[3], "srq") == 0);
	}
	puts("done");
	return 0;
}
