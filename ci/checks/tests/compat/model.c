/* Random sequences of calls beside a model of the objects' lifetimes: "model SEED CALLS". Each call gets objects that live, that were
 * destroyed, that are of another kind, or null; the model knows which calls must succeed, and the error of the others. With "model SEED CALLS
 * watched", a second thread asks for the attributes and events of the same objects all the time, which must not change any outcome. With "model
 * SEED CALLS two", there is another thread that makes such calls for objects of its own, in the same device. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum kind { PD, CHANNEL, CQ, SRQ, QP, MR, MW, KINDS };

struct object {
	enum kind kind;
	void *pointer;
	int alive, users;
	/* The objects that it uses, or -1. */
	int uses[4];
};

#define MOST 400
struct model {
	struct object objects[MOST];
	int number;
	/* The object that was created last. */
	struct object *last;
	uint64_t state;
	long call;
};
/* Each thread that changes lifetimes has a model. */
static struct model models[2];
static __thread struct model *own = &models[0];
static int two;
static struct ibv_context *context;
static char memory[1 << 16];

static uint32_t chance(uint32_t below)
{
	own->state = own->state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(own->state >> 33) % below;
}

#define EXPECT(what, wanted)                                                                                       \
	do {                                                                                                       \
		long got_ = (long)(what), wanted_ = (long)(wanted);                                                \
		if (got_ != wanted_) {                                                                             \
			printf("call %ld, line %d: %s is %ld, not %ld\n", own->call, __LINE__, #what, got_, wanted_);   \
			exit(1);                                                                                   \
		}                                                                                                  \
	} while (0)

/* An object for an argument: mostly a living one of the kind. -1: null. */
static int pick(enum kind kind)
{
	if (own->number == 0 || chance(20) == 0)
		return -1;
	for (int tries = 0; tries < 8; tries++) {
		int i = chance(own->number);

		if (own->objects[i].kind == kind && own->objects[i].alive)
			return i;
	}
	int i = chance(own->number);
	/* The memory of a destroyed object may have become one of the other thread's. */
	return two && !own->objects[i].alive ? -1 : i;
}

static void *pointer(int i)
{
	return i < 0 ? NULL : own->objects[i].pointer;
}

static int valid(int i, enum kind kind)
{
	return i >= 0 && own->objects[i].alive && own->objects[i].kind == kind;
}

/* Notes a new object, unless there should be none. */
static void created(enum kind kind, void *made, int wanted, int error)
{
	EXPECT(made != NULL, wanted);
	if (!made) {
		EXPECT(errno, error);
		return;
	}
	/* The memory of a destroyed object is used again: its place here is, too. */
	struct object *object = NULL;
	for (int i = 0; i < own->number; i++)
		if (own->objects[i].pointer == made) {
			EXPECT(own->objects[i].alive, 0);
			object = &own->objects[i];
		}
	if (!object)
		object = &own->objects[own->number];
	own->last = object;
	*object = (struct object){ .kind = kind, .pointer = made, .alive = 1 };
	if (object == &own->objects[own->number])
		__atomic_store_n(&own->number, own->number + 1, __ATOMIC_RELEASE);
	for (int k = 0; k < 4; k++)
		object->uses[k] = -1;
}

/* The object created last uses this one. */
static void use(void *used)
{
	for (int i = 0; used && i < own->number; i++)
		for (int k = 0; own->objects[i].pointer == used && k < 4; k++)
			if (own->last->uses[k] < 0) {
				own->last->uses[k] = i;
				own->objects[i].users++;
				break;
			}
}

static void create(enum kind kind)
{
	void *used[4] = { 0 };
	int ok = 1, a, b, c;

	if (own->number == MOST)
		return;
	errno = 0;
	switch (kind) {
	case PD:
		ok = chance(10) != 0;
		created(PD, ibv_alloc_pd(ok ? context : NULL), ok, EINVAL);
		break;
	case CHANNEL: {
		struct ibv_comp_channel *channel = ibv_create_comp_channel(context);

		if (channel)
			fcntl(channel->fd, F_SETFL, O_NONBLOCK);
		created(CHANNEL, channel, 1, 0);
		break;
	}
	case CQ: {
		int entries = chance(6) ? (int)chance(500) + 1 : (int)chance(3) - 2, vector = chance(10) ? 0 : (int)chance(5) + 1;

		a = chance(2) ? pick(CHANNEL) : -1;
		used[0] = pointer(a);
		ok = (a < 0 || valid(a, CHANNEL)) && entries > 0 && vector == 0;
		created(CQ, ibv_create_cq(context, entries, NULL, used[0], vector), ok, EINVAL);
		break;
	}
	case SRQ: {
		struct ibv_srq_init_attr attr = { .attr = { .max_wr = 1 + chance(64), .max_sge = 1 + chance(32) } };

		a = pick(PD);
		used[0] = pointer(a);
		if (chance(10) == 0)
			attr.attr.max_sge = 33 + chance(1000);
		ok = valid(a, PD) && attr.attr.max_sge <= 32;
		created(SRQ, ibv_create_srq(used[0], &attr), ok, EINVAL);
		break;
	}
	case QP: {
		struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .sq_sig_all = chance(2),
						 .cap = { 1 + chance(64), chance(64), 1 + chance(32), chance(32), chance(1025) } };
		int d = chance(3) ? -1 : pick(SRQ), same_pd;

		a = pick(PD), b = pick(CQ), c = pick(CQ);
		used[0] = pointer(a), used[1] = pointer(b), used[2] = pointer(c), used[3] = pointer(d);
		attr.send_cq = used[1], attr.recv_cq = used[2], attr.srq = used[3];
		if (chance(10) == 0)
			attr.cap.max_inline_data = 1025 + chance(100000);
		if (chance(10) == 0)
			attr.cap.max_send_wr = 1u << (16 + chance(15));
		same_pd = 1;
		if (valid(a, PD) && valid(d, SRQ))
			same_pd = ((struct ibv_srq *)used[3])->pd == used[0];
		/* A queue pair and its shared receive queue are of one domain. */
		ok = valid(a, PD) && valid(b, CQ) && valid(c, CQ) && (d < 0 || valid(d, SRQ)) && same_pd &&
		     attr.cap.max_inline_data <= 1024 && attr.cap.max_send_wr < 65536;
		created(QP, ibv_create_qp(used[0], &attr), ok, EINVAL);
		break;
	}
	case MR: {
		size_t at = chance(sizeof memory), length = chance(sizeof memory - at + 1);
		int access = chance(8) ? IBV_ACCESS_LOCAL_WRITE | chance(32) : chance(32);

		a = pick(PD);
		used[0] = pointer(a);
		if (chance(4) == 0)
			access |= IBV_ACCESS_RELAXED_ORDERING;
		ok = valid(a, PD) && length > 0 &&
		     (access & IBV_ACCESS_LOCAL_WRITE || !(access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)));
		created(MR, ibv_reg_mr(used[0], memory + at, length, access), ok, EINVAL);
		break;
	}
	default: {
		int type = chance(4);

		a = pick(PD);
		used[0] = pointer(a);
		ok = valid(a, PD) && type == IBV_MW_TYPE_2;
		/* The inline function of the header follows the domain's pointer. */
		if (!valid(a, PD))
			return;
		created(MW, ibv_alloc_mw(used[0], type), ok, type == IBV_MW_TYPE_1 ? EOPNOTSUPP : EINVAL);
		break;
	}
	}
	if (ok)
		for (int k = 0; k < 4; k++)
			use(used[k]);
}

