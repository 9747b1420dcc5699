/*
 * One end of connections over rdma_cm, for what the programs of Debian's packages do not do: private data of
 * any length both ways, rejections, and a peer that lays its memory open to whoever wants to break the rules.
 *
 *     cm accept ADDRESS PORT BYTES       one connection after the other, until killed
 *     cm reject ADDRESS PORT BYTES       the same
 *     cm connect ADDRESS PORT BYTES      leaves as soon as it is established
 *
 * BYTES is how much private data it sends, all of it the letter a. What happens is told a line each:
 * "request N", "established N", "rejected N" (N bytes of private data came), "disconnected", other
 * events by their names. Each accepted connection has eight receives of 64 bytes, and before it is accepted
 *
 *     memory OPEN CLOSED ADDRESS LENGTH
 *
 * is told: keys of two regions of the same LENGTH bytes at ADDRESS, of which the peer may write and read the
 * first and not the second.
 */
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RECEIVES = 8, RECEIVE_BYTES = 64, MEMORY_BYTES = 4096, RESOLVE_MS = 5000 };

static char memory[MEMORY_BYTES] __attribute__((aligned(MEMORY_BYTES)));
static char inbox[RECEIVES * RECEIVE_BYTES];
static char private_data[255];

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void tell(struct rdma_cm_event *event)
{
	const char *bytes = event->param.conn.private_data, *word;
	int length = bytes ? event->param.conn.private_data_len : 0;

	switch (event->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		word = "request";
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		word = "established";
		break;
	case RDMA_CM_EVENT_REJECTED:
		word = "rejected";
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		puts("disconnected");
		return;
	default:
		puts(rdma_event_str(event->event));
		return;
	}
	for (int i = 0; i < length; i++)
		if (bytes[i] != 'a')
			printf("byte %d of the private data is wrong\n", i);
	printf("%s %d\n", word, length);
}

/* The next event. Its identifier is of use after it is acknowledged, its private data is not. */
static enum rdma_cm_event_type next(struct rdma_event_channel *channel, struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;

	must(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
	tell(event);
	type = event->event;
	if (id)
		*id = event->id;
	rdma_ack_cm_event(event);
	return type;
}

static void make_queue_pair(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_mr *mr;

	must(!rdma_create_qp(id, pd, &attr), "rdma_create_qp");
	mr = ibv_reg_mr(pd, inbox, sizeof(inbox), IBV_ACCESS_LOCAL_WRITE);
	must(mr != NULL, "ibv_reg_mr");
	for (int i = 0; i < RECEIVES; i++) {
		struct ibv_sge sge = { (uintptr_t)inbox + i * RECEIVE_BYTES, RECEIVE_BYTES, mr->lkey };
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

		must(!ibv_post_recv(id->qp, &wr, &bad), "ibv_post_recv");
	}
}

/* Regions of the one connection at a time, made anew for each: nobody cares for the old ones. */
static void prepare(struct rdma_cm_id *id)
{
	struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 64, NULL, NULL, 0);
	int remote = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_mr *open, *closed;

	must(pd && cq, "protection domain and completion queue");
	open = ibv_reg_mr(pd, memory, sizeof(memory), remote);
	closed = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	must(open && closed, "ibv_reg_mr");
	make_queue_pair(id, pd, cq);
	printf("memory %u %u %lu %d\n", open->rkey, closed->rkey, (unsigned long)memory, MEMORY_BYTES);
}

static void serve(struct sockaddr *address, int bytes, int accept)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = {
		.private_data = private_data, .private_data_len = bytes, .responder_resources = 4, .initiator_depth = 4,
	};
	struct rdma_cm_id *listener, *id;

	must(channel && !rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
	must(!rdma_bind_addr(listener, address), "rdma_bind_addr");
	must(!rdma_listen(listener, 8), "rdma_listen");
	for (;;) {
		if (next(channel, &id) != RDMA_CM_EVENT_CONNECT_REQUEST)
			continue;
		if (accept) {
			prepare(id);
			must(!rdma_accept(id, &param), "rdma_accept");
		} else {
			must(!rdma_reject(id, private_data, bytes), "rdma_reject");
		}
	}
}

static int ask(struct sockaddr *peer, int bytes)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = {
		.private_data = private_data, .private_data_len = bytes, .responder_resources = 4, .initiator_depth = 4,
	};
	struct rdma_cm_id *id;

	must(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
	must(!rdma_resolve_addr(id, NULL, peer, RESOLVE_MS), "rdma_resolve_addr");
	must(next(channel, NULL) == RDMA_CM_EVENT_ADDR_RESOLVED, "address");
	must(!rdma_resolve_route(id, RESOLVE_MS), "rdma_resolve_route");
	must(next(channel, NULL) == RDMA_CM_EVENT_ROUTE_RESOLVED, "route");
	prepare(id);
	must(!rdma_connect(id, &param), "rdma_connect");
	if (next(channel, NULL) != RDMA_CM_EVENT_ESTABLISHED)
		return 1;
	must(!rdma_disconnect(id), "rdma_disconnect");
	next(channel, NULL);
	return 0;
}

int main(int argc, char **argv)
{
	struct addrinfo *address;

	setlinebuf(stdout);
	memset(private_data, 'a', sizeof(private_data));
	if (argc != 5) {
		fprintf(stderr, "usage: cm accept|reject|connect ADDRESS PORT BYTES\n");
		return 2;
	}
	must(!getaddrinfo(argv[2], argv[3], NULL, &address), "getaddrinfo");
	if (!strcmp(argv[1], "connect"))
		return ask(address->ai_addr, atoi(argv[4]));
	serve(address->ai_addr, atoi(argv[4]), !strcmp(argv[1], "accept"));
	return 1;
}
