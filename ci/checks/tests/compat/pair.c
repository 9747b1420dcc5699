/* Two ends that do what the distribution's programs do not: "pair server CASE" and "pair client CASE ADDRESS". */
#include "ends.h"

#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>

/* Nothing of a batch leaves in which a request is refused or which is aborted, and all of a complete one does. */
static void batch_server(struct end *end)
{
	await_request(end);
	equip(end, NULL, 0);
	receives(end, 5);
	accept_request(end);
	for (int i = 0; i < 2; i++) {
		EXPECT(completion(end).byte_len, 5);
		EXPECT(memcmp(end->memory + 64 * i, "three", 5), 0);
	}
	leave(end);
}

static void batch_client(struct end *end, const char *address)
{
	struct ibv_sge none[32] = { { 0 } };
	struct ibv_qp_ex *qp;
	struct pollfd fd;

	resolve(end, address);
	equip(end, NULL, 0);
	connect_to(end);
	qp = ibv_qp_to_qp_ex(end->qp);
	CHECK(qp);
	strcpy(end->memory, "one");
	strcpy(end->memory + 64, "three");
	/* A request that cannot be sent, a list that is longer than the send queue, a complete batch between two aborted ones. */
	ibv_wr_start(qp);
	qp->wr_id = 1;
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory, 3);
	qp->wr_id = 2;
	ibv_wr_send(qp);
	ibv_wr_set_sge_list(qp, 32, none);
	EXPECT(ibv_wr_complete(qp), EINVAL);
	ibv_wr_start(qp);
	for (int i = 0; i < 17; i++) {
		ibv_wr_send(qp);
		ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory, 3);
	}
	EXPECT(ibv_wr_complete(qp), ENOMEM);
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory, 3);
	ibv_wr_send(qp);
	ibv_wr_set_inline_data(qp, end->memory, SIZE);
	EXPECT(ibv_wr_complete(qp), ENOMEM);
	for (int i = 0; i < 2; i++) {
		ibv_wr_start(qp);
		ibv_wr_send(qp);
		ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory, 3);
		ibv_wr_send(qp);
		ibv_wr_set_inline_data(qp, end->memory, 3);
		ibv_wr_abort(qp);
		if (i)
			break;
		ibv_wr_start(qp);
		qp->wr_id = 3;
		ibv_wr_send(qp);
		ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory + 64, 5);
		ibv_wr_send(qp);
		ibv_wr_set_inline_data(qp, end->memory + 64, 5);
		EXPECT(ibv_wr_complete(qp), 0);
	}
	/* The server leaves when it has both. */
	fd = (struct pollfd){ .fd = end->channel->fd, .events = POLLIN };
	EXPECT(poll(&fd, 1, LIMIT_MS), 1);
	leave(end);
}

