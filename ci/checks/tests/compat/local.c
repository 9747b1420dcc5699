/* What the verbs answer without a peer: objects that are used, destroyed or null, and operations that do not exist here. */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define EXPECT(what, wanted)                                                              \
	do {                                                                              \
		long got_ = (long)(what), wanted_ = (long)(wanted);                       \
		if (got_ != wanted_) {                                                    \
			printf("line %d: %s is %ld, not %ld\n", __LINE__, #what, got_, wanted_); \
			failures++;                                                       \
		}                                                                         \
	} while (0)

/* A call that returns a pointer must fail with this error. */
#define REFUSED(call, error)                       \
	do {                                       \
		errno = 0;                         \
		EXPECT((call) == NULL, 1);         \
		EXPECT(errno, error);              \
	} while (0)

static char memory[4096] __attribute__((aligned(4096)));

static void destruction_in_the_wrong_order(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, channel, 0);
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_attr);
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 4, .max_send_sge = 1, .max_inline_data = 64 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);

	EXPECT(qp && mr && srq && cq && channel && pd, 1);
	EXPECT(ibv_dealloc_pd(pd), EBUSY);
	EXPECT(ibv_destroy_cq(cq), EBUSY);
	EXPECT(ibv_destroy_srq(srq), EBUSY);
	EXPECT(ibv_destroy_comp_channel(channel), EBUSY);
	EXPECT(channel->refcnt, 1);
	EXPECT(ibv_destroy_qp(qp), 0);
	EXPECT(ibv_dealloc_pd(pd), EBUSY);
	EXPECT(ibv_dereg_mr(mr), 0);
	EXPECT(ibv_destroy_srq(srq), 0);
	EXPECT(ibv_dealloc_pd(pd), 0);
	EXPECT(ibv_destroy_cq(cq), 0);
	EXPECT(ibv_destroy_comp_channel(channel), 0);
	/* Destroyed twice, and used afterwards. */
	EXPECT(ibv_destroy_cq(cq), EINVAL);
	EXPECT(ibv_dereg_mr(mr), EINVAL);
	EXPECT(ibv_dealloc_pd(pd), EINVAL);
	EXPECT(ibv_destroy_qp(qp), EINVAL);
	REFUSED(ibv_reg_mr(pd, memory, sizeof memory, 0), EINVAL);
	REFUSED(ibv_create_qp(pd, &attr), EINVAL);
	/* An object of another kind. */
	EXPECT(ibv_dealloc_pd((struct ibv_pd *)context), EINVAL);
}

