/* Registered memory that is gone, against the rules of the program's own making: "memory CASE" is the server, "memory CASE ADDRESS" the
 * client. */
#define _GNU_SOURCE
#include "ends.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

enum { REGION = 1 << 20 };

/* The memory of a case, of which the second half is lost after its registration. */
static char *region;
static struct ibv_mr *region_mr;
static int file = -1;

static void make_region(struct end *end)
{
	file = memfd_create("region", 0);
	CHECK(file >= 0);
	EXPECT(ftruncate(file, REGION), 0);
	region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	CHECK(region != MAP_FAILED);
	CHECK(region_mr = ibv_reg_mr(end->id->pd, region, REGION, ALL_ACCESS));
}

/* From the second half on, so that an access begins well and ends badly. */
static void lose(const char *way)
{
	char *half = region + REGION / 2;

	if (!strcmp(way, "munmap"))
		EXPECT(munmap(half, REGION / 2), 0);
	else if (!strcmp(way, "none"))
		EXPECT(mprotect(half, REGION / 2, PROT_NONE), 0);
	else if (!strcmp(way, "readonly"))
		EXPECT(mprotect(half, REGION / 2, PROT_READ), 0);
	else
		EXPECT(ftruncate(file, REGION / 2), 0);
}

static void drop_region(void)
{
	munmap(region, REGION);
	EXPECT(ibv_dereg_mr(region_mr), 0);
	EXPECT(close(file), 0);
}

/* An access of the peer from `offset` on of the region, or of ours to it. */
static int request(struct end *end, enum ibv_wr_opcode opcode, struct ibv_sge sge, uint64_t remote)
{
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;

	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = remote;
		wr.wr.atomic.rkey = end->peer.key;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = end->peer.key;
	}
	return ibv_post_send(end->qp, &wr, &bad);
}

static struct ibv_sge part(struct ibv_mr *mr, size_t offset, uint32_t length)
{
	return (struct ibv_sge){ (uintptr_t)mr->addr + offset, length, mr->lkey };
}

/* The operation of a case "OPERATION-WAY", and the way. */
static const char *way_of(const char *name, enum ibv_wr_opcode *opcode)
{
	*opcode = !strncmp(name, "write", 5)  ? IBV_WR_RDMA_WRITE :
		  !strncmp(name, "read", 4)   ? IBV_WR_RDMA_READ :
		  !strncmp(name, "atomic", 6) ? IBV_WR_ATOMIC_FETCH_AND_ADD :
						IBV_WR_SEND;
	return strchr(name, '-') + 1;
}

static struct end self;

static void swap_mr(struct end *end)
{
	/* The private data of the connection names the region. */
	struct ibv_mr *own = end->mr;
	char *memory = end->memory;

	end->mr = region_mr;
	end->memory = region;
	region_mr = own;
	region = memory;
}

/* The peer accesses memory that is gone; the process lives, and can connect again. */
static void remote_server(struct end *end, const char *name)
{
	enum ibv_wr_opcode opcode;
	const char *way = way_of(name, &opcode);
	struct ibv_wc wc;

	await_request(end);
	equip(end, NULL, 0);
	make_region(end);
	if (opcode == IBV_WR_SEND) {
		struct ibv_sge sge = part(region_mr, REGION / 2 - 4096, 8192);
		struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;

		EXPECT(ibv_post_recv(end->qp, &wr, &bad), 0);
	}
	lose(way);
	swap_mr(end);
	accept_request(end);
	swap_mr(end);
	if (opcode == IBV_WR_SEND) {
		wc = completion(end);
		EXPECT(wc.status, IBV_WC_LOC_PROT_ERR);
	}
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	drop_region();
	leave(end);
}

static void remote_client(struct end *end, const char *name, const char *address)
{
	enum ibv_wr_opcode opcode;
	const char *way = way_of(name, &opcode);
	uint32_t length = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : 8192;
	struct ibv_mr *local;
	struct ibv_wc wc;
	char *memory;

	resolve(end, address);
	equip(end, NULL, 0);
	CHECK(memory = calloc(1, 8192));
	CHECK(local = ibv_reg_mr(end->id->pd, memory, 8192, ALL_ACCESS));
	connect_to(end);
	EXPECT(request(end, opcode, part(local, 0, length), end->peer.address + REGION / 2 - (length > 8 ? 4096 : 0)), 0);
	wc = completion(end);
	if (opcode == IBV_WR_RDMA_READ && !strcmp(way, "readonly")) {
		EXPECT(wc.status, IBV_WC_SUCCESS);
	} else if (opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_SEND) {
		/* The peer may have acknowledged the bytes before it looked at them. */
		CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_OP_ERR ||
		      wc.status == IBV_WC_WR_FLUSH_ERR);
	} else {
		EXPECT(wc.status, IBV_WC_REM_ACCESS_ERR);
	}
	if (opcode == IBV_WR_RDMA_READ && !strcmp(way, "readonly"))
		rdma_disconnect(end->id);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	EXPECT(ibv_dereg_mr(local), 0);
	leave(end);
}

/* Our own requests name memory that is gone. */
static void local_client(struct end *end, const char *name, const char *address)
{
	enum ibv_wr_opcode opcode;
	const char *way = way_of(name + strlen("local-"), &opcode);
	struct ibv_wc wc;

	resolve(end, address);
	equip(end, NULL, 0);
	make_region(end);
	connect_to(end);
	lose(way);
	/* The first segments of the message are good, and sent. */
	EXPECT(request(end, opcode, part(region_mr, REGION / 2 - 1900, 2000), end->peer.address), 0);
	wc = completion(end);
	if (opcode != IBV_WR_RDMA_READ && !strcmp(way, "readonly")) {
		EXPECT(wc.status, IBV_WC_SUCCESS);
		rdma_disconnect(end->id);
	} else {
		EXPECT(wc.status, IBV_WC_LOC_PROT_ERR);
	}
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	drop_region();
	leave(end);
}

