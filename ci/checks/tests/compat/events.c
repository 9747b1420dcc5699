/* Asynchronous events and their acknowledgement: "events CASE [ADDRESS]". Each case is of one end; its peer is of another. */
#define _GNU_SOURCE
#include "ends.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

/* Time after which a call that must wait still has to be waiting. */
#define MOMENT_US 200000

static struct ibv_async_event async_event(struct ibv_context *context, enum ibv_event_type type)
{
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	struct ibv_async_event event;

	EXPECT(poll(&fd, 1, LIMIT_MS), 1);
	EXPECT(ibv_get_async_event(context, &event), 0);
	EXPECT(event.event_type, type);
	return event;
}

static void no_async_event(struct ibv_context *context)
{
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };

	EXPECT(poll(&fd, 1, 0), 0);
}

/* A destruction on a thread of its own. */
struct destruction {
	pthread_t thread;
	int (*destroy)(void *);
	void *object;
	int result;
	volatile int done;
};

static void *destroying(void *argument)
{
	struct destruction *of = argument;

	of->result = of->destroy(of->object);
	of->done = 1;
	return NULL;
}

static int destroy_qp(void *qp)
{
	return ibv_destroy_qp(qp);
}

static int destroy_cq(void *cq)
{
	return ibv_destroy_cq(cq);
}

static int destroy_id(void *id)
{
	return rdma_destroy_id(id);
}

static void begin(struct destruction *of, int (*destroy)(void *), void *object)
{
	*of = (struct destruction){ .destroy = destroy, .object = object };
	EXPECT(pthread_create(&of->thread, NULL, destroying, of), 0);
	usleep(MOMENT_US);
	CHECK(!of->done);
}

static void end_of(struct destruction *of)
{
	EXPECT(pthread_join(of->thread, NULL), 0);
	EXPECT(of->result, 0);
}

/* The queue pair of `end` has failed with `type`. Its destruction waits for the acknowledgement. */
static void fails_with(struct end *end, enum ibv_event_type type)
{
	struct ibv_async_event event = async_event(end->id->verbs, type);
	struct destruction of;

	CHECK(event.element.qp == end->qp);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	begin(&of, destroy_qp, end->qp);
	ibv_ack_async_event(&event);
	end_of(&of);
	end->id->qp = NULL;
	no_async_event(end->id->verbs);
}

static void leave_without_qp(struct end *end)
{
	EXPECT(ibv_dereg_mr(end->mr), 0);
	EXPECT(ibv_destroy_cq(end->cq), 0);
	EXPECT(rdma_destroy_id(end->id), 0);
	if (end->listener)
		EXPECT(rdma_destroy_id(end->listener), 0);
	rdma_destroy_event_channel(end->channel);
}

static void serve(struct end *end)
{
	await_request(end);
	equip(end, NULL, 0);
	receives(end, 2);
	accept_request(end);
}

static void connect_from(struct end *end, const char *address)
{
	resolve(end, address);
	equip(end, NULL, 0);
	connect_to(end);
}

/* The peer writes where it may not. */
static void access_server(struct end *end)
{
	serve(end);
	fails_with(end, IBV_EVENT_QP_ACCESS_ERR);
	leave_without_qp(end);
}

static void access_client(struct end *end, const char *address)
{
	connect_from(end, address);
	post(end, IBV_WR_RDMA_WRITE, 8, 0, end->peer.key ^ 0x5500);
	fails_with(end, IBV_EVENT_QP_FATAL);
	leave_without_qp(end);
}

/* The peer sends more than the receive takes. */
static void request_server(struct end *end)
{
	serve(end);
	fails_with(end, IBV_EVENT_QP_REQ_ERR);
	leave_without_qp(end);
}

static void request_client(struct end *end, const char *address)
{
	connect_from(end, address);
	post(end, IBV_WR_SEND, 200, 0, 0);
	fails_with(end, IBV_EVENT_QP_FATAL);
	leave_without_qp(end);
}