static void registrations(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	void *hole = mmap(NULL, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void *constant = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;

	REFUSED(ibv_reg_mr(pd, memory, 64, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	REFUSED(ibv_reg_mr(pd, memory, 64, IBV_ACCESS_ON_DEMAND), EOPNOTSUPP);
	REFUSED(ibv_reg_mr(pd, NULL, 64, 0), EFAULT);
	munmap(hole, 8192);
	REFUSED(ibv_reg_mr(pd, hole, 8192, 0), EFAULT);
	REFUSED(ibv_reg_mr(pd, constant, 8192, IBV_ACCESS_LOCAL_WRITE), EFAULT);
	mr = ibv_reg_mr(pd, constant, 8192, IBV_ACCESS_REMOTE_READ);
	EXPECT(mr != NULL, 1);
	EXPECT(ibv_dereg_mr(mr), 0);
	/* Optional bits are ignored. */
	mr = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING);
	EXPECT(mr != NULL, 1);
	EXPECT(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ), 0);
	EXPECT(mr->length, 64);
	EXPECT(ibv_dereg_mr(mr), 0);
	REFUSED(ibv_reg_dmabuf_mr(pd, 0, 64, 0, -1, 0), EOPNOTSUPP);
	REFUSED(ibv_alloc_mw(pd, IBV_MW_TYPE_1), EOPNOTSUPP);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

static void what_iwarp_cannot(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_ah_attr ah = { .port_num = 1 };
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	union ibv_gid gid;
	uint16_t pkey;

	attr.qp_type = IBV_QPT_UD;
	REFUSED(ibv_create_qp(pd, &attr), EOPNOTSUPP);
	attr.qp_type = IBV_QPT_RC;
	attr.cap.max_send_wr = 1 << 30;
	REFUSED(ibv_create_qp(pd, &attr), EINVAL);
	REFUSED(ibv_create_ah(pd, &ah), EOPNOTSUPP);
	REFUSED(ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(context, 16, NULL, NULL, 7), EINVAL);
	EXPECT(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP), -1);
	EXPECT(errno, EPROTONOSUPPORT);
	EXPECT(ibv_query_gid(context, 1, 99, &gid), -1);
	EXPECT(ibv_query_gid(context, 2, 0, &gid), -1);
	EXPECT(ibv_query_pkey(context, 1, 0, &pkey), 0);
	EXPECT(pkey, 0xffff);
	rdma_destroy_event_channel(channel);
	EXPECT(ibv_destroy_cq(cq), 0);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

static void null_pointers(struct ibv_context *context)
{
	struct ibv_device_attr attr;

	REFUSED(ibv_open_device(NULL), EINVAL);
	REFUSED(ibv_alloc_pd(NULL), EINVAL);
	REFUSED(ibv_reg_mr(NULL, memory, 64, 0), EINVAL);
	REFUSED(ibv_create_cq(NULL, 16, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_qp(NULL, NULL), EINVAL);
	REFUSED(ibv_create_srq(NULL, NULL), EINVAL);
	REFUSED(ibv_create_comp_channel(NULL), EINVAL);
	EXPECT(ibv_query_device(NULL, &attr), EINVAL);
	EXPECT(ibv_query_device(context, NULL), EINVAL);
	EXPECT(ibv_modify_qp(NULL, NULL, 0), EINVAL);
	EXPECT(ibv_destroy_qp(NULL), EINVAL);
	EXPECT(rdma_bind_addr(NULL, NULL), -1);
	EXPECT(rdma_destroy_id(NULL), -1);
	EXPECT(rdma_ack_cm_event(NULL), -1);
	EXPECT(rdma_getaddrinfo(NULL, NULL, NULL, NULL), -1);
	ibv_free_device_list(NULL);
	rdma_destroy_event_channel(NULL);
}

static void states_and_posts(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 2, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = 64, .lkey = mr->lkey };
	struct ibv_recv_wr second = { .wr_id = 2, .sg_list = &sge, .num_sge = 1 };
	struct ibv_recv_wr first = { .wr_id = 1, .next = &second, .sg_list = &sge, .num_sge = 1 }, *bad_recv = NULL;
	struct ibv_send_wr send = { .wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad = NULL;
	struct ibv_qp_attr modify = { .qp_state = IBV_QPS_RTS }, query;
	struct ibv_qp_init_attr init;
	struct ibv_wc wc[4];

	EXPECT(ibv_post_send(qp, &send, &bad), EINVAL);
	EXPECT(bad == &send, 1);
	EXPECT(ibv_modify_qp(qp, &modify, IBV_QP_STATE), EINVAL);
	modify.qp_state = IBV_QPS_INIT;
	EXPECT(ibv_modify_qp(qp, &modify, IBV_QP_STATE), 0);
	EXPECT(ibv_post_recv(qp, &first, &bad_recv), 0);
	EXPECT(ibv_post_recv(qp, &first, &bad_recv), ENOMEM);
	EXPECT(bad_recv == &first, 1);
	EXPECT(ibv_query_qp(qp, &query, IBV_QP_STATE, &init), 0);
	EXPECT(query.qp_state, IBV_QPS_INIT);
	EXPECT(init.cap.max_recv_wr, 2);
	modify.qp_state = IBV_QPS_ERR;
	EXPECT(ibv_modify_qp(qp, &modify, IBV_QP_STATE), 0);
	EXPECT(ibv_poll_cq(cq, 4, wc), 2);
	EXPECT(wc[0].status, IBV_WC_WR_FLUSH_ERR);
	EXPECT(wc[1].wr_id, 2);
	EXPECT(wc[1].qp_num, qp->qp_num);
	modify.qp_state = IBV_QPS_RESET;
	EXPECT(ibv_modify_qp(qp, &modify, IBV_QP_STATE), 0);
	EXPECT(ibv_query_qp(qp, &query, IBV_QP_STATE, &init), 0);
	EXPECT(query.qp_state, IBV_QPS_RESET);
	EXPECT(ibv_resize_cq(cq, 64), 0);
	EXPECT(cq->cqe, 64);
	EXPECT(ibv_destroy_qp(qp), 0);
	EXPECT(ibv_dereg_mr(mr), 0);
	EXPECT(ibv_destroy_cq(cq), 0);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

static void descriptors(struct ibv_context *context)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct rdma_event_channel *events = rdma_create_event_channel();
	struct ibv_async_event event;
	struct rdma_cm_event *cm_event;
	struct ibv_cq *cq;
	void *cq_context;
	int fds[3] = { channel->fd, events->fd, context->async_fd }, i;

	for (i = 0; i < 3; i++) {
		struct pollfd pollfd = { .fd = fds[i], .events = POLLIN };
		EXPECT(fcntl(fds[i], F_SETFL, fcntl(fds[i], F_GETFL) | O_NONBLOCK), 0);
		EXPECT(poll(&pollfd, 1, 0), 0);
	}
	EXPECT(ibv_get_cq_event(channel, &cq, &cq_context), -1);
	EXPECT(errno, EAGAIN);
	EXPECT(rdma_get_cm_event(events, &cm_event), -1);
	EXPECT(errno, EAGAIN);
	EXPECT(ibv_get_async_event(context, &event), -1);
	EXPECT(errno, EAGAIN);
	rdma_destroy_event_channel(events);
	EXPECT(ibv_destroy_comp_channel(channel), 0);
}

/* The child's calls fail, its exit disturbs nothing. */
static void a_child(struct ibv_context *context)
{
	int status;
	pid_t child;

	fflush(stdout);
	child = fork();

	if (child == 0)
		exit(ibv_alloc_pd(context) != NULL);
	EXPECT(waitpid(child, &status, 0), child);
	EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, 1);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	EXPECT(pd != NULL, 1);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

int main(void)
{
	int number;
	struct ibv_device **list;
	struct ibv_context *context;

	EXPECT(ibv_fork_init(), 0);
	list = ibv_get_device_list(&number);
	EXPECT(number, 1);
	context = ibv_open_device(list[0]);
	if (!context)
		return 2;
	ibv_free_device_list(list);
	ibv_free_device_list(list);
	destruction_in_the_wrong_order(context);
	registrations(context);
	what_iwarp_cannot(context);
	null_pointers(context);
	states_and_posts(context);
	descriptors(context);
	a_child(context);
	EXPECT(ibv_close_device(context), 0);
	EXPECT(ibv_close_device(context), EINVAL);
	printf("%d failures\n", failures);
	return failures != 0;
}