/* The limit of a shared receive queue raises one event, which disarms it. */
static void limit_server(struct end *end)
{
	struct ibv_srq_attr attr = { .srq_limit = 4 };
	struct ibv_async_event event;
	struct pollfd fd;

	await_request(end);
	equip(end, NULL, 1);
	receives(end, 8);
	EXPECT(ibv_modify_srq(end->srq, &attr, IBV_SRQ_LIMIT), 0);
	EXPECT(ibv_query_srq(end->srq, &attr), 0);
	EXPECT(attr.srq_limit, 4);
	accept_request(end);
	for (int i = 0; i < 6; i++)
		EXPECT(completion(end).status, IBV_WC_SUCCESS);
	fd = (struct pollfd){ .fd = end->id->verbs->async_fd, .events = POLLIN };
	EXPECT(poll(&fd, 1, LIMIT_MS), 1);
	EXPECT(ibv_get_async_event(end->id->verbs, &event), 0);
	EXPECT(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(event.element.srq == end->srq);
	EXPECT(ibv_query_srq(end->srq, &attr), 0);
	EXPECT(attr.srq_limit, 0);
	ibv_ack_async_event(&event);
	EXPECT(poll(&fd, 1, 0), 0);
	leave(end);
}

static void limit_client(struct end *end, const char *address)
{
	resolve(end, address);
	equip(end, NULL, 0);
	connect_to(end);
	for (int i = 0; i < 6; i++) {
		post(end, IBV_WR_SEND, 8, 0, 0);
		EXPECT(completion(end).status, IBV_WC_SUCCESS);
	}
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* The next completion of an extended queue, with its fields. */
static void field(struct ibv_cq_ex *cq, enum ibv_wc_opcode opcode, uint32_t length, unsigned flags)
{
	struct ibv_poll_cq_attr none = { 0 };
	static uint64_t before;
	int found;

	while ((found = ibv_start_poll(cq, &none)) == ENOENT)
		;
	EXPECT(found, 0);
	EXPECT(cq->status, IBV_WC_SUCCESS);
	EXPECT(ibv_wc_read_opcode(cq), opcode);
	EXPECT(ibv_wc_read_byte_len(cq), length);
	EXPECT(ibv_wc_read_wc_flags(cq), flags);
	CHECK(ibv_wc_read_completion_ts(cq) >= before);
	before = ibv_wc_read_completion_ts(cq);
	CHECK(ibv_wc_read_completion_wallclock_ns(cq) > 0);
	EXPECT(ibv_wc_read_vendor_err(cq), 0);
	EXPECT(ibv_wc_read_slid(cq), 0);
	EXPECT(ibv_wc_read_sl(cq), 0);
}

/* Every field of ibv_create_cq_ex, with immediate data of both kinds, and an invalidation. */
static void fields_server(struct end *end)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 16,
					    .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
							IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	struct ibv_mr *second;
	struct ibv_cq_ex *cq;

	await_request(end);
	CHECK(cq = ibv_create_cq_ex(end->id->verbs, &init));
	equip(end, ibv_cq_ex_to_cq(cq), 0);
	CHECK(second = ibv_reg_mr(end->pd, end->memory, SIZE, ALL_ACCESS));
	receives(end, 5);
	accept_request(end);
	memcpy(end->memory + 2048, &second->rkey, 4);
	field(cq, IBV_WC_RECV, 5, 0);
	EXPECT(cq->wr_id, 100);
	EXPECT(ibv_wc_read_qp_num(cq), end->qp->qp_num);
	ibv_end_poll(cq);
	field(cq, IBV_WC_RECV, 0, IBV_WC_WITH_IMM);
	EXPECT(ibv_wc_read_imm_data(cq), htonl(0x01020304));
	ibv_end_poll(cq);
	field(cq, IBV_WC_RECV_RDMA_WITH_IMM, 5, IBV_WC_WITH_IMM);
	EXPECT(ibv_wc_read_imm_data(cq), htonl(0xa0b0c0d0));
	EXPECT(memcmp(end->memory, "hello", 5), 0);
	ibv_end_poll(cq);
	/* The second region's key, which the client invalidates. */
	{
		struct ibv_sge sge = { (uintptr_t)end->memory + 2048, 4, end->mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
		struct ibv_poll_cq_attr none = { 0 };

		EXPECT(ibv_post_send(end->qp, &wr, &bad), 0);
		while (ibv_start_poll(cq, &none))
			;
		EXPECT(ibv_wc_read_opcode(cq), IBV_WC_SEND);
		ibv_end_poll(cq);
	}
	field(cq, IBV_WC_RECV, 0, IBV_WC_WITH_INV);
	EXPECT(ibv_wc_read_invalidated_rkey(cq), second->rkey);
	ibv_end_poll(cq);
	EXPECT(ibv_dereg_mr(second), 0);
	leave(end);
}

static void fields_client(struct end *end, const char *address)
{
	uint32_t key;

	resolve(end, address);
	equip(end, NULL, 0);
	receives(end, 1);
	connect_to(end);
	strcpy(end->memory, "hello");
	post(end, IBV_WR_SEND, 5, 0, 0);
	EXPECT(completion(end).opcode, IBV_WC_SEND);
	post(end, IBV_WR_SEND_WITH_IMM, 0, htonl(0x01020304), 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	post(end, IBV_WR_RDMA_WRITE_WITH_IMM, 5, htonl(0xa0b0c0d0), end->peer.key);
	EXPECT(completion(end).opcode, IBV_WC_RDMA_WRITE);
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	memcpy(&key, end->memory, 4);
	post(end, IBV_WR_SEND_WITH_INV, 0, key, 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* A window is written through until its owner invalidates it. */
static void window_server(struct end *end)
{
	struct ibv_send_wr bind = { .wr_id = 1, .opcode = IBV_WR_BIND_MW }, *bad;
	struct ibv_mw *mw;
	uint32_t key;

	await_request(end);
	equip(end, NULL, 0);
	receives(end, 2);
	accept_request(end);
	CHECK(mw = ibv_alloc_mw(end->pd, IBV_MW_TYPE_2));
	key = ibv_inc_rkey(mw->rkey);
	bind.bind_mw.mw = mw;
	bind.bind_mw.rkey = key;
	/* A window has remote rights only; providers ignore the local ones that programs name as well. */
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){ .mr = end->mr, .addr = (uintptr_t)end->memory, .length = 1024,
							     .mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE };
	EXPECT(ibv_post_send(end->qp, &bind, &bad), 0);
	EXPECT(completion(end).opcode, IBV_WC_BIND_MW);
	EXPECT(mw->rkey, key);
	memcpy(end->memory, &key, 4);
	post(end, IBV_WR_SEND, 4, 0, 0);
	EXPECT(completion(end).opcode, IBV_WC_SEND);
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	EXPECT(memcmp(end->memory, "written", 7), 0);
	post(end, IBV_WR_LOCAL_INV, 0, key, 0);
	EXPECT(completion(end).opcode, IBV_WC_LOCAL_INV);
	post(end, IBV_WR_SEND, 4, 0, 0);
	EXPECT(completion(end).opcode, IBV_WC_SEND);
	/* The client's second write ends the connection. */
	EXPECT(completion(end).status, IBV_WC_WR_FLUSH_ERR);
	EXPECT(memcmp(end->memory, "written", 7), 0);
	EXPECT(ibv_dealloc_mw(mw), 0);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

static void window_client(struct end *end, const char *address)
{
	uint32_t key;

	resolve(end, address);
	equip(end, NULL, 0);
	receives(end, 2);
	connect_to(end);
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	memcpy(&key, end->memory, 4);
	strcpy(end->memory, "written");
	post(end, IBV_WR_RDMA_WRITE, 8, 0, key);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	post(end, IBV_WR_SEND, 0, 0, 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	strcpy(end->memory, "changed");
	post(end, IBV_WR_RDMA_WRITE, 8, 0, key);
	/* iWARP completes a write that its peer has received, whatever the key: the peer ends the connection. */
	completion(end);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* Counts the allocations of the thread that sets `counts`. The libraries' allocator calls these functions, because a program's come first. */
static __thread int counts;
static __thread long allocations;

extern void *__libc_malloc(size_t size), *__libc_calloc(size_t number, size_t size), *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size)
{
	allocations += counts;
	return __libc_malloc(size);
}

void *calloc(size_t number, size_t size)
{
	allocations += counts;
	return __libc_calloc(number, size);
}

void *realloc(void *old, size_t size)
{
	allocations += counts;
	return __libc_realloc(old, size);
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
	allocations += counts;
	*out = __libc_memalign(alignment, size);
	return *out ? 0 : ENOMEM;
}

static void receive_again(struct end *end, uint64_t slot)
{
	struct ibv_sge sge = { (uintptr_t)end->memory + 2048 + 64 * (slot % 16), 64, end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	EXPECT(ibv_post_recv(end->qp, &wr, &bad), 0);
}

/* The completion queue, with the functions of ibv_cq_ex. */
static struct ibv_cq_ex *extended;

/* Takes the completions that are there, up to `most`: by ibv_poll_cq, in odd rounds field by field. */
static int take(struct end *end, int most, int round)
{
	struct ibv_poll_cq_attr none = { 0 };
	struct ibv_wc wc[4];
	int found, more;

	if (round % 2 == 0) {
		found = ibv_poll_cq(end->cq, most < 4 ? most : 4, wc);
		CHECK(found >= 0);
		for (int i = 0; i < found; i++) {
			EXPECT(wc[i].status, IBV_WC_SUCCESS);
			if (wc[i].opcode & IBV_WC_RECV)
				receive_again(end, round);
		}
		return found;
	}
	found = 0;
	for (more = ibv_start_poll(extended, &none); more != ENOENT; more = ibv_next_poll(extended)) {
		EXPECT(more, 0);
		EXPECT(extended->status, IBV_WC_SUCCESS);
		if (ibv_wc_read_opcode(extended) & IBV_WC_RECV)
			receive_again(end, round);
		if (++found == most)
			break;
	}
	if (found)
		ibv_end_poll(extended);
	return found;
}

/* One message of each kind to the peer, by both interfaces, and one from it. */
static void exchange(struct end *end, int round)
{
	struct ibv_sge sge = { (uintptr_t)end->memory, 64, end->mr->lkey };
	struct ibv_send_wr last = { .wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND };
	struct ibv_send_wr first = { .wr_id = 2, .next = &last, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE };
	struct ibv_send_wr inlined = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				       .send_flags = IBV_SEND_INLINE }, *bad;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(end->qp);
	int left = 7;

	first.wr.rdma.remote_addr = inlined.wr.rdma.remote_addr = end->peer.address;
	first.wr.rdma.rkey = inlined.wr.rdma.rkey = end->peer.key;
	EXPECT(ibv_post_send(end->qp, &inlined, &bad), 0);
	/* A request alone, then a batch. */
	ibv_wr_start(qp);
	qp->wr_flags = 0;
	qp->wr_id = 4;
	ibv_wr_rdma_write(qp, end->peer.key, end->peer.address);
	ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory, 64);
	EXPECT(ibv_wr_complete(qp), 0);
	ibv_wr_start(qp);
	ibv_wr_rdma_write(qp, end->peer.key, end->peer.address);
	ibv_wr_set_inline_data(qp, end->memory, 64);
	ibv_wr_rdma_write(qp, end->peer.key, end->peer.address);
	ibv_wr_set_sge_list(qp, 1, &sge);
	EXPECT(ibv_wr_complete(qp), 0);
	EXPECT(ibv_post_send(end->qp, &first, &bad), 0);
	/* The queue pair signals all: six completions of requests, one of a receive. */
	while (left > 0) {
		int found = take(end, left, round);

		if (found == 0)
			sched_yield();
		left -= found;
	}
}

/* A queue pair whose completion queue can be polled in both ways, with receives. */
static void equip_to_exchange(struct end *end)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS };

	CHECK(extended = ibv_create_cq_ex(end->id->verbs, &init));
	equip(end, ibv_cq_ex_to_cq(extended), 0);
	for (int i = 0; i < 4; i++)
		receive_again(end, i);
}

/* Requests and completions allocate nothing. What the network reports meanwhile (neighbours, addresses) does, so one of ten batches without
 * an allocation is what shows it: an allocation by each message would be in all. */
static void count_allocations(struct end *end)
{
	long least = LONG_MAX;
	void *sample;

	for (int batch = 0; batch < 10; batch++) {
		allocations = 0;
		counts = 1;
		for (int round = 0; round < 20; round++)
			exchange(end, round);
		counts = 0;
		least = allocations < least ? allocations : least;
	}
	EXPECT(least, 0);
	/* The library's allocations are counted. */
	allocations = 0;
	counts = 1;
	sample = ibv_create_comp_channel(end->id->verbs);
	counts = 0;
	CHECK(allocations > 0);
	EXPECT(ibv_destroy_comp_channel(sample), 0);
}

static void allocations_server(struct end *end)
{
	await_request(end);
	equip_to_exchange(end);
	accept_request(end);
	count_allocations(end);
	/* The client has all completions that it waits for. */
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	leave(end);
}

static void allocations_client(struct end *end, const char *address)
{
	resolve(end, address);
	equip_to_exchange(end);
	connect_to(end);
	count_allocations(end);
	post(end, IBV_WR_SEND, 0, 0, 0);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* SQD closes the connection: what was posted is sent, and nothing is sent afterwards. */
static void draining_server(struct end *end)
{
	await_request(end);
	equip(end, NULL, 0);
	receives(end, 6);
	accept_request(end);
	for (int i = 0; i < 5; i++) {
		struct ibv_wc wc = completion(end);

		EXPECT(wc.status, IBV_WC_SUCCESS);
		EXPECT(wc.byte_len, 8);
	}
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	EXPECT(completion(end).status, IBV_WC_WR_FLUSH_ERR);
	leave(end);
}

static void draining_client(struct end *end, const char *address)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD };
	struct ibv_qp_init_attr init;

	resolve(end, address);
	equip(end, NULL, 0);
	connect_to(end);
	for (int i = 0; i < 5; i++)
		post(end, IBV_WR_SEND, 8, 0, 0);
	EXPECT(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE), 0);
	EXPECT(ibv_query_qp(end->qp, &attr, IBV_QP_STATE, &init), 0);
	CHECK(attr.qp_state != IBV_QPS_RTS);
	attr.qp_state = IBV_QPS_RTS;
	EXPECT(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE), EINVAL);
	for (int i = 0; i < 5; i++)
		EXPECT(completion(end).status, IBV_WC_SUCCESS);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

#define MESSAGES 1000
/* Sends whose completions were polled. A request leaves its queue when it completes, so only this keeps the completion queue from overflowing. */
static _Atomic uint64_t polled;

/* Posts from a thread of its own, while the caller polls. */
static void *poster(void *argument)
{
	struct end *end = argument;

	for (uint64_t number = 0; number < MESSAGES;) {
		struct ibv_sge sge = { (uintptr_t)&number, sizeof number, 0 };
		struct ibv_send_wr wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_INLINE }, *bad;

		if (number - polled >= 16) {
			sched_yield();
			continue;
		}
		EXPECT(ibv_post_send(end->qp, &wr, &bad), 0);
		number++;
	}
	return NULL;
}

