/* Calls that wait for an event, signal handlers, and the cancellation of threads: "signals ADDRESS ABSENT": the address of a host,
   and one that no host has. */
#include "ends.h"

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

static struct rdma_event_channel *events;
static struct rdma_cm_id *active, *listener;
static struct ibv_context *context;
static struct ibv_comp_channel *completions;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static const char *present, *absent;

static struct rdma_addrinfo *info_of(const char *address)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *info;

	CHECK(rdma_getaddrinfo(address, PORT, &hints, &info) == 0);
	return info;
}

/* The calls. Each returns 0 or -1, as the call did. */
static int get_cm(void)
{
	struct rdma_cm_event *event;

	if (rdma_get_cm_event(events, &event))
		return -1;
	EXPECT(event->event, RDMA_CM_EVENT_ADDR_RESOLVED);
	return rdma_ack_cm_event(event);
}

static int get_cq(void)
{
	struct ibv_cq *found;
	void *its_context;

	if (ibv_get_cq_event(completions, &found, &its_context))
		return -1;
	CHECK(found == cq);
	ibv_ack_cq_events(found, 1);
	return 0;
}

static int get_async(void)
{
	struct ibv_async_event event;

	return ibv_get_async_event(context, &event);
}

static int get_request(void)
{
	struct rdma_cm_id *request;

	return rdma_get_request(listener, &request);
}

static void forget(void *id)
{
	rdma_destroy_id(id);
}

static int resolve_address(void)
{
	struct rdma_addrinfo *info = info_of(absent);
	struct rdma_cm_id *id;
	int result, error;

	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	pthread_cleanup_push(forget, id);
	result = rdma_resolve_addr(id, NULL, info->ai_dst_addr, LIMIT_MS);
	error = errno;
	pthread_cleanup_pop(1);
	errno = error;
	return result;
}

/* What brings an event, if the test can. */
static void cause_cm(void)
{
	CHECK(rdma_create_id(events, &active, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(active, NULL, info_of(present)->ai_dst_addr, 5000) == 0);
}

static void cause_cq(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
}

static const struct call {
	const char *name;
	int (*wait)(void);
	void (*cause)(void);
} calls[] = {
	{ "rdma_get_cm_event", get_cm, cause_cm },
	{ "ibv_get_cq_event", get_cq, cause_cq },
	{ "ibv_get_async_event", get_async, NULL },
	{ "rdma_get_request", get_request, NULL },
	{ "rdma_resolve_addr", resolve_address, NULL },
};
#define CALLS (sizeof calls / sizeof *calls)

static volatile int handled;

static void handle(int signal)
{
	(void)signal;
	handled = 1;
}

/* Signals every `ms` milliseconds from now on; 0: no more. */
static void signals(int flags, int ms)
{
	struct sigaction action = { .sa_handler = handle, .sa_flags = flags };
	struct itimerval timer = { { 0, ms * 1000 }, { 0, ms * 1000 } };

	handled = 0;
	EXPECT(sigaction(SIGALRM, &action, NULL), 0);
	EXPECT(setitimer(ITIMER_REAL, &timer, NULL), 0);
}

/* A handler without SA_RESTART ends the call, early or late. */
static void interrupted(const struct call *call)
{
	for (int ms = 2; ms <= 200; ms *= 10) {
		signals(0, ms);
		EXPECT(call->wait(), -1);
		EXPECT(errno, EINTR);
		CHECK(handled);
		signals(0, 0);
	}
}

static void *causing(void *of)
{
	usleep(300000);
	((const struct call *)of)->cause();
	return NULL;
}

/* After a handler with SA_RESTART the call goes on. */
static void restarted(const struct call *call)
{
	sigset_t all, before;
	pthread_t thread;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	EXPECT(pthread_create(&thread, NULL, causing, (void *)call), 0);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	signals(SA_RESTART, 20);
	EXPECT(call->wait(), 0);
	CHECK(handled);
	signals(SA_RESTART, 0);
	EXPECT(pthread_join(thread, NULL), 0);
}

static volatile int cleaned;

static void clean(void *argument)
{
	(void)argument;
	cleaned++;
}

static void *waiting(void *of)
{
	pthread_cleanup_push(clean, NULL);
	((const struct call *)of)->wait();
	pthread_cleanup_pop(0);
	return NULL;
}

/* A thread in the call can be cancelled, and its cleanup handlers run. */
static void cancelled(const struct call *call)
{
	for (int ms = 0; ms <= 100; ms += 100) {
		pthread_t thread;
		void *result;

		cleaned = 0;
		EXPECT(pthread_create(&thread, NULL, waiting, (void *)call), 0);
		usleep(ms * 1000);
		EXPECT(pthread_cancel(thread), 0);
		EXPECT(pthread_join(thread, &result), 0);
		CHECK(result == PTHREAD_CANCELED && cleaned == (ms > 0 ? 1 : cleaned));
	}
}

static void prepare(void)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	struct ibv_context **all = rdma_get_devices(NULL);
	struct ibv_pd *pd;

	CHECK(all && (context = all[0]));
	CHECK(events = rdma_create_event_channel());
	CHECK(rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP) == 0);
	EXPECT(bind_to(listener, NULL), 0);
	CHECK(rdma_listen(listener, 4) == 0);
	CHECK(pd = ibv_alloc_pd(context));
	CHECK(completions = ibv_create_comp_channel(context));
	CHECK(cq = ibv_create_cq(context, 8, NULL, completions, 0));
	init.send_cq = init.recv_cq = cq;
	CHECK(qp = ibv_create_qp(pd, &init));
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	EXPECT(ibv_req_notify_cq(cq, 0), 0);
	EXPECT(ibv_post_recv(qp, &wr, &bad), 0);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	present = argv[1];
	absent = argv[2];
	prepare();
	for (size_t i = 0; i < CALLS; i++) {
		say(calls[i].name);
		interrupted(&calls[i]);
		cancelled(&calls[i]);
		if (calls[i].cause)
			restarted(&calls[i]);
	}
	say("done");
	return 0;
}
