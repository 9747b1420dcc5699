/* A channel's descriptor is readable exactly while the blocking call has an event to return: "readable serve" and "readable
   talk ADDRESS" are the two ends of some connections, which a single-threaded program ends without destroying anything at once.
   "readable random SEED STEPS [ADDRESS]" is one end of random histories, of two threads with channels of their own. */
#define _GNU_SOURCE
#include "ends.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

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

/* The calling thread's time limit for the calls that must return at once. */
static void limit(int seconds)
{
	static __thread timer_t timer;
	static __thread int made;
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM };
	struct itimerspec at = { .it_value.tv_sec = seconds };

	if (!made)
		CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
	made = 1;
	CHECK(timer_settime(timer, 0, &at, NULL) == 0);
}

/* The type of the next event within this many milliseconds, and its identifier; -1: there is none. The call must not wait. */
static int event_within(struct rdma_event_channel *channel, int within, struct rdma_cm_id **id)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	int type;

	if (poll(&fd, 1, within) == 0)
		return -1;
	limit(5);
	CHECK(rdma_get_cm_event(channel, &event) == 0);
	limit(0);
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

/* One end of a random history. */
#define SLOTS 8
#define HELD 4

struct slot {
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
};

/* A thread's own. The asynchronous events of the device are read by the first thread. */
static __thread struct slot slots[SLOTS];
static __thread struct rdma_cm_event *held[HELD];
static __thread struct rdma_event_channel *events;
static __thread struct ibv_comp_channel *completions;
static __thread struct ibv_context *context;
static __thread unsigned int seed;
static __thread long reported[3];
static __thread int is_first;
/* Held between an asynchronous event's announcement and its return: the destruction of its queue pair by the other thread would take it
   back, with any device. */
static pthread_mutex_t destruction = PTHREAD_MUTEX_INITIALIZER;

static void destroy_qp(struct rdma_cm_id *id)
{
	pthread_mutex_lock(&destruction);
	rdma_destroy_qp(id);
	pthread_mutex_unlock(&destruction);
}

static int chance(int percent)
{
	return rand_r(&seed) % 100 < percent;
}

static struct slot *slot_of(struct rdma_cm_id *id)
{
	for (int i = 0; i < SLOTS; i++)
		if (slots[i].id == id)
			return &slots[i];
	return NULL;
}

/* Acknowledges the held events that are about `id`; NULL: all. */
static void acknowledge(struct rdma_cm_id *id)
{
	for (int i = 0; i < HELD; i++)
		if (held[i] && (!id || held[i]->id == id)) {
			CHECK(rdma_ack_cm_event(held[i]) == 0);
			held[i] = NULL;
		}
}

static void equip_slot(struct slot *slot)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;

	if (!completions)
		CHECK(completions = ibv_create_comp_channel(context = slot->id->verbs));
	CHECK(slot->cq = ibv_create_cq(slot->id->verbs, 16, NULL, completions, 0));
	CHECK(ibv_req_notify_cq(slot->cq, 0) == 0);
	init.send_cq = init.recv_cq = slot->cq;
	CHECK(rdma_create_qp(slot->id, NULL, &init) == 0);
	CHECK(ibv_post_recv(slot->id->qp, &wr, &bad) == 0);
}

static void destroy_slot(struct slot *slot)
{
	acknowledge(slot->id);
	if (slot->id->qp)
		destroy_qp(slot->id);
	if (slot->cq)
		EXPECT(ibv_destroy_cq(slot->cq), 0);
	EXPECT(rdma_destroy_id(slot->id), 0);
	*slot = (struct slot){ 0 };
}

/* The program's reaction to an event. Steps that the peer has made impossible may fail. */
static void react(struct rdma_cm_event *event)
{
	struct rdma_conn_param param = { .retry_count = 7 };
	struct slot *slot;

	switch (event->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		CHECK(rdma_resolve_route(event->id, 5000) == 0);
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		equip_slot(slot_of(event->id));
		rdma_connect(event->id, &param);
		break;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		slot = slot_of(NULL);
		if (!slot || chance(10)) {
			rdma_reject(event->id, NULL, 0);
			EXPECT(rdma_destroy_id(event->id), 0);
			break;
		}
		slot->id = event->id;
		if (chance(90)) {
			equip_slot(slot);
			rdma_accept(slot->id, &param);
		}
		break;
	default:
		CHECK(slot_of(event->id));
	}
}

static int readable(int number)
{
	struct pollfd fd = { .fd = number, .events = POLLIN };

	return poll(&fd, 1, 0);
}