/* Both directions at once: one thread of each end posts, one polls. Numbers arrive in order. */
static void both_threads(struct end *end)
{
	uint64_t sent = 0, received = 0, number;
	struct ibv_wc wc;
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, poster, end) == 0);
	while (sent < MESSAGES || received < MESSAGES) {
		int found = ibv_poll_cq(end->cq, 1, &wc);

		CHECK(found >= 0);
		if (found == 0) {
			sched_yield();
			continue;
		}
		EXPECT(wc.status, IBV_WC_SUCCESS);
		if (wc.opcode & IBV_WC_RECV) {
			EXPECT(wc.wr_id % 16, received % 16);
			memcpy(&number, end->memory + 2048 + 64 * (wc.wr_id % 16), sizeof number);
			EXPECT(number, received);
			receive_again(end, received++);
		} else {
			EXPECT(wc.wr_id, sent++);
			polled = sent;
		}
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

static void threads_server(struct end *end)
{
	await_request(end);
	equip(end, NULL, 0);
	for (int i = 0; i < 16; i++)
		receive_again(end, i);
	accept_request(end);
	both_threads(end);
	/* The client has all completions that it waits for. */
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	leave(end);
}

static void threads_client(struct end *end, const char *address)
{
	resolve(end, address);
	equip(end, NULL, 0);
	for (int i = 0; i < 16; i++)
		receive_again(end, i);
	connect_to(end);
	both_threads(end);
	post(end, IBV_WR_SEND, 0, 0, 0);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* A region of more than 4 GiB, most of it never touched, and zero-based, so that its offsets need 33 bits. */
#define HUGE_LENGTH ((5ull << 30) + 4096)
#define HUGE_PLACE ((4ull << 30) + 100)

static void huge_server(struct end *end)
{
	struct place place;
	struct ibv_mr *mr;
	char *map;

	CHECK((map = mmap(NULL, HUGE_LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) != MAP_FAILED);
	/* Fewer pages to map, while the peer waits. */
	madvise(map, HUGE_LENGTH, MADV_HUGEPAGE);
	strcpy(map + HUGE_PLACE, "beyond 4 GiB");
	await_request(end);
	equip(end, NULL, 0);
	CHECK(mr = ibv_reg_mr(end->pd, map, HUGE_LENGTH, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED));
	EXPECT(mr->length == HUGE_LENGTH, 1);
	receives(end, 1);
	accept_request(end);
	place = (struct place){ .address = HUGE_PLACE, .key = mr->rkey };
	memcpy(end->memory, &place, sizeof place);
	post(end, IBV_WR_SEND, sizeof place, 0, 0);
	EXPECT(completion(end).opcode, IBV_WC_SEND);
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	EXPECT(ibv_dereg_mr(mr), 0);
	leave(end);
}

static void huge_client(struct end *end, const char *address)
{
	resolve(end, address);
	equip(end, NULL, 0);
	receives(end, 1);
	connect_to(end);
	EXPECT(completion(end).opcode, IBV_WC_RECV);
	memcpy(&end->peer, end->memory, sizeof end->peer);
	post(end, IBV_WR_RDMA_READ, 13, 0, end->peer.key);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	EXPECT(memcmp(end->memory, "beyond 4 GiB", 13), 0);
	post(end, IBV_WR_SEND, 0, 0, 0);
	EXPECT(completion(end).opcode, IBV_WC_SEND);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

/* Inline data up to what the queue pair has, and no more; lists that there are not; registrations that windows hold. */
static void refusals_client(struct end *end, const char *address)
{
	struct ibv_sge sge = { 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE }, *bad;
	struct ibv_send_wr bind = { .wr_id = 1, .opcode = IBV_WR_BIND_MW };
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_mw *mw;
	uint32_t key;

	resolve(end, address);
	equip(end, NULL, 0);
	connect_to(end);
	EXPECT(ibv_query_qp(end->qp, &attr, IBV_QP_CAP, &init), 0);
	CHECK(init.cap.max_inline_data >= 64);
	sge = (struct ibv_sge){ (uintptr_t)end->memory, init.cap.max_inline_data, 0 };
	EXPECT(ibv_post_send(end->qp, &wr, &bad), 0);
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	for (uint32_t length = init.cap.max_inline_data + 1; length; length <<= 1) {
		sge.length = length;
		CHECK(ibv_post_send(end->qp, &wr, &bad) != 0 && bad == &wr);
	}
	sge = (struct ibv_sge){ 0, 8, 0 };
	EXPECT(ibv_post_send(end->qp, &wr, &bad), EFAULT);
	wr.send_flags = 0;
	for (int number = -2; number < 40; number++) {
		struct ibv_sge many[40] = { { 0 } };

		wr.sg_list = number < 0 || number > (int)init.cap.max_send_sge ? many : NULL;
		wr.num_sge = number;
		/* An empty message, and one that no queue pair takes. */
		if (number == 0)
			EXPECT(ibv_post_send(end->qp, &wr, &bad), 0);
		else
			EXPECT(ibv_post_send(end->qp, &wr, &bad), EINVAL);
	}
	EXPECT(completion(end).status, IBV_WC_SUCCESS);
	wr.num_sge = 0;
	wr.opcode = IBV_WR_TSO;
	EXPECT(ibv_post_send(end->qp, &wr, &bad), EOPNOTSUPP);
	wr.opcode = (enum ibv_wr_opcode)77;
	EXPECT(ibv_post_send(end->qp, &wr, &bad), EINVAL);
	EXPECT(ibv_post_send(end->qp, NULL, &bad), 0);

	CHECK(mw = ibv_alloc_mw(end->pd, IBV_MW_TYPE_2));
	key = ibv_inc_rkey(mw->rkey);
	bind.bind_mw.mw = mw;
	bind.bind_mw.rkey = key;
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){ .mr = NULL, .addr = (uintptr_t)end->memory, .length = 64,
							     .mw_access_flags = IBV_ACCESS_REMOTE_READ };
	EXPECT(ibv_post_send(end->qp, &bind, &bad), EINVAL);
	bind.bind_mw.bind_info.mr = end->mr;
	bind.bind_mw.mw = NULL;
	EXPECT(ibv_post_send(end->qp, &bind, &bad), EINVAL);
	bind.bind_mw.mw = mw;
	bind.bind_mw.rkey = key + 256;
	EXPECT(ibv_post_send(end->qp, &bind, &bad), EINVAL);
	bind.bind_mw.rkey = key;
	EXPECT(ibv_post_send(end->qp, &bind, &bad), 0);
	EXPECT(completion(end).opcode, IBV_WC_BIND_MW);
	EXPECT(ibv_dereg_mr(end->mr), EBUSY);
	EXPECT(ibv_rereg_mr(end->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS), IBV_REREG_MR_ERR_CMD);
	EXPECT(errno, EBUSY);
	EXPECT(ibv_dealloc_mw(mw), 0);
	EXPECT(ibv_rereg_mr(end->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS), 0);
	leave(end);
}

static void refusals_server(struct end *end)
{
	await_request(end);
	equip(end, NULL, 0);
	receives(end, 2);
	accept_request(end);
	completion(end);
	completion(end);
	/* The client leaves first: the end of the connection would end its window. */
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

static const struct {
	const char *name;
	void (*server)(struct end *end);
	void (*client)(struct end *end, const char *address);
} cases[] = {
	{ "batch", batch_server, batch_client },
	{ "limit", limit_server, limit_client },
	{ "fields", fields_server, fields_client },
	{ "window", window_server, window_client },
	{ "allocations", allocations_server, allocations_client },
	{ "draining", draining_server, draining_client },
	{ "threads", threads_server, threads_client },
	{ "huge", huge_server, huge_client },
	{ "refusals", refusals_server, refusals_client },
};

int main(int argc, char **argv)
{
	struct end end = { 0 };

	for (size_t i = 0; argc >= 3 && i < sizeof cases / sizeof *cases; i++) {
		if (strcmp(argv[2], cases[i].name))
			continue;
		if (argc > 3)
			cases[i].client(&end, argv[3]);
		else
			cases[i].server(&end);
		puts("done");
		return 0;
	}
	return 2;
}
