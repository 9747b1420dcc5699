/* A connection whose server gets another Ethernet address, which nothing announces: "neighbour" is the server, "neighbour ADDRESS" the
   client. It sends one message before the change, and one when SIGUSR1 says that the address has changed. */
#include "ends.h"

#include <signal.h>

static void send_one(struct end *end)
{
	post(end, IBV_WR_SEND, 64, 0, 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
}

static void client(struct end *end, const char *address)
{
	struct pollfd events;
	sigset_t changed;
	int signal;

	sigemptyset(&changed);
	sigaddset(&changed, SIGUSR1);
	EXPECT(sigprocmask(SIG_BLOCK, &changed, NULL), 0);
	resolve(end, address);
	equip(end, NULL, 0);
	connect_to(end);
	send_one(end);
	say("first");
	EXPECT(sigwait(&changed, &signal), 0);
	send_one(end);
	/* The connection is as before. */
	events = (struct pollfd){ .fd = end->channel->fd, .events = POLLIN };
	EXPECT(poll(&events, 1, 0), 0);
	leave(end);
}

static void server(struct end *end)
{
	struct rdma_cm_event *event;
	int ended = 0;

	await_request(end);
	equip(end, NULL, 0);
	receives(end, 2);
	accept_request(end);
	for (int i = 0; i < 2; i++)
		EXPECT(completion(end).status, IBV_WC_SUCCESS);
	/* Before the end come the events of the server's own change. */
	while (!ended) {
		CHECK(rdma_get_cm_event(end->channel, &event) == 0);
		ended = event->event == RDMA_CM_EVENT_DISCONNECTED;
		CHECK(ended || event->event == RDMA_CM_EVENT_ADDR_CHANGE);
		CHECK(rdma_ack_cm_event(event) == 0);
	}
	end->gone = 1;
	leave(end);
}

int main(int argc, char **argv)
{
	struct end end = { 0 };

	if (argc > 1)
		client(&end, argv[1]);
	else
		server(&end);
	say("done");
	return 0;
}