static int destruction(enum kind kind, void *pointer)
{
	switch (kind) {
	case PD:
		return ibv_dealloc_pd(pointer);
	case CHANNEL:
		return ibv_destroy_comp_channel(pointer);
	case CQ:
		return ibv_destroy_cq(pointer);
	case SRQ:
		return ibv_destroy_srq(pointer);
	case QP:
		return ibv_destroy_qp(pointer);
	case MR:
		return ibv_dereg_mr(pointer);
	default:
		return ibv_dealloc_mw(pointer);
	}
}

static void destroy(enum kind kind)
{
	int i = pick(kind);

	/* The inline function of the header follows the window's pointer. */
	if (kind == MW && !valid(i, MW))
		return;
	if (!valid(i, kind)) {
		EXPECT(destruction(kind, pointer(i)), EINVAL);
	} else if (own->objects[i].users > 0) {
		EXPECT(destruction(kind, pointer(i)), EBUSY);
	} else {
		EXPECT(destruction(kind, pointer(i)), 0);
		own->objects[i].alive = 0;
		for (int k = 0; k < 4; k++)
			if (own->objects[i].uses[k] >= 0)
				own->objects[own->objects[i].uses[k]].users--;
	}
}

/* Calls that change no lifetime. */
static void exercise(void)
{
	int i = pick(chance(KINDS)), error;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_srq_attr srq_attr = { .max_wr = 64 + chance(64), .srq_limit = chance(64) };
	struct ibv_wc wc[8];
	void *it = pointer(i);

	switch (chance(8)) {
	case 0:
		memset(&attr, chance(256), sizeof attr);
		attr.qp_state = chance(9);
		error = ibv_modify_qp(it, chance(8) ? &attr : NULL, IBV_QP_STATE);
		EXPECT(error == EINVAL || (error == 0 && valid(i, QP)), 1);
		break;
	case 1:
		EXPECT(ibv_query_qp(it, &attr, chance(1 << 20), &init), valid(i, QP) ? 0 : EINVAL);
		break;
	case 2:
		EXPECT(ibv_query_srq(it, &srq_attr), valid(i, SRQ) ? 0 : EINVAL);
		break;
	case 3:
		error = ibv_modify_srq(it, &srq_attr, chance(4));
		EXPECT(error == EINVAL || (error == 0 && valid(i, SRQ)), 1);
		break;
	case 4:
		error = ibv_resize_cq(it, (int)chance(1000) - 10);
		EXPECT(error == EINVAL || (error == 0 && valid(i, CQ)), 1);
		break;
	case 5:
		if (valid(i, QP) || valid(i, SRQ)) {
			struct ibv_sge sges[33] = { { (uintptr_t)memory, chance(1 << 20), chance(1 << 30) } };
			struct ibv_recv_wr wrs[2] = { { .wr_id = 1, .next = chance(2) ? &wrs[1] : NULL, .sg_list = sges, .num_sge = (int)chance(36) - 2 },
						      { .wr_id = 2, .sg_list = chance(2) ? sges : NULL, .num_sge = chance(2) } };
			struct ibv_recv_wr *bad = NULL;

			error = valid(i, QP) ? ibv_post_recv(it, wrs, &bad) : ibv_post_srq_recv(it, wrs, &bad);
			EXPECT(error == 0 || error == EINVAL || error == ENOMEM, 1);
			EXPECT(error == 0 || bad == &wrs[0] || bad == &wrs[1], 1);
			if (wrs[0].num_sge < 0)
				EXPECT(error, EINVAL);
		}
		break;
	case 6:
		if (valid(i, QP)) {
			struct ibv_sge sge = { (uintptr_t)memory, chance(2000), chance(1 << 30) };
			struct ibv_send_wr wr = { .sg_list = chance(4) ? &sge : NULL, .num_sge = (int)chance(36) - 2, .opcode = chance(16),
						  .send_flags = chance(32) }, *bad = NULL;

			if (wr.num_sge > 1)
				wr.num_sge = 1;
			wr.wr.atomic.rkey = chance(1 << 30);
			if (wr.opcode == IBV_WR_BIND_MW)
				break;
			/* Without a connection, only a queue pair in the error state takes requests: it flushes them. */
			EXPECT(ibv_query_qp(it, &attr, IBV_QP_STATE, &init), 0);
			error = ibv_post_send(it, &wr, &bad);
			EXPECT(error != 0 || attr.qp_state == IBV_QPS_ERR, 1);
			EXPECT(error == 0 || bad == &wr, 1);
		}
		break;
	default:
		if (valid(i, CQ)) {
			int most = chance(9), found = ibv_poll_cq(it, most, wc);

			EXPECT(found >= 0 && found <= most, 1);
			EXPECT(ibv_req_notify_cq(it, chance(2)), 0);
			ibv_ack_cq_events(it, chance(3));
		} else {
			struct ibv_cq *cq;
			void *of_cq;

			if (valid(i, CHANNEL) && ibv_get_cq_event(it, &cq, &of_cq) == 0)
				ibv_ack_cq_events(cq, 1);
			else if (!valid(i, CHANNEL))
				EXPECT(ibv_get_cq_event(it, &cq, &of_cq), -1);
			else
				EXPECT(errno, EAGAIN);
		}
	}
}

