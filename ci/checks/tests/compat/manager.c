/* The connection manager's listeners, addresses, options and channels: "manager CASE [ARGUMENT...]". */
#include "ends.h"

#include <fcntl.h>
#include <pthread.h>

/* Time limit for a peer that is killed to be missed. */
#define MISSED_MS 60000
/* Connections of the cases with many, and threads at each end. */
#define MANY 32
#define THREADS 4

/* Codepoint 18 of Differentiated Services, in its octet. */
#define LISTENER_TOS (18 << 2)
/* The one message that each client sends. */
#define MESSAGE "hello"

static struct rdma_cm_id *new_id(struct end *end, const char *name)
{
	struct rdma_cm_id *id;

	if (!end->channel)
		CHECK(end->channel = rdma_create_event_channel());
	CHECK(rdma_create_id(end->channel, &id, (void *)name, RDMA_PS_TCP) == 0);
	return id;
}

static int set_flag(struct rdma_cm_id *id, int option, int value)
{
	return rdma_set_option(id, RDMA_OPTION_ID, option, &value, sizeof value) ? errno : 0;
}

static struct rdma_cm_id *listener_at(struct end *end, const char *address, const char *name, int only_family)
{
	struct rdma_cm_id *id = new_id(end, name);
	uint8_t tos = LISTENER_TOS;

	CHECK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1) == 0);
	if (only_family)
		EXPECT(set_flag(id, RDMA_OPTION_ID_AFONLY, 1), 0);
	EXPECT(bind_to(id, address), 0);
	CHECK(rdma_listen(id, 4) == 0);
	return id;
}

/* Accepts the next request. An identifier of a request has its listener's context. */
static void accept_next(struct end *end)
{
	await_peer(end);
	printf("%s through %s\n", (char *)end->id->context, ibv_get_device_name(end->id->verbs->device));
	fflush(stdout);
	equip(end, NULL, 0);
	receives(end, 1);
	accept_request(end);
}

static void take_message(struct end *end)
{
	EXPECT(completion(end).byte_len, sizeof MESSAGE);
	EXPECT(memcmp(end->memory, MESSAGE, sizeof MESSAGE), 0);
}

