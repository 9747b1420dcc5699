/* A program that exits while threads of it wait for events: "leave" is the server, "leave ADDRESS" the client, which exits. */
#include "ends.h"

#include <pthread.h>

static struct end end;
static struct ibv_comp_channel *completions;

static void *of_connections(void *argument)
{
	struct rdma_cm_event *event;

	if (rdma_get_cm_event(end.channel, &event) == 0)
		say("woken by an event of the connection");
	return argument;
}

static void *of_completions(void *argument)
{
	struct ibv_cq *cq;
	void *context;

	if (ibv_get_cq_event(completions, &cq, &context) == 0)
		say("woken by a completion");
	return argument;
}

static void client(const char *address)
{
	pthread_t threads[2];
	struct ibv_cq *cq;

	resolve(&end, address);
	CHECK(completions = ibv_create_comp_channel(end.id->verbs));
	CHECK(cq = ibv_create_cq(end.id->verbs, 64, NULL, completions, 0));
	EXPECT(ibv_req_notify_cq(cq, 0), 0);
	equip(&end, cq, 0);
	receives(&end, 4);
	connect_to(&end);
	EXPECT(pthread_create(&threads[0], NULL, of_connections, NULL), 0);
	EXPECT(pthread_create(&threads[1], NULL, of_completions, NULL), 0);
	/* Both sleep by then, or at least this cannot let the test fail. */
	usleep(100000);
	say("done");
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		client(argv[1]);
		return 0;
	}
	await_request(&end);
	equip(&end, NULL, 0);
	accept_request(&end);
	step(&end, RDMA_CM_EVENT_DISCONNECTED);
	end.gone = 1;
	leave(&end);
	say("done");
	return 0;
}
