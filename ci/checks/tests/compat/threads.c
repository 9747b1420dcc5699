/* Several threads of one program: "threads CASE" is the server, "threads CASE ADDRESS" the client. */
#define _GNU_SOURCE
#include "ends.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

enum { MESSAGES = 5000, SLOTS = 256, BYTES = 64 };

/* A message: which thread has sent it, and the how manieth of that thread it is. */
struct message {
	uint32_t thread, number;
	uint8_t rest[BYTES - 8];
};

static struct ibv_cq *receive_cq;
static struct ibv_cq_ex *extended;

/* Queues of enough entries, a queue pair with ibv_wr_*, and memory with a slot for each receive. */
static void many(struct end *end, struct ibv_pd *pd)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_RC };

	end->pd = pd;
	CHECK(end->cq = ibv_create_cq(end->id->verbs, 4096, NULL, NULL, 0));
	if (!receive_cq)
		receive_cq = end->cq;
	init.send_cq = end->cq;
	init.recv_cq = receive_cq;
	init.cap = (struct ibv_qp_cap){ 512, SLOTS, 2, 2, BYTES };
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	init.pd = pd;
	init.send_ops_flags = IBV_QP_EX_WITH_SEND;
	CHECK(rdma_create_qp_ex(end->id, &init) == 0);
	end->qp = end->id->qp;
	CHECK(end->memory = calloc(SLOTS, BYTES));
	CHECK(end->mr = ibv_reg_mr(end->pd, end->memory, SLOTS * BYTES, ALL_ACCESS));
}

