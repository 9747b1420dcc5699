/* Many connections of one honest program: "storm CASE [ADDRESS] NUMBER". */
#include "ends.h"

#include <arpa/inet.h>

/* A port at which nobody listens. */
#define EMPTY_PORT 7251
#define ADDRESS_MS 10000

static void prepare(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };

	CHECK(rdma_create_qp(id, NULL, &init) == 0);
}

static struct sockaddr_in at(const char *address, int port)
{
	struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(port) };

	CHECK(inet_pton(AF_INET, address, &in.sin_addr) == 1);
	return in;
}

/* Takes the next event of any kind, and returns its identifier. */
static struct rdma_cm_id *any(struct end *end, enum rdma_cm_event_type *type)
{
	struct pollfd fd = { .fd = end->channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	CHECK(poll(&fd, 1, LIMIT_MS) == 1);
	CHECK(rdma_get_cm_event(end->channel, &event) == 0);
	if (event->status)
		printf("%s with status %d\n", rdma_event_str(event->event), event->status);
	*type = event->event;
	id = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	return id;
}

/* Accepts so many connections, and waits until the peer has closed all of them. */
static void serve(int number)
{
	struct rdma_conn_param none = { 0 };
	struct end end = { 0 };
	int established = 0;

	CHECK(end.channel = rdma_create_event_channel());
	CHECK(rdma_create_id(end.channel, &end.listener, NULL, RDMA_PS_TCP) == 0);
	EXPECT(bind_to(end.listener, NULL), 0);
	CHECK(rdma_listen(end.listener, number) == 0);
	say("listening");
	for (int closed = 0; closed < number;) {
		enum rdma_cm_event_type type;
		struct rdma_cm_id *id = any(&end, &type);

		if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			prepare(id);
			CHECK(rdma_accept(id, &none) == 0);
		} else if (type == RDMA_CM_EVENT_DISCONNECTED) {
			rdma_destroy_qp(id);
			EXPECT(rdma_destroy_id(id), 0);
			closed++;
		} else {
			EXPECT(type, RDMA_CM_EVENT_ESTABLISHED);
			established++;
		}
	}
	EXPECT(established, number);
	EXPECT(rdma_destroy_id(end.listener), 0);
	rdma_destroy_event_channel(end.channel);
}

/* Starts so many connections before it reads any event. Each must be established. */
static void burst(const char *address, int number)
{
	struct sockaddr_in peer = at(address, atoi(PORT));
	struct rdma_cm_id **ids = calloc(number, sizeof *ids);
	struct rdma_conn_param none = { 0 };
	struct end end = { 0 };

	CHECK(end.channel = rdma_create_event_channel());
	for (int i = 0; i < number; i++) {
		CHECK(rdma_create_id(end.channel, &ids[i], NULL, RDMA_PS_TCP) == 0);
		CHECK(rdma_resolve_addr(ids[i], NULL, (struct sockaddr *)&peer, ADDRESS_MS) == 0);
	}
	for (int established = 0; established < number;) {
		enum rdma_cm_event_type type;
		struct rdma_cm_id *id = any(&end, &type);

		if (type == RDMA_CM_EVENT_ADDR_RESOLVED) {
			CHECK(rdma_resolve_route(id, ADDRESS_MS) == 0);
		} else if (type == RDMA_CM_EVENT_ROUTE_RESOLVED) {
			prepare(id);
			CHECK(rdma_connect(id, &none) == 0);
		} else {
			EXPECT(type, RDMA_CM_EVENT_ESTABLISHED);
			established++;
		}
	}
	for (int i = 0; i < number; i++)
		CHECK(rdma_disconnect(ids[i]) == 0);
	for (int i = 0; i < number; i++) {
		enum rdma_cm_event_type type;
		struct rdma_cm_id *id = any(&end, &type);

		EXPECT(type, RDMA_CM_EVENT_DISCONNECTED);
		rdma_destroy_qp(id);
		EXPECT(rdma_destroy_id(id), 0);
	}
	free(ids);
	rdma_destroy_event_channel(end.channel);
}

/* So many attempts, one after the other, to connect where nobody listens. Each fails by the peer's refusal, and not before. */
static void refused(const char *address, int number)
{
	struct sockaddr_in peer = at(address, EMPTY_PORT);
	struct rdma_conn_param none = { 0 };
	struct end end = { 0 };

	CHECK(end.channel = rdma_create_event_channel());
	for (int i = 0; i < number; i++) {
		CHECK(rdma_create_id(end.channel, &end.id, NULL, RDMA_PS_TCP) == 0);
		CHECK(rdma_resolve_addr(end.id, NULL, (struct sockaddr *)&peer, ADDRESS_MS) == 0);
		step(&end, RDMA_CM_EVENT_ADDR_RESOLVED);
		CHECK(rdma_resolve_route(end.id, ADDRESS_MS) == 0);
		step(&end, RDMA_CM_EVENT_ROUTE_RESOLVED);
		prepare(end.id);
		CHECK(rdma_connect(end.id, &none) == 0);
		step(&end, RDMA_CM_EVENT_REJECTED);
		rdma_destroy_qp(end.id);
		EXPECT(rdma_destroy_id(end.id), 0);
	}
	rdma_destroy_event_channel(end.channel);
}

/* Binds so many identifiers to ports of the system's choice, and says how many could not be. */
static void ports(const char *address, int number)
{
	struct sockaddr_in any_port = at(address, 0);
	struct rdma_event_channel *channel;
	int failed = 0;

	CHECK(channel = rdma_create_event_channel());
	for (int i = 0; i < number; i++) {
		struct rdma_cm_id *id;

		CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
		failed += rdma_bind_addr(id, (struct sockaddr *)&any_port) != 0;
	}
	printf("%d without a port\n", failed);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	if (!strcmp(what, "serve") && argc > 2)
		serve(atoi(argv[2]));
	else if (!strcmp(what, "burst") && argc > 3)
		burst(argv[2], atoi(argv[3]));
	else if (!strcmp(what, "refused") && argc > 3)
		refused(argv[2], atoi(argv[3]));
	else if (!strcmp(what, "ports") && argc > 3)
		ports(argv[2], atoi(argv[3]));
	else
		return 2;
	puts("done");
	return 0;
}
