/* A channel's descriptor is readable exactly while the blocking call has an event to return: "readable serve" and "readable
   talk ADDRESS" are the two ends of some connections, which a single-threaded program ends without destroying anything at once. */
#include "ends.h"

#include <signal.h>

#define CONNECTIONS 3
/* Time in which nothing more may happen. */
#define QUIET_MS 300

static void blocked(int signal)
{
	static const char text[] = "the descriptor is readable, and the call does not return\n";

	(void)signal;
	if (write(1, text, sizeof text - 1) < 0)
		_exit(3);
	_exit(2);
}

/* The type of the next event within `limit` milliseconds, and its identifier; -1: there is none. The call must not wait. */
static int event_within(struct rdma_event_channel *channel, int limit, struct rdma_cm_id **id)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	int type;

	if (poll(&fd, 1, limit) == 0)
		return -1;
	alarm(5);
	CHECK(rdma_get_cm_event(channel, &event) == 0);
	alarm(0);
	*id = event->id;
	type = event->event;
	CHECK(rdma_ack_cm_event(event) == 0);
	return type;
}

static void expect(struct rdma_event_channel *channel, int type, struct rdma_cm_id **id)
{
	EXPECT(event_within(channel, LIMIT_MS, id), type);
}

static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };

	CHECK(rdma_create_qp(id, NULL, &init) == 0);
}

static void serve(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener, *id[CONNECTIONS], *same;
	struct rdma_conn_param param = { 0 };

	CHECK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	EXPECT(bind_to(listener, NULL), 0);
	CHECK(rdma_listen(listener, 4) == 0);
	say("listening");
	for (int i = 0; i < CONNECTIONS; i++) {
		expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, &id[i]);
		make_qp(id[i]);
		CHECK(rdma_accept(id[i], &param) == 0);
		expect(channel, RDMA_CM_EVENT_ESTABLISHED, &same);
		expect(channel, RDMA_CM_EVENT_DISCONNECTED, &same);
		CHECK(same == id[i]);
		rdma_disconnect(id[i]);
	}
	/* The client has left. */
	EXPECT(event_within(channel, QUIET_MS, &same), -1);
	/* Nothing is left that the destruction could report. */
	for (int i = 0; i < CONNECTIONS; i++) {
		rdma_destroy_qp(id[i]);
		EXPECT(event_within(channel, 0, &same), -1);
		CHECK(rdma_destroy_id(id[i]) == 0);
	}
	EXPECT(event_within(channel, QUIET_MS, &same), -1);
	CHECK(rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(channel);
}

static void talk(const char *address)
{
	struct rdma_conn_param param = { 0 };
	struct rdma_cm_id *same;

	for (int i = 0; i < CONNECTIONS; i++) {
		struct end end = { 0 };

		resolve(&end, address);
		make_qp(end.id);
		CHECK(rdma_connect(end.id, &param) == 0);
		expect(end.channel, RDMA_CM_EVENT_ESTABLISHED, &same);
		CHECK(rdma_disconnect(end.id) == 0);
		if (i != 1) {
			expect(end.channel, RDMA_CM_EVENT_DISCONNECTED, &same);
			EXPECT(event_within(end.channel, QUIET_MS, &same), -1);
		}
		rdma_destroy_qp(end.id);
		if (i != 1)
			EXPECT(event_within(end.channel, 0, &same), -1);
		CHECK(rdma_destroy_id(end.id) == 0);
		EXPECT(event_within(end.channel, 0, &same), -1);
		rdma_destroy_event_channel(end.channel);
	}
}

int main(int argc, char **argv)
{
	signal(SIGALRM, blocked);
	if (argc == 2 && !strcmp(argv[1], "serve"))
		serve();
	else if (argc == 3 && !strcmp(argv[1], "talk"))
		talk(argv[2]);
	else
		return 2;
	say("done");
	return 0;
}