static void local_server(struct end *end, const char *name)
{
	struct ibv_sge sge;
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_wc wc;

	(void)name;
	await_request(end);
	equip(end, NULL, 0);
	sge = part(end->mr, 0, SIZE);
	EXPECT(ibv_post_recv(end->qp, &wr, &bad), 0);
	accept_request(end);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	wc = completion(end);
	/* A message whose bytes could not be read never arrives. */
	CHECK(wc.status == IBV_WC_WR_FLUSH_ERR || strstr(name, "send-readonly"));
	leave(end);
}

/* free() before ibv_dereg_mr, while the peer writes: the size is one that the heap maps by itself. */
static void free_server(struct end *end, const char *name)
{
	size_t size = 8 << 20;
	struct ibv_mr *mr;
	char *memory;

	(void)name;
	await_request(end);
	equip(end, NULL, 0);
	CHECK(memory = calloc(1, size));
	CHECK(mr = ibv_reg_mr(end->id->pd, memory, size, ALL_ACCESS));
	region = memory;
	region_mr = mr;
	swap_mr(end);
	accept_request(end);
	swap_mr(end);
	while (!*(volatile char *)(memory + size / 2))
		sched_yield();
	free(memory);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	EXPECT(ibv_dereg_mr(mr), 0);
	leave(end);
}

static void free_client(struct end *end, const char *name, const char *address)
{
	struct ibv_wc wc;

	(void)name;
	resolve(end, address);
	equip(end, NULL, 0);
	memset(end->memory, 1, SIZE);
	connect_to(end);
	do {
		if (request(end, IBV_WR_RDMA_WRITE, part(end->mr, 0, SIZE), end->peer.address + (4 << 20)))
			break;
		wc = completion(end);
	} while (wc.status == IBV_WC_SUCCESS);
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	leave(end);
}

static int ordinary;
static sigjmp_buf *back;

static void count(int signal)
{
	(void)signal;
	ordinary++;
	siglongjmp(*back, 1);
}

static void count_with_information(int signal, siginfo_t *info, void *context)
{
	CHECK(info->si_signo == signal && context);
	ordinary++;
	siglongjmp(*back, 1);
}

/* A fault of the program's own. */
static void fault(void)
{
	sigjmp_buf place;
	int before = ordinary;
	char *nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	back = &place;
	if (!sigsetjmp(place, 1))
		*(volatile char *)nothing = 1;
	EXPECT(ordinary, before + 1);
	munmap(nothing, 4096);
}

/* Program's handlers before and after the first registration: they get the program's faults, and only these. */
static void handlers_client(struct end *end, const char *name, const char *address)
{
	struct sigaction plain = { .sa_handler = count }, full = { .sa_sigaction = count_with_information }, old;
	struct ibv_wc wc;

	(void)name;
	full.sa_flags = SA_SIGINFO | SA_ONSTACK;
	EXPECT(sigaction(SIGSEGV, &plain, NULL), 0);
	fault();
	resolve(end, address);
	equip(end, NULL, 0);
	make_region(end);
	fault();
	EXPECT(sigaction(SIGSEGV, &full, &old), 0);
	fault();
	EXPECT(old.sa_handler == count, 1);
	connect_to(end);
	fault();
	/* After the last call that leads to accesses: the library still gets the faults of regions. */
	EXPECT(sigaction(SIGSEGV, &plain, &old), 0);
	EXPECT(old.sa_sigaction == count_with_information && old.sa_flags & SA_ONSTACK, 1);
	fault();
	EXPECT(signal(SIGSEGV, SIG_DFL) == count, 1);
	EXPECT(signal(SIGBUS, count) == SIG_DFL, 1);
	EXPECT(sigaction(SIGSEGV, &(struct sigaction){ .sa_handler = count, .sa_flags = SA_RESETHAND }, NULL), 0);
	fault();
	EXPECT(sigaction(SIGSEGV, &full, &old), 0);
	EXPECT(old.sa_handler == SIG_DFL, 1);
	lose("munmap");
	EXPECT(request(end, IBV_WR_RDMA_WRITE, part(region_mr, REGION / 2, 100), end->peer.address), 0);
	wc = completion(end);
	EXPECT(wc.status, IBV_WC_LOC_PROT_ERR);
	EXPECT(ordinary, 6);
	/* Back to what was there before: the faults of the program still come to it. */
	EXPECT(sigaction(SIGSEGV, &plain, NULL), 0);
	fault();
	step(end, RDMA_CM_EVENT_DISCONNECTED);
	end->gone = 1;
	drop_region();
	leave(end);
	/* Without a handler the program ends by its fault. */
	EXPECT(sigaction(SIGSEGV, &(struct sigaction){ .sa_handler = SIG_DFL }, NULL), 0);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "", *address = argc > 2 ? argv[2] : NULL;

	/* A case that fails on either side must not wait for ever. */
	alarm(LIMIT_MS / 400);
	if (!strncmp(name, "local-", 6) || !strcmp(name, "handlers"))
		address ? (*name == 'l' ? local_client : handlers_client)(&self, name, address) : local_server(&self, name);
	else if (!strcmp(name, "free"))
		address ? free_client(&self, name, address) : free_server(&self, name);
	else
		address ? remote_client(&self, name, address) : remote_server(&self, name);
	puts("done");
	return 0;
}