/* More completions than the queue takes. */
static void overflow_server(struct end *end)
{
	serve(end);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

static void overflow_client(struct end *end, const char *address)
{
	struct ibv_async_event of_cq = { 0 }, of_qp = { 0 };
	struct destruction of;
	struct ibv_cq *cq;

	resolve(end, address);
	CHECK(cq = ibv_create_cq(end->id->verbs, 1, NULL, NULL, 0));
	EXPECT(cq->cqe, 1);
	equip(end, cq, 0);
	connect_to(end);
	post(end, IBV_WR_SEND, 8, 0, 0);
	post(end, IBV_WR_SEND, 8, 0, 0);
	for (int i = 0; i < 2; i++) {
		struct pollfd fd = { .fd = end->id->verbs->async_fd, .events = POLLIN };
		struct ibv_async_event event;

		EXPECT(poll(&fd, 1, LIMIT_MS), 1);
		EXPECT(ibv_get_async_event(end->id->verbs, &event), 0);
		if (event.event_type == IBV_EVENT_CQ_ERR)
			of_cq = event;
		else
			of_qp = event;
	}
	CHECK(of_cq.element.cq == cq);
	EXPECT(of_qp.event_type, IBV_EVENT_QP_FATAL);
	CHECK(of_qp.element.qp == end->qp);
	ibv_ack_async_event(&of_qp);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	EXPECT(ibv_destroy_qp(end->qp), 0);
	end->id->qp = NULL;
	begin(&of, destroy_cq, cq);
	ibv_ack_async_event(&of_cq);
	end_of(&of);
	EXPECT(ibv_dereg_mr(end->mr), 0);
	EXPECT(rdma_destroy_id(end->id), 0);
	rdma_destroy_event_channel(end->channel);
}

/* A queue pair that takes its receives from a shared queue ends. */
static void last_server(struct end *end)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_async_event event;

	await_request(end);
	equip(end, NULL, 1);
	receives(end, 2);
	accept_request(end);
	EXPECT(ibv_modify_qp(end->qp, &error, IBV_QP_STATE), 0);
	event = async_event(end->id->verbs, IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK(event.element.qp == end->qp);
	ibv_ack_async_event(&event);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

static void quiet_client(struct end *end, const char *address)
{
	connect_from(end, address);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* Each context gets the events of the port, and those of its own objects only. */
static void contexts_server(struct end *end)
{
	struct ibv_async_event event;
	struct ibv_context *other;

	serve(end);
	CHECK(other = ibv_open_device(end->id->verbs->device));
	no_async_event(other);
	say("changing");
	for (int i = 0; i < 2; i++) {
		event = async_event(i ? other : end->id->verbs, IBV_EVENT_GID_CHANGE);
		EXPECT(event.element.port_num, 1);
		ibv_ack_async_event(&event);
	}
	say("failing");
	event = async_event(end->id->verbs, IBV_EVENT_QP_ACCESS_ERR);
	ibv_ack_async_event(&event);
	no_async_event(other);
	EXPECT(ibv_close_device(other), 0);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

static void contexts_client(struct end *end, const char *address)
{
	sigset_t when;
	int signal;

	connect_from(end, address);
	/* The test says when. */
	sigemptyset(&when);
	sigaddset(&when, SIGUSR1);
	EXPECT(sigwait(&when, &signal), 0);
	post(end, IBV_WR_RDMA_WRITE, 8, 0, end->peer.key ^ 0x5500);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* Another Ethernet address: identifiers on the device are notified, and the connection continues. */
static void mac_server(struct end *end)
{
	serve(end);
	EXPECT(completion(end).byte_len, 8);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	/* A peer that closes in order is no failure of the queue pair, whatever is still posted. */
	EXPECT(completion(end).status, IBV_WC_WR_FLUSH_ERR);
	no_async_event(end->id->verbs);
	leave(end);
}

static void mac_client(struct end *end, const char *address)
{
	connect_from(end, address);
	say("changing");
	step(end, RDMA_CM_EVENT_ADDR_CHANGE);
	post(end, IBV_WR_SEND, 8, 0, 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	leave(end);
}

/* The posted requests of an ended device are flushed. */
static void flushed(struct end *end, int number)
{
	while (number-- > 0)
		EXPECT(completion(end).status, IBV_WC_WR_FLUSH_ERR);
	EXPECT(ibv_poll_cq(end->cq, 1, &(struct ibv_wc){ 0 }), 0);
}

/* The interface is removed: its objects are notified, and all can still be destroyed. A listener at the wildcard is on no device. */
static void removal_server(struct end *end)
{
	struct ibv_context *context;
	struct pollfd fd;

	serve(end);
	context = end->id->verbs;
	say("removing");
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	step(end, RDMA_CM_EVENT_DEVICE_REMOVAL);
	flushed(end, 2);
	for (;;) {
		struct ibv_async_event event;

		fd = (struct pollfd){ .fd = context->async_fd, .events = POLLIN };
		EXPECT(poll(&fd, 1, LIMIT_MS), 1);
		EXPECT(ibv_get_async_event(context, &event), 0);
		ibv_ack_async_event(&event);
		if (event.event_type == IBV_EVENT_DEVICE_FATAL)
			break;
	}
	fd = (struct pollfd){ .fd = end->channel->fd, .events = POLLIN };
	EXPECT(poll(&fd, 1, 0), 0);
	end->gone = 1;
	leave(end);
}

/* Those who wait for the events of a device return when it has ended. */
static void *await_async(void *context)
{
	struct ibv_async_event event;
	int fatal = 0;

	while (ibv_get_async_event(context, &event) == 0) {
		fatal += event.event_type == IBV_EVENT_DEVICE_FATAL;
		ibv_ack_async_event(&event);
	}
	EXPECT(errno, EIO);
	EXPECT(fatal, 1);
	return NULL;
}

static void *await_completions(void *channel)
{
	struct ibv_cq *cq;
	void *context;

	EXPECT(ibv_get_cq_event(channel, &cq, &context), -1);
	EXPECT(errno, EIO);
	return NULL;
}

static void removal_client(struct end *end, const char *address)
{
	struct ibv_comp_channel *channel;
	struct rdma_cm_event *event;
	struct rdma_cm_id *bound;
	struct destruction of;
	pthread_t waits[2];

	resolve(end, address);
	equip(end, NULL, 0);
	receives(end, 3);
	connect_to(end);
	CHECK(channel = ibv_create_comp_channel(end->id->verbs));
	EXPECT(pthread_create(&waits[0], NULL, await_async, end->id->verbs), 0);
	EXPECT(pthread_create(&waits[1], NULL, await_completions, channel), 0);
	usleep(MOMENT_US);
	CHECK(rdma_create_id(end->channel, &bound, NULL, RDMA_PS_TCP) == 0);
	{
		struct sockaddr_storage any_port;

		memcpy(&any_port, rdma_get_local_addr(end->id), sizeof(struct sockaddr_in));
		((struct sockaddr_in *)&any_port)->sin_port = 0;
		EXPECT(rdma_bind_addr(bound, (struct sockaddr *)&any_port), 0);
	}
	say("removing");
	/* The two identifiers' events are in the order of each. The first call waits. */
	for (int told = 0, removed = 0; removed < 2 || !told;) {
		CHECK(rdma_get_cm_event(end->channel, &event) == 0);
		if (event->event == RDMA_CM_EVENT_DISCONNECTED) {
			CHECK(event->id == end->id);
			told = 1;
		} else {
			EXPECT(event->event, RDMA_CM_EVENT_DEVICE_REMOVAL);
			CHECK(event->id == bound || told);
			removed++;
		}
		if (removed == 2)
			break;
		CHECK(rdma_ack_cm_event(event) == 0);
	}
	for (int i = 0; i < 2; i++)
		EXPECT(pthread_join(waits[i], NULL), 0);
	EXPECT(ibv_destroy_comp_channel(channel), 0);
	flushed(end, 3);
	/* The last event was not acknowledged yet: its identifier's end waits for that. */
	end->gone = 1;
	rdma_destroy_qp(end->id);
	EXPECT(ibv_dereg_mr(end->mr), 0);
	EXPECT(ibv_destroy_cq(end->cq), 0);
	CHECK(event->id == bound || event->id == end->id);
	begin(&of, destroy_id, event->id);
	EXPECT(rdma_destroy_id(event->id == bound ? end->id : bound), 0);
	CHECK(rdma_ack_cm_event(event) == 0);
	end_of(&of);
	rdma_destroy_event_channel(end->channel);
}

/* Whether the thread's next reading of the clock fails, by which the code that reads it panics. */
static __thread int clock_fails;

/* Stands before the C library's, also for the drop-in library. */
int clock_gettime(clockid_t clock, struct timespec *time)
{
	if (clock_fails) {
		clock_fails = 0;
		errno = EINVAL;
		return -1;
	}
	return syscall(SYS_clock_gettime, clock, time);
}

/* The test ends this end. */
static void panic_server(struct end *end)
{
	serve(end);
	pause();
}

/* The engine panics in a call of the program, while another thread waits. */
static void panic_client(struct end *end, const char *address)
{
	struct pollfd fd = { .events = POLLIN };
	struct rdma_cm_event *event;
	pthread_t waits;
	int found = 0;

	resolve(end, address);
	equip(end, NULL, 0);
	receives(end, 3);
	connect_to(end);
	EXPECT(pthread_create(&waits, NULL, await_async, end->id->verbs), 0);
	usleep(MOMENT_US);
	clock_fails = 1;
	while (clock_fails)
		found += ibv_poll_cq(end->cq, 1, &(struct ibv_wc){ 0 });
	flushed(end, 3 - found);
	EXPECT(pthread_join(waits, NULL), 0);
	fd.fd = end->channel->fd;
	EXPECT(poll(&fd, 1, LIMIT_MS), 1);
	event = next(end, RDMA_CM_EVENT_DEVICE_REMOVAL);
	CHECK(event->id == end->id);
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(!ibv_reg_mr(end->pd, end->memory, SIZE, IBV_ACCESS_LOCAL_WRITE));
	EXPECT(errno, EIO);
	end->gone = 1;
	leave(end);
}

static const struct {
	const char *name;
	void (*server)(struct end *end);
	void (*client)(struct end *end, const char *address);
} cases[] = {
	{ "access", access_server, access_client },
	{ "request", request_server, request_client },
	{ "overflow", overflow_server, overflow_client },
	{ "last", last_server, quiet_client },
	{ "contexts", contexts_server, contexts_client },
	{ "mac", mac_server, mac_client },
	{ "removal", removal_server, removal_client },
	{ "panic", panic_server, panic_client },
};

int main(int argc, char **argv)
{
	struct end end = { 0 };
	sigset_t when;

	/* Before any thread is started, so that only the one that waits for it gets it. */
	sigemptyset(&when);
	sigaddset(&when, SIGUSR1);
	sigprocmask(SIG_BLOCK, &when, NULL);
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