/* Reads what is readable: each call must return at once. */
static void read_one(void)
{
	struct rdma_cm_event *event;
	struct ibv_async_event async;
	struct ibv_cq *cq;
	void *its_context;
	int i;

	limit(5);
	if (readable(events->fd)) {
		CHECK(rdma_get_cm_event(events, &event) == 0);
		reported[0]++;
		react(event);
		for (i = 0; i < HELD && held[i]; i++)
			;
		if (i < HELD && chance(30))
			held[i] = event;
		else
			CHECK(rdma_ack_cm_event(event) == 0);
	}
	pthread_mutex_lock(&destruction);
	if (is_first && context && readable(context->async_fd)) {
		CHECK(ibv_get_async_event(context, &async) == 0);
		reported[1]++;
		ibv_ack_async_event(&async);
	}
	pthread_mutex_unlock(&destruction);
	if (completions && readable(completions->fd)) {
		CHECK(ibv_get_cq_event(completions, &cq, &its_context) == 0);
		reported[2]++;
		ibv_ack_cq_events(cq, 1);
		CHECK(ibv_req_notify_cq(cq, 0) == 0);
	}
	limit(0);
}

static void random_step(struct sockaddr *peer)
{
	struct slot *slot = &slots[rand_r(&seed) % SLOTS];

	if (chance(60)) {
		read_one();
	} else if (!slot->id) {
		if (peer) {
			CHECK(rdma_create_id(events, &slot->id, NULL, RDMA_PS_TCP) == 0);
			CHECK(rdma_resolve_addr(slot->id, NULL, peer, 5000) == 0);
		}
	} else if (chance(30)) {
		rdma_disconnect(slot->id);
	} else if (chance(20) && slot->id->qp) {
		destroy_qp(slot->id);
	} else if (chance(30)) {
		destroy_slot(slot);
	}
	if (chance(30))
		usleep(rand_r(&seed) % 2000);
	if (chance(5))
		acknowledge(NULL);
}

/* Of one thread, which has a port of its own. */
struct history {
	const char *address, *port;
	unsigned int seed;
	int steps, is_first;
};

static struct rdma_cm_id *listen_at(const char *port)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *info;
	struct rdma_cm_id *listener;

	CHECK(rdma_create_id(events, &listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_getaddrinfo(NULL, (char *)port, &hints, &info) == 0);
	CHECK(rdma_bind_addr(listener, info->ai_src_addr) == 0);
	rdma_freeaddrinfo(info);
	CHECK(rdma_listen(listener, 16) == 0);
	return listener;
}

static void *run(void *argument)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *info = NULL;
	struct history *of = argument;
	struct rdma_cm_id *listener = NULL;

	seed = of->seed;
	is_first = of->is_first;
	printf("seed %u\n", seed);
	CHECK(events = rdma_create_event_channel());
	if (of->address)
		CHECK(rdma_getaddrinfo(of->address, (char *)of->port, &hints, &info) == 0);
	else
		listener = listen_at(of->port);
	if (listener && is_first)
		say("listening");
	for (int i = 0; i < of->steps; i++)
		random_step(info ? info->ai_dst_addr : NULL);
	for (int i = 0; i < SLOTS; i++)
		if (slots[i].id)
			destroy_slot(&slots[i]);
	acknowledge(NULL);
	if (listener)
		CHECK(rdma_destroy_id(listener) == 0);
	EXPECT(readable(events->fd), 0);
	if (completions)
		EXPECT(readable(completions->fd), 0);
	printf("events: %ld of connections, %ld asynchronous, %ld of completions\n", reported[0], reported[1], reported[2]);
	return NULL;
}

static void histories(const char *address, const char *from, const char *steps)
{
	unsigned int seed = strtoul(from, NULL, 0);
	struct history first = { address, "7251", seed, atoi(steps), 1 }, second = { address, "7252", ~seed, atoi(steps), 0 };
	pthread_t thread;

	EXPECT(pthread_create(&thread, NULL, run, &second), 0);
	run(&first);
	EXPECT(pthread_join(thread, NULL), 0);
	while (context && readable(context->async_fd))
		read_one();
}

int main(int argc, char **argv)
{
	signal(SIGALRM, blocked);
	if (argc == 2 && !strcmp(argv[1], "serve"))
		serve();
	else if (argc == 3 && !strcmp(argv[1], "talk"))
		talk(argv[2]);
	else if (argc == 4 && !strcmp(argv[1], "random"))
		histories(NULL, argv[2], argv[3]);
	else if (argc == 5 && !strcmp(argv[1], "random"))
		histories(argv[4], argv[2], argv[3]);
	else
		return 2;
	say("done");
	return 0;
}