static void receive(struct end *end, uint64_t slot)
{
	struct ibv_sge sge = { (uintptr_t)end->memory + BYTES * slot, BYTES, end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	EXPECT(ibv_post_recv(end->qp, &wr, &bad), 0);
}

/* Sends messages in batches of three, of which every tenth is aborted. */
static void *send_batches(void *argument)
{
	struct end *end = argument;
	static uint32_t threads;
	uint32_t thread = __sync_fetch_and_add(&threads, 1), number = 0;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(end->qp);
	struct ibv_wc wc;

	for (int round = 0; number < MESSAGES; round++) {
		int posted, batch = number + 3 < MESSAGES ? 3 : MESSAGES - number;

		do {
			ibv_wr_start(qp);
			for (int i = 0; i < batch; i++) {
				struct message message = { thread, number + i };

				memset(message.rest, thread + number + i, sizeof message.rest);
				qp->wr_id = number + i;
				qp->wr_flags = (number + i) % 32 == 31 || number + i + 1 == MESSAGES ? IBV_SEND_SIGNALED : 0;
				ibv_wr_send(qp);
				ibv_wr_set_inline_data(qp, &message, sizeof message);
				if (i == 1)
					sched_yield();
			}
			if (round % 10 == 9) {
				ibv_wr_abort(qp);
				posted = EAGAIN;
				round++;
			} else {
				posted = ibv_wr_complete(qp);
			}
			while (ibv_poll_cq(end->cq, 1, &wc) > 0)
				EXPECT(wc.status, IBV_WC_SUCCESS);
		} while (posted == ENOMEM || posted == EAGAIN);
		EXPECT(posted, 0);
		number += batch;
	}
	return NULL;
}

static void both(void *(*run)(void *), struct end *end)
{
	pthread_t threads[2];

	for (int i = 0; i < 2; i++)
		EXPECT(pthread_create(&threads[i], NULL, run, end), 0);
	for (int i = 0; i < 2; i++)
		EXPECT(pthread_join(threads[i], NULL), 0);
}

/* Two threads build and post batches on one queue pair: each message arrives once, and those of a thread in order. */
static void batches_client(struct end *end, const char *address)
{
	resolve(end, address);
	many(end, end->id->pd);
	connect_to(end);
	both(send_batches, end);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

static void batches_server(struct end *end)
{
	uint32_t next[2] = { 0 };
	struct ibv_cq *own;

	await_request(end);
	many(end, end->id->pd);
	for (int i = 0; i < SLOTS; i++)
		receive(end, i);
	accept_request(end);
	own = end->cq;
	end->cq = receive_cq;
	for (int i = 0; i < 2 * MESSAGES; i++) {
		struct ibv_wc wc = completion(end);
		struct message *message = (struct message *)(end->memory + BYTES * wc.wr_id);

		EXPECT(wc.status, IBV_WC_SUCCESS);
		EXPECT(wc.byte_len, BYTES);
		CHECK(message->thread < 2);
		EXPECT(message->number, next[message->thread]);
		next[message->thread]++;
		for (size_t k = 0; k < sizeof message->rest; k++)
			EXPECT(message->rest[k], (uint8_t)(message->thread + message->number));
		receive(end, wc.wr_id);
	}
	end->cq = own;
	leave(end);
}

static uint8_t seen[2 * MESSAGES];
static uint32_t polled;

/* Polls the extended queue, and gives the processor to the other thread before it reads a completion. */
static void *poll_extended(void *argument)
{
	struct end *end = argument;
	struct ibv_poll_cq_attr none = { 0 };

	while (__sync_fetch_and_add(&polled, 0) < 2 * MESSAGES) {
		int found = ibv_start_poll(extended, &none);

		if (found == ENOENT) {
			sched_yield();
			continue;
		}
		EXPECT(found, 0);
		do {
			struct message *message;

			if (polled % 8 == 0)
				sched_yield();
			EXPECT(extended->status, IBV_WC_SUCCESS);
			EXPECT(ibv_wc_read_byte_len(extended), BYTES);
			message = (struct message *)(end->memory + BYTES * extended->wr_id);
			CHECK(message->number < 2 * MESSAGES);
			EXPECT(__sync_fetch_and_add(&seen[message->number], 1), 0);
			receive(end, extended->wr_id);
			__sync_fetch_and_add(&polled, 1);
		} while (ibv_next_poll(extended) == 0);
		ibv_end_poll(extended);
	}
	return NULL;
}

/* Two threads poll one extended completion queue: each completion is seen once. */
static void polls_server(struct end *end)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 4096, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_poll_cq_attr unknown = { .comp_mask = 1 };

	await_request(end);
	CHECK(extended = ibv_create_cq_ex(end->id->verbs, &init));
	EXPECT(ibv_start_poll(extended, &unknown), EINVAL);
	receive_cq = ibv_cq_ex_to_cq(extended);
	many(end, end->id->pd);
	for (int i = 0; i < SLOTS; i++)
		receive(end, i);
	accept_request(end);
	both(poll_extended, end);
	leave(end);
}

static void polls_client(struct end *end, const char *address)
{
	resolve(end, address);
	many(end, end->id->pd);
	connect_to(end);
	for (uint32_t i = 0; i < 2 * MESSAGES; i++) {
		struct message message = { .number = i };
		struct ibv_sge sge = { (uintptr_t)&message, BYTES, 0 };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_INLINE | (i % 16 ? 0 : IBV_SEND_SIGNALED) },
				   *bad;

		EXPECT(ibv_post_send(end->qp, &wr, &bad), 0);
		if (i % 16 == 0)
			EXPECT(completion(end).status, IBV_WC_SUCCESS);
	}
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* Queues of a thread domain: no locks, otherwise the same. The domain lives as long as its parent domain. */
static void domains_client(struct end *end, const char *address)
{
	struct ibv_td_init_attr td_attr = { 0 };
	struct ibv_parent_domain_init_attr parent = { 0 };
	struct ibv_cq_init_attr_ex init = { .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD };
	struct ibv_qp_ex *qp;
	struct ibv_cq_ex *cq;
	struct ibv_pd *pd;
	struct ibv_td *td;

	resolve(end, address);
	td_attr.comp_mask = 1;
	CHECK(!ibv_alloc_td(end->id->verbs, &td_attr));
	td_attr.comp_mask = 0;
	CHECK(td = ibv_alloc_td(end->id->verbs, &td_attr));
	parent.pd = end->id->pd;
	parent.td = td;
	CHECK(pd = ibv_alloc_parent_domain(end->id->verbs, &parent));
	EXPECT(ibv_dealloc_td(td), EBUSY);
	init.parent_domain = pd;
	CHECK(cq = ibv_create_cq_ex(end->id->verbs, &init));
	receive_cq = ibv_cq_ex_to_cq(cq);
	many(end, pd);
	EXPECT(ibv_dealloc_pd(pd), EBUSY);
	connect_to(end);
	qp = ibv_qp_to_qp_ex(end->qp);
	for (int i = 0; i < 2; i++) {
		ibv_wr_start(qp);
		ibv_wr_send(qp);
		ibv_wr_set_inline_data(qp, "x", 1);
		if (i)
			EXPECT(ibv_wr_complete(qp), 0);
		else
			ibv_wr_abort(qp);
	}
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	hang_up(end);
	EXPECT(ibv_destroy_cq(receive_cq), 0);
	EXPECT(ibv_dealloc_pd(pd), 0);
	EXPECT(ibv_dealloc_td(td), 0);
	rdma_destroy_event_channel(end->channel);
}

static void domains_server(struct end *end)
{
	await_request(end);
	many(end, end->id->pd);
	receive(end, 0);
	accept_request(end);
	EXPECT(completion(end).byte_len, 1);
	leave(end);
}

static void *wait_for_event(void *argument)
{
	struct ibv_comp_channel *channel = argument;
	struct ibv_cq *cq;
	void *context;

	for (;;) {
		EXPECT(ibv_get_cq_event(channel, &cq, &context), 0);
		ibv_ack_cq_events(cq, 1);
		if (context)
			return NULL;
	}
}

/* A flushed receive, which notifies the channel of `cq`. */
static struct ibv_qp *notify(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_recv_wr wr = { 0 }, *bad;
	struct ibv_qp *qp;

	CHECK(qp = ibv_create_qp(pd, &init));
	ibv_modify_qp(qp, &attr, IBV_QP_STATE);
	EXPECT(ibv_req_notify_cq(cq, 0), 0);
	EXPECT(ibv_post_recv(qp, &wr, &bad), 0);
	attr.qp_state = IBV_QPS_ERR;
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	return qp;
}

/* Queues are destroyed while another thread waits at their channel, and takes their events: they are not busy for that. */
static void channel_server(struct end *end)
{
	struct ibv_comp_channel *channel;
	struct ibv_cq *last;
	struct ibv_qp *qp;
	pthread_t waiter;

	await_request(end);
	CHECK(channel = ibv_create_comp_channel(end->id->verbs));
	EXPECT(pthread_create(&waiter, NULL, wait_for_event, channel), 0);
	for (int i = 0; i < 500; i++) {
		struct ibv_cq *cq = ibv_create_cq(end->id->verbs, 8, NULL, channel, 0);

		CHECK(cq);
		qp = notify(end->id->pd, cq);
		EXPECT(ibv_destroy_qp(qp), 0);
		EXPECT(ibv_destroy_cq(cq), 0);
	}
	CHECK(last = ibv_create_cq(end->id->verbs, 8, end, channel, 0));
	EXPECT(ibv_destroy_comp_channel(channel), EBUSY);
	qp = notify(end->id->pd, last);
	EXPECT(pthread_join(waiter, NULL), 0);
	EXPECT(ibv_destroy_qp(qp), 0);
	EXPECT(ibv_destroy_cq(last), 0);
	EXPECT(ibv_destroy_comp_channel(channel), 0);
	many(end, end->id->pd);
	accept_request(end);
	leave(end);
}

static void channel_client(struct end *end, const char *address)
{
	resolve(end, address);
	many(end, end->id->pd);
	connect_to(end);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

enum { ROUNDS = 100 };

static int destroyed;

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* Stops the thread that posts until the queue pair is destroyed, or for a while if it holds up the destruction. */
static void stop(int signal)
{
	double end = now() + 0.1;

	(void)signal;
	while (!__atomic_load_n(&destroyed, __ATOMIC_ACQUIRE) && now() < end)
		;
}

/* Sends the signal to this thread after a time. */
static void interrupt_in(long nanoseconds)
{
	struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1 };
	struct itimerspec time = { .it_value = { 0, nanoseconds } };
	timer_t timer;

	event._sigev_un._tid = gettid();
	EXPECT(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
	EXPECT(timer_settime(timer, 0, &time, NULL), 0);
}

static void *post_one(void *argument)
{
	struct end *end = argument;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(end->qp);
	struct ibv_sge sge = { (uintptr_t)end->memory, 8, end->mr->lkey };
	struct ibv_send_wr second = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr wr = second, *bad;
	static int round;

	interrupt_in(2000 + round * 7919L % 300000);
	switch (round++ % 3) {
	case 0:
		ibv_post_send(end->qp, &wr, &bad);
		break;
	case 1:
		wr.next = &second;
		ibv_post_send(end->qp, &wr, &bad);
		break;
	default:
		ibv_wr_start(qp);
		ibv_wr_send(qp);
		ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory, 8);
		ibv_wr_complete(qp);
	}
	return NULL;
}

/* The peer answers a Send by its disconnect, and the thread of the events destroys the queue pair at once, although the thread that
 * sends may not have returned from its call. */
static void answered_server(struct end *end)
{
	await_request(end);
	signal(SIGUSR1, stop);
	for (int i = 0; i < ROUNDS; i++) {
		pthread_t poster;
		char *kept[64];

		receive_cq = NULL;
		many(end, end->id->pd);
		accept_request(end);
		destroyed = 0;
		EXPECT(pthread_create(&poster, NULL, post_one, end), 0);
		step(end, RDMA_CM_EVENT_DISCONNECTED);
		rdma_destroy_qp(end->id);
		EXPECT(ibv_destroy_cq(end->cq), 0);
		EXPECT(rdma_destroy_id(end->id), 0);
		/* What was freed is reused. */
		for (int k = 0; k < 64; k++)
			kept[k] = memset(malloc(128 * (k + 1)), 0xee, 128 * (k + 1));
		__atomic_store_n(&destroyed, 1, __ATOMIC_RELEASE);
		EXPECT(pthread_join(poster, NULL), 0);
		for (int k = 0; k < 64; k++)
			free(kept[k]);
		EXPECT(ibv_dereg_mr(end->mr), 0);
		free(end->memory);
		if (i + 1 < ROUNDS)
			await_peer(end);
	}
	EXPECT(rdma_destroy_id(end->listener), 0);
	rdma_destroy_event_channel(end->channel);
}

static void answered_client(struct end *end, const char *address)
{
	for (int i = 0; i < ROUNDS; i++) {
		receive_cq = NULL;
		resolve(end, address);
		many(end, end->id->pd);
		receive(end, 0);
		receive(end, 1);
		connect_to(end);
		EXPECT(completion(end).status, IBV_WC_SUCCESS);
		leave(end);
		free(end->memory);
	}
}

static const struct {
	const char *name;
	void (*server)(struct end *end);
	void (*client)(struct end *end, const char *address);
} cases[] = {
	{ "batches", batches_server, batches_client },
	{ "polls", polls_server, polls_client },
	{ "domains", domains_server, domains_client },
	{ "channel", channel_server, channel_client },
	{ "answered", answered_server, answered_client },
};

int main(int argc, char **argv)
{
	struct end end = { 0 };

	for (size_t i = 0; argc >= 2 && i < sizeof cases / sizeof *cases; i++) {
		if (strcmp(argv[1], cases[i].name))
			continue;
		if (argc > 2)
			cases[i].client(&end, argv[2]);
		else
			cases[i].server(&end);
		puts("done");
		return 0;
	}
	return 2;
}