static void give_message(struct end *end)
{
	strcpy(end->memory, MESSAGE);
	post(end, IBV_WR_SEND, sizeof MESSAGE, 0, 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
}

static void await_end(struct end *end)
{
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	hang_up(end);
}

/* "serve NUMBER [ADDRESS...]": a listener at each address, or one at the wildcard, serves so many connections. */
static void serve(int number, char **addresses)
{
	struct end end = { 0 };
	struct rdma_cm_id *listeners[4];
	int count = 0;

	do {
		const char *address = *addresses;

		listeners[count++] = listener_at(&end, address, address ? address : "wildcard", !!address);
	} while (*addresses && *++addresses);
	say("listening");
	while (number-- > 0) {
		accept_next(&end);
		take_message(&end);
		await_end(&end);
	}
	while (count > 0)
		EXPECT(rdma_destroy_id(listeners[--count]), 0);
	rdma_destroy_event_channel(end.channel);
}

/* "talk ADDRESS [TOS]": connects, sends one message and leaves. */
static void talk(const char *address, const char *tos)
{
	struct end end = { 0 };
	uint8_t value = tos ? atoi(tos) : 0;

	resolve(&end, address);
	if (tos)
		CHECK(rdma_set_option(end.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &value, 1) == 0);
	equip(&end, NULL, 0);
	connect_to(&end);
	give_message(&end);
	leave(&end);
}

/* "again": a second listener takes the port of the first one, whose connection goes on. */
static void again(const char *first, const char *second)
{
	struct end one = { 0 }, two = { 0 };

	one.listener = listener_at(&one, first, "first", 0);
	say("listening");
	accept_next(&one);
	take_message(&one);
	EXPECT(rdma_destroy_id(one.listener), 0);
	two.listener = listener_at(&two, second, "second", 0);
	one.listener = NULL;
	give_message(&one);
	accept_next(&two);
	take_message(&two);
	await_end(&two);
	await_end(&one);
	rdma_destroy_id(two.listener);
}

/* "both ADDRESS": the client of "again". The message from there says that the second listener is ready. */
static void both(const char *address)
{
	struct end one = { 0 }, two = { 0 };

	resolve(&one, address);
	equip(&one, NULL, 0);
	receives(&one, 1);
	connect_to(&one);
	give_message(&one);
	take_message(&one);
	resolve(&two, address);
	equip(&two, NULL, 0);
	connect_to(&two);
	give_message(&two);
	leave(&two);
	leave(&one);
}

/* "addresses ADDRESS ADDRESS": which identifiers exclude each other, by the rules of the kernel's connection manager. */
static void addresses(const char *here, const char *there)
{
	struct end end = { 0 };
	struct rdma_cm_id *a = new_id(&end, "a"), *b = new_id(&end, "b"), *c = new_id(&end, "c");

	EXPECT(bind_to(a, here), 0);
	EXPECT(bind_to(a, here), EINVAL);
	EXPECT(bind_to(b, here), EADDRINUSE);
	EXPECT(bind_to(b, NULL), EADDRNOTAVAIL);
	EXPECT(bind_to(b, there), 0);
	rdma_destroy_id(a);
	rdma_destroy_id(b);

	/* Identifiers share an address if both want to, and then none of them may listen. */
	a = new_id(&end, "a");
	b = new_id(&end, "b");
	EXPECT(set_flag(a, RDMA_OPTION_ID_REUSEADDR, 1), 0);
	EXPECT(bind_to(a, here), 0);
	EXPECT(bind_to(b, here), EADDRINUSE);
	EXPECT(set_flag(b, RDMA_OPTION_ID_REUSEADDR, 1), 0);
	EXPECT(bind_to(b, here), 0);
	CHECK(rdma_listen(a, 1) == -1);
	EXPECT(errno, EADDRINUSE);
	rdma_destroy_id(b);
	CHECK(rdma_listen(a, 1) == 0);
	CHECK(rdma_listen(a, 1) == -1);
	EXPECT(errno, EINVAL);
	EXPECT(set_flag(a, RDMA_OPTION_ID_REUSEADDR, 0), EINVAL);
	EXPECT(set_flag(a, RDMA_OPTION_ID_AFONLY, 1), EINVAL);
	EXPECT(set_flag(c, RDMA_OPTION_ID_REUSEADDR, 1), 0);
	EXPECT(bind_to(c, here), EADDRINUSE);
	rdma_destroy_id(a);

	/* Wildcards of two families exclude each other, unless both stand for their family only. */
	a = new_id(&end, "a");
	b = new_id(&end, "b");
	EXPECT(bind_to(a, "0.0.0.0"), 0);
	EXPECT(bind_to(b, "::"), EADDRNOTAVAIL);
	EXPECT(set_flag(a, RDMA_OPTION_ID_AFONLY, 1), EINVAL);
	rdma_destroy_id(a);
	a = new_id(&end, "a");
	EXPECT(set_flag(a, RDMA_OPTION_ID_AFONLY, 1), 0);
	EXPECT(set_flag(b, RDMA_OPTION_ID_AFONLY, 1), 0);
	EXPECT(bind_to(a, "0.0.0.0"), 0);
	EXPECT(bind_to(b, "::"), 0);
	CHECK(rdma_listen(a, 1) == 0);
	CHECK(rdma_listen(b, 1) == 0);
	rdma_destroy_id(a);
	rdma_destroy_id(b);
	rdma_destroy_id(c);

	/* Without an address, a listener gets a free port. */
	a = new_id(&end, "a");
	CHECK(rdma_listen(a, 1) == 0);
	CHECK(rdma_get_src_port(a) != 0);
	rdma_destroy_id(a);
	rdma_destroy_event_channel(end.channel);
}

/* "idle": the client's process is killed while nobody sends. */
static void idle(void)
{
	struct end end = { 0 };
	struct rdma_cm_event *event;
	struct pollfd fd;

	end.listener = listener_at(&end, NULL, "wildcard", 0);
	say("listening");
	accept_next(&end);
	fd = (struct pollfd){ .fd = end.channel->fd, .events = POLLIN };
	EXPECT(poll(&fd, 1, MISSED_MS), 1);
	CHECK(rdma_get_cm_event(end.channel, &event) == 0);
	EXPECT(event->event, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(rdma_ack_cm_event(event) == 0);
	EXPECT(completion(&end).status, IBV_WC_WR_FLUSH_ERR);
	end.gone = 1;
	leave(&end);
}

/* "stay ADDRESS": connects and does nothing more. */
static void stay(const char *address)
{
	struct end end = { 0 };

	resolve(&end, address);
	EXPECT(rdma_notify(end.id, IBV_EVENT_COMM_EST) ? errno : 0, EINVAL);
	equip(&end, NULL, 0);
	connect_to(&end);
	EXPECT(rdma_notify(end.id, IBV_EVENT_COMM_EST), 0);
	EXPECT(rdma_establish(end.id) ? errno : 0, EINVAL);
	say("connected");
	pause();
}

/* "silent ADDRESS": the peer's TCP answers, and no MPA Reply comes. */
static void silent(const char *address)
{
	struct rdma_cm_event *event;
	struct end end = { 0 };

	resolve(&end, address);
	equip(&end, NULL, 0);
	receives(&end, 1);
	CHECK(rdma_connect(end.id, &(struct rdma_conn_param){ 0 }) == 0);
	event = next(&end, RDMA_CM_EVENT_UNREACHABLE);
	EXPECT(event->status, -ETIMEDOUT);
	CHECK(rdma_ack_cm_event(event) == 0);
	end.gone = 1;
	leave(&end);
}

/* A queue pair for an identifier whose program does nothing but connect. */
static void equip_barely(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };

	CHECK(rdma_create_qp(id, NULL, &init) == 0);
}

static void accept_barely(struct rdma_cm_id *id)
{
	struct rdma_conn_param none = { 0 };

	equip_barely(id);
	CHECK(rdma_accept(id, &none) == 0);
}

static void end_barely(struct rdma_cm_id *id)
{
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

/* Threads that read one channel. */
struct readers {
	struct rdma_event_channel *channel;
	pthread_mutex_t lock;
	int established, ended;
};

static void *read_events(void *argument)
{
	struct readers *readers = argument;
	int ended = 0;

	while (ended < MANY) {
		struct pollfd fd = { .fd = readers->channel->fd, .events = POLLIN };
		struct rdma_cm_event *event;
		enum rdma_cm_event_type type;
		struct rdma_cm_id *id;

		poll(&fd, 1, 10);
		if (rdma_get_cm_event(readers->channel, &event)) {
			EXPECT(errno, EAGAIN);
			pthread_mutex_lock(&readers->lock);
			ended = readers->ended;
			pthread_mutex_unlock(&readers->lock);
			continue;
		}
		type = event->event;
		id = event->id;
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
			accept_barely(id);
		CHECK(rdma_ack_cm_event(event) == 0);
		if (type == RDMA_CM_EVENT_DISCONNECTED)
			end_barely(id);
		else if (type != RDMA_CM_EVENT_CONNECT_REQUEST)
			EXPECT(type, RDMA_CM_EVENT_ESTABLISHED);
		pthread_mutex_lock(&readers->lock);
		readers->established += type == RDMA_CM_EVENT_ESTABLISHED;
		readers->ended += type == RDMA_CM_EVENT_DISCONNECTED;
		pthread_mutex_unlock(&readers->lock);
	}
	return NULL;
}

/* "readers": several threads read the events of one channel. */
static void many_readers(void)
{
	struct readers readers = { .lock = PTHREAD_MUTEX_INITIALIZER };
	pthread_t threads[THREADS];
	struct rdma_cm_id *listener;
	struct end end = { 0 };

	listener = listener_at(&end, NULL, "wildcard", 0);
	readers.channel = end.channel;
	CHECK(fcntl(end.channel->fd, F_SETFL, fcntl(end.channel->fd, F_GETFL) | O_NONBLOCK) == 0);
	for (int i = 0; i < THREADS; i++)
		EXPECT(pthread_create(&threads[i], NULL, read_events, &readers), 0);
	say("listening");
	for (int i = 0; i < THREADS; i++)
		EXPECT(pthread_join(threads[i], NULL), 0);
	EXPECT(readers.established, MANY);
	EXPECT(readers.ended, MANY);
	EXPECT(rdma_destroy_id(listener), 0);
	rdma_destroy_event_channel(end.channel);
}

static struct rdma_cm_id *take(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct end end = { .channel = channel };
	struct rdma_cm_event *event = next(&end, type);
	struct rdma_cm_id *id = event->id;

	CHECK(rdma_ack_cm_event(event) == 0);
	return id;
}

/* "migrate": each identifier moves to a channel of its own, then to one of all connections, while peers come and go. */
static void migrate(void)
{
	struct rdma_event_channel *own, *all;
	struct rdma_cm_id *listener, *id;
	struct end end = { 0 };

	listener = listener_at(&end, NULL, "wildcard", 0);
	CHECK(all = rdma_create_event_channel());
	say("listening");
	for (int i = 0; i < MANY; i++) {
		id = take(end.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		CHECK(own = rdma_create_event_channel());
		CHECK(rdma_migrate_id(id, own) == 0);
		CHECK(id->channel == own);
		accept_barely(id);
		CHECK(take(own, RDMA_CM_EVENT_ESTABLISHED) == id);
		CHECK(rdma_migrate_id(id, all) == 0);
		rdma_destroy_event_channel(own);
	}
	for (int i = 0; i < MANY; i++)
		end_barely(take(all, RDMA_CM_EVENT_DISCONNECTED));
	EXPECT(rdma_destroy_id(listener), 0);
	rdma_destroy_event_channel(end.channel);
	rdma_destroy_event_channel(all);
}

static void *come_and_go(void *address)
{
	for (int i = 0; i < MANY / THREADS; i++) {
		struct rdma_conn_param none = { 0 };
		struct end end = { 0 };

		resolve(&end, address);
		equip_barely(end.id);
		CHECK(rdma_connect(end.id, &none) == 0);
		step(&end, RDMA_CM_EVENT_ESTABLISHED);
		CHECK(rdma_disconnect(end.id) == 0);
		step(&end, RDMA_CM_EVENT_DISCONNECTED);
		end_barely(end.id);
		rdma_destroy_event_channel(end.channel);
	}
	return NULL;
}

/* "crowd ADDRESS": the clients of the two cases above. */
static void crowd(char *address)
{
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++)
		EXPECT(pthread_create(&threads[i], NULL, come_and_go, address), 0);
	for (int i = 0; i < THREADS; i++)
		EXPECT(pthread_join(threads[i], NULL), 0);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	if (!strcmp(what, "serve") && argc > 2)
		serve(atoi(argv[2]), argv + 3);
	else if (!strcmp(what, "talk") && argc > 2)
		talk(argv[2], argv[3]);
	else if (!strcmp(what, "again") && argc > 2)
		again(argv[2], argv[3]);
	else if (!strcmp(what, "both") && argc > 2)
		both(argv[2]);
	else if (!strcmp(what, "addresses") && argc > 3)
		addresses(argv[2], argv[3]);
	else if (!strcmp(what, "idle"))
		idle();
	else if (!strcmp(what, "stay") && argc > 2)
		stay(argv[2]);
	else if (!strcmp(what, "silent") && argc > 2)
		silent(argv[2]);
	else if (!strcmp(what, "readers"))
		many_readers();
	else if (!strcmp(what, "migrate"))
		migrate();
	else if (!strcmp(what, "crowd") && argc > 2)
		crowd(argv[2]);
	else
		return 2;
	puts("done");
	return 0;
}