static int watching = 1;

/* Calls by another thread, of the kind that may come at any time: an object may be destroyed during the call. */
static void look_at(struct model *model, uint32_t round)
{
	int known = __atomic_load_n(&model->number, __ATOMIC_ACQUIRE), error;
	struct object *object = &model->objects[known ? round % known : 0];
	void *it = __atomic_load_n(&object->pointer, __ATOMIC_ACQUIRE);
	struct ibv_qp_init_attr init;
	struct ibv_srq_attr srq_attr;
	struct ibv_qp_attr attr;
	struct ibv_cq *cq;
	void *of_cq;

	/* Mostly living channels: their call takes longest. */
	if (round % 64 && (!__atomic_load_n(&object->alive, __ATOMIC_ACQUIRE) || object->kind != CHANNEL))
		return;
	error = ibv_query_qp(it, &attr, IBV_QP_STATE, &init);
	EXPECT(error == 0 || error == EINVAL, 1);
	error = ibv_query_srq(it, &srq_attr);
	EXPECT(error == 0 || error == EINVAL, 1);
	if (ibv_get_cq_event(it, &cq, &of_cq) == 0)
		ibv_ack_cq_events(cq, 1);
	else
		EXPECT(errno == EAGAIN || errno == EINVAL || errno == EINTR, 1);
	if (known && round % known == 0)
		sched_yield();
}

