/* A queue pair that the program prepares on one identifier and moves to another by the public field: moved s|c ADDRESS. */
#include <arpa/inet.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) do { if (!(x)) { printf("%s: %s\n", #x, strerror(errno)); exit(1); } } while (0)

static struct rdma_event_channel *channel;

static struct rdma_cm_event *next(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;

	CHECK(!rdma_get_cm_event(channel, &event));
	printf("%s\n", rdma_event_str(event->event));
	CHECK(event->event == type);
	return event;
}

static struct rdma_cm_id *bound(struct sockaddr_in *address)
{
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)address));
	return id;
}

/* Takes the queue pair of `from`, which ends. */
static void take_qp(struct rdma_cm_id *to, struct rdma_cm_id *from)
{
	to->qp = from->qp;
	from->qp = NULL;
	CHECK(!rdma_destroy_id(from));
}

static void serve(struct sockaddr_in address)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_conn_param none = { 0 };
	struct rdma_cm_id *listener, *prepared, *id;
	struct rdma_cm_event *request;

	listener = bound(&address);
	CHECK(!rdma_listen(listener, 1));
	address.sin_port = 0;
	prepared = bound(&address);
	CHECK(!rdma_create_qp(prepared, NULL, &init));
	printf("listening\n");
	fflush(stdout);
	request = next(RDMA_CM_EVENT_CONNECT_REQUEST);
	id = request->id;
	take_qp(id, prepared);
	CHECK(!rdma_accept(id, &none));
	rdma_ack_cm_event(request);
	rdma_ack_cm_event(next(RDMA_CM_EVENT_ESTABLISHED));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_DISCONNECTED));
	rdma_destroy_qp(id);
	rdma_destroy_id(id);
}

static struct rdma_cm_id *resolved(struct sockaddr_in *address)
{
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)address, 2000));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_ADDR_RESOLVED));
	CHECK(!rdma_resolve_route(id, 2000));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_ROUTE_RESOLVED));
	return id;
}

static void talk(struct sockaddr_in address)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_conn_param none = { 0 };
	struct rdma_cm_id *id = resolved(&address), *prepared = resolved(&address);

	CHECK(!rdma_create_qp(prepared, NULL, &init));
	take_qp(id, prepared);
	CHECK(!rdma_connect(id, &none));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_ESTABLISHED));
	CHECK(!rdma_disconnect(id));
	rdma_ack_cm_event(next(RDMA_CM_EVENT_DISCONNECTED));
	rdma_destroy_qp(id);
	rdma_destroy_id(id);
}

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(7777) };

	CHECK(count == 3 && inet_aton(arguments[2], &address.sin_addr));
	CHECK(channel = rdma_create_event_channel());
	(arguments[1][0] == 's' ? serve : talk)(address);
	printf("done\n");
	return 0;
}
