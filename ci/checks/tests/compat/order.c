/* The completion of the last Send and the DISCONNECTED that the peer sends in answer to it, which two threads of a program get:
   "order" serves ROUNDS connections, "order ADDRESS" makes them. */
#include "ends.h"

#include <pthread.h>

#define ROUNDS 50
/* Time that the thread of the completions takes to poll. */
#define BUSY_US 500

static volatile int polled;
static struct ibv_comp_channel *completions;

static void *poll_completions(void *argument)
{
	struct ibv_cq *cq;
	void *context;
	struct ibv_wc wc;

	while (ibv_get_cq_event(completions, &cq, &context) == 0) {
		ibv_ack_cq_events(cq, 1);
		usleep(BUSY_US);
		CHECK(ibv_req_notify_cq(cq, 0) == 0);
		while (ibv_poll_cq(cq, 1, &wc) > 0)
			if (wc.opcode == IBV_WC_SEND && wc.status == IBV_WC_SUCCESS)
				polled = wc.wr_id;
	}
	return argument;
}

static void send_once(struct end *end, int number)
{
	struct ibv_sge sge = { (uintptr_t)end->memory, 8, end->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	wr.send_flags = IBV_SEND_SIGNALED;
	EXPECT(ibv_post_send(end->qp, &wr, &bad), 0);
}

/* One round: our Send, the peer's close. Returns whether the close came first. */
static int round_of(struct end *end, struct ibv_cq **cq, int number)
{
	pthread_t thread;
	int early;

	await_peer(end);
	if (!*cq) {
		CHECK(completions = ibv_create_comp_channel(end->id->verbs));
		CHECK(*cq = ibv_create_cq(end->id->verbs, 64, NULL, completions, 0));
		CHECK(ibv_req_notify_cq(*cq, 0) == 0);
		EXPECT(pthread_create(&thread, NULL, poll_completions, NULL), 0);
	}
	equip(end, *cq, 0);
	accept_request(end);
	send_once(end, number);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	early = polled != number;
	rdma_destroy_qp(end->id);
	EXPECT(ibv_dereg_mr(end->mr), 0);
	EXPECT(rdma_destroy_id(end->id), 0);
	free(end->memory);
	return early;
}

static void serve(void)
{
	struct end end = { 0 };
	struct ibv_cq *cq = NULL;
	int early = 0;

	CHECK(end.channel = rdma_create_event_channel());
	CHECK(rdma_create_id(end.channel, &end.listener, NULL, RDMA_PS_TCP) == 0);
	EXPECT(bind_to(end.listener, NULL), 0);
	CHECK(rdma_listen(end.listener, 4) == 0);
	say("listening");
	for (int i = 1; i <= ROUNDS; i++)
		early += round_of(&end, &cq, i);
	printf("%d of %d closes before their completion\n", early, ROUNDS);
	CHECK(early <= ROUNDS / 2);
}

int main(int argc, char **argv)
{
	if (argc == 1) {
		serve();
	} else {
		for (int i = 0; i < ROUNDS; i++) {
			struct end end = { 0 };

			resolve(&end, argv[1]);
			equip(&end, NULL, 0);
			receives(&end, 1);
			connect_to(&end);
			completion(&end);
			leave(&end);
		}
	}
	say("done");
	return 0;
}