static void *watch(void *argument)
{
	for (uint32_t round = 0; __atomic_load_n(&watching, __ATOMIC_ACQUIRE); round++)
		look_at(&models[two ? round & 1 : 0], two ? round >> 1 : round);
	return argument;
}

/* Makes random calls, and destroys what is left. */
static void *follow(void *argument)
{
	long calls;

	own = argument;
	for (calls = own->call, own->call = 0; own->call < calls; own->call++) {
		uint32_t what = chance(10);

		if (what < 4)
			create(chance(KINDS));
		else if (what < 7)
			destroy(chance(KINDS));
		else
			exercise();
	}
	/* In an order in which nothing is used any more. */
	static const enum kind order[] = { QP, MW, MR, SRQ, CQ, CHANNEL, PD };
	for (size_t k = 0; k < sizeof order / sizeof *order; k++)
		for (int i = 0; i < own->number; i++)
			if (own->objects[i].alive && own->objects[i].kind == order[k]) {
				EXPECT(destruction(order[k], own->objects[i].pointer), 0);
				own->objects[i].alive = 0;
			}
	return NULL;
}

static void interrupt(int signal)
{
	(void)signal;
}

int main(int argc, char **argv)
{
	pthread_t watcher, second;
	int watched = argc > 3;
	long calls = argc > 2 ? atol(argv[2]) : 1000;
	struct ibv_device **list = ibv_get_device_list(NULL);

	sigaction(SIGUSR1, &(struct sigaction){ .sa_handler = interrupt }, NULL);
	two = watched && strcmp(argv[3], "two") == 0;
	for (int k = 0; k < 2; k++) {
		models[k].state = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1) + 1000 * k;
		models[k].call = calls;
	}
	context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	if (!context)
		return 2;
	ibv_free_device_list(list);
	if (watched)
		EXPECT(pthread_create(&watcher, NULL, watch, NULL), 0);
	if (two)
		EXPECT(pthread_create(&second, NULL, follow, &models[1]), 0);
	follow(&models[0]);
	if (two)
		EXPECT(pthread_join(second, NULL), 0);
	__atomic_store_n(&watching, 0, __ATOMIC_RELEASE);
	/* It may sleep at a channel that was created where another one had been, before that became non-blocking. */
	while (watched && pthread_tryjoin_np(watcher, NULL) != 0) {
		pthread_kill(watcher, SIGUSR1);
		usleep(1000);
	}
	EXPECT(ibv_close_device(context), 0);
	printf("%ld calls as modelled\n", calls);
	return 0;
}
