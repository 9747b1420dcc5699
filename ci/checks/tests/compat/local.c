/* What the verbs answer without a peer: objects that are used, destroyed or null, and operations that do not exist here. */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdint.h>
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
	EXPECT(ibv_dereg_mr(mr), 0);
	REFUSED(ibv_reg_mr(pd, memory, 0, 0), EINVAL);
	REFUSED(ibv_reg_mr(pd, memory, SIZE_MAX, 0), EINVAL);
	REFUSED(ibv_reg_mr(pd, memory, 64, 1 << 10), EINVAL);
	mr = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE | (1 << 29) | IBV_ACCESS_HUGETLB | IBV_ACCESS_ZERO_BASED);
	EXPECT(mr != NULL, 1);
	EXPECT(ibv_dereg_mr(mr), 0);
	REFUSED(ibv_reg_dmabuf_mr(pd, 0, 64, 0, -1, 0), EOPNOTSUPP);
	REFUSED(ibv_alloc_mw(pd, IBV_MW_TYPE_1), EOPNOTSUPP);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

/* All flags of ibv_rereg_mr, also the failures, which leave the region as it was. */
static void registrations_again(struct ibv_context *context)
{
	enum { PLACE = IBV_REREG_MR_CHANGE_TRANSLATION, DOMAIN = IBV_REREG_MR_CHANGE_PD, RIGHTS = IBV_REREG_MR_CHANGE_ACCESS };
	struct ibv_context *second = ibv_open_device(context->device);
	struct ibv_pd *pd = ibv_alloc_pd(context), *other = ibv_alloc_pd(context), *foreign = ibv_alloc_pd(second);
	void *constant = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 64, IBV_ACCESS_LOCAL_WRITE);
	uint32_t key = mr->rkey;

	EXPECT(ibv_rereg_mr(mr, RIGHTS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ), 0);
	EXPECT(mr->length, 64);
	/* Programs have told the key to their peers. */
	EXPECT(mr->rkey == key && mr->lkey == key, 1);
	EXPECT(ibv_rereg_mr(mr, PLACE, NULL, memory + 1024, 128, 0), 0);
	EXPECT(mr->addr == memory + 1024 && mr->length == 128 && mr->pd == pd, 1);
	EXPECT(ibv_rereg_mr(mr, DOMAIN, other, NULL, 0, 0), 0);
	EXPECT(mr->pd == other && mr->length == 128, 1);
	/* The first domain is free, the second one is used. */
	EXPECT(ibv_dealloc_pd(other), EBUSY);
	EXPECT(ibv_dealloc_pd(pd), 0);
	EXPECT(ibv_rereg_mr(mr, DOMAIN, pd, NULL, 0, 0), IBV_REREG_MR_ERR_CMD);
	pd = ibv_alloc_pd(context);
	EXPECT(ibv_rereg_mr(mr, PLACE | DOMAIN | RIGHTS, pd, memory, sizeof memory, IBV_ACCESS_REMOTE_READ), 0);
	errno = 0;
	EXPECT(ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_CMD);
	EXPECT(errno, EINVAL);
	EXPECT(ibv_rereg_mr(mr, 8, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EXPECT(ibv_rereg_mr(mr, PLACE, NULL, NULL, 64, 0), IBV_REREG_MR_ERR_INPUT);
	EXPECT(ibv_rereg_mr(mr, PLACE, NULL, memory, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EXPECT(ibv_rereg_mr(mr, PLACE, NULL, memory, 64, IBV_ACCESS_LOCAL_WRITE), IBV_REREG_MR_ERR_INPUT);
	EXPECT(ibv_rereg_mr(mr, RIGHTS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE), IBV_REREG_MR_ERR_CMD);
	EXPECT(errno, EINVAL);
	EXPECT(ibv_rereg_mr(mr, DOMAIN, foreign, NULL, 0, 0), IBV_REREG_MR_ERR_CMD);
	EXPECT(errno, EINVAL);
	EXPECT(ibv_rereg_mr(mr, PLACE | RIGHTS, NULL, constant, 8192, IBV_ACCESS_LOCAL_WRITE), IBV_REREG_MR_ERR_CMD);
	EXPECT(errno, EFAULT);
	EXPECT(mr->rkey == key && mr->addr == memory && mr->length == sizeof memory && mr->pd == pd, 1);
	EXPECT(ibv_dereg_mr(mr), 0);
	EXPECT(ibv_rereg_mr(NULL, RIGHTS, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EXPECT(ibv_dealloc_pd(pd), 0);
	EXPECT(ibv_dealloc_pd(other), 0);
	EXPECT(ibv_dealloc_pd(foreign), 0);
	EXPECT(ibv_close_device(second), 0);
	munmap(constant, 8192);
}

/* Regions of files, private and shared, and of huge pages where the kernel has some. */
static void mappings(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	char name[] = "/tmp/xwarp-region-XXXXXX";
	int file = mkstemp(name), huge;
	struct ibv_mr *mr;
	void *map;

	EXPECT(ftruncate(file, 10000), 0);
	map = mmap(NULL, 10000, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	mr = ibv_reg_mr(pd, map, 10000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	EXPECT(mr != NULL, 1);
	EXPECT(ibv_dereg_mr(mr), 0);
	/* Beyond the end of the file there is no page. */
	munmap(map, 10000);
	map = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	REFUSED(ibv_reg_mr(pd, map, 1 << 20, IBV_ACCESS_LOCAL_WRITE), EFAULT);
	munmap(map, 1 << 20);
	map = mmap(NULL, 10000, PROT_READ, MAP_PRIVATE, file, 0);
	mr = ibv_reg_mr(pd, (char *)map + 1, 9999, IBV_ACCESS_REMOTE_READ);
	EXPECT(mr != NULL, 1);
	EXPECT(ibv_dereg_mr(mr), 0);
	munmap(map, 10000);
	close(file);
	unlink(name);
	map = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	huge = map != MAP_FAILED;
	mr = huge ? ibv_reg_mr(pd, map, 4 << 20, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_HUGETLB) : NULL;
	if (huge)
		EXPECT(mr && ibv_dereg_mr(mr) == 0, 1);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

/* What the device says of itself holds, and no more. */
static void limits(struct ibv_context *context)
{
	struct {
		struct ibv_device_attr_ex known;
		char later[64];
	} newer;
	struct ibv_query_device_ex_input wrong = { .comp_mask = 1 };
	struct ibv_device_attr_ex ex;
	struct ibv_device_attr attr;
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_srq_init_attr srq_init = { 0 };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC };
	struct ibv_srq *srq;
	struct ibv_cq *cq;
	struct ibv_qp *qp;

	EXPECT(ibv_query_device(context, &attr), 0);
	EXPECT(ibv_query_device_ex(context, NULL, &ex), 0);
	EXPECT(ex.orig_attr.max_qp_wr, attr.max_qp_wr);
	EXPECT(ex.orig_attr.node_guid == attr.node_guid && attr.node_guid == ibv_get_device_guid(context->device), 1);
	EXPECT(ex.odp_caps.general_caps || ex.tso_caps.max_tso || ex.rss_caps.rx_hash_fields_mask || ex.raw_packet_caps, 0);
	EXPECT(ibv_query_device_ex(context, &wrong, &ex), EINVAL);
	/* A program with newer headers: what this library does not know is zero. */
	memset(&newer, 0xff, sizeof newer);
	EXPECT(verbs_get_ctx(context)->query_device_ex(context, NULL, &newer.known, sizeof newer), 0);
	for (size_t i = 0; i < sizeof newer.later; i++)
		EXPECT(newer.later[i], 0);

	REFUSED(ibv_create_cq(context, attr.max_cqe + 1, NULL, NULL, 0), EINVAL);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	EXPECT(ibv_resize_cq(cq, 0), EINVAL);
	EXPECT(ibv_resize_cq(cq, -1), EINVAL);
	EXPECT(ibv_resize_cq(cq, attr.max_cqe + 1), EINVAL);
	EXPECT(cq->cqe, 16);
	EXPECT(ibv_resize_cq(NULL, 16), EINVAL);
	init.send_cq = init.recv_cq = cq;
	init.cap = (struct ibv_qp_cap){ attr.max_qp_wr, attr.max_qp_wr, attr.max_sge, attr.max_sge, 64 };
	qp = ibv_create_qp(pd, &init);
	EXPECT(qp != NULL, 1);
	EXPECT(ibv_destroy_qp(qp), 0);
	init.cap.max_send_wr++;
	REFUSED(ibv_create_qp(pd, &init), EINVAL);
	init.cap = (struct ibv_qp_cap){ 4, 4, attr.max_sge + 1, 1, 0 };
	REFUSED(ibv_create_qp(pd, &init), EINVAL);
	srq_init.attr = (struct ibv_srq_attr){ attr.max_srq_wr, attr.max_srq_sge, 0 };
	srq = ibv_create_srq(pd, &srq_init);
	EXPECT(srq != NULL, 1);
	srq_init.attr.max_wr++;
	EXPECT(ibv_modify_srq(srq, &srq_init.attr, IBV_SRQ_MAX_WR), EINVAL);
	EXPECT(ibv_modify_srq(srq, NULL, IBV_SRQ_MAX_WR), EINVAL);
	EXPECT(ibv_destroy_srq(srq), 0);
	REFUSED(ibv_create_srq(pd, &srq_init), EINVAL);
	EXPECT(ibv_destroy_cq(cq), 0);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

/* What ibv_create_cq_ex takes, and what it refuses. */
static void extended_queues(struct ibv_context *context)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_cq_ex *cq;

	cq = ibv_create_cq_ex(context, &attr);
	EXPECT(cq != NULL, 1);
	EXPECT(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){ 0 }), ENOENT);
	EXPECT(ibv_resize_cq(ibv_cq_ex_to_cq(cq), 32), 0);
	EXPECT(cq->cqe, 32);
	EXPECT(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
	attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
	cq = ibv_create_cq_ex(context, &attr);
	EXPECT(cq != NULL, 1);
	EXPECT(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	attr.flags = 1 << 7;
	REFUSED(ibv_create_cq_ex(context, &attr), EOPNOTSUPP);
	attr = (struct ibv_cq_init_attr_ex){ .cqe = 16, .wc_flags = IBV_WC_EX_WITH_CVLAN };
	REFUSED(ibv_create_cq_ex(context, &attr), EOPNOTSUPP);
	attr = (struct ibv_cq_init_attr_ex){ .cqe = 16, .comp_vector = 3 };
	REFUSED(ibv_create_cq_ex(context, &attr), EINVAL);
	attr = (struct ibv_cq_init_attr_ex){ .cqe = 0 };
	REFUSED(ibv_create_cq_ex(context, &attr), EINVAL);
	REFUSED(ibv_create_cq_ex(context, NULL), EINVAL);
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

/* Enumerations and masks with values that no kernel knows, beside values that it knows and iWARP does not have. */
static void unknown_values(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_parent_domain_init_attr parent = { .pd = pd };
	struct ibv_td_init_attr thread = { .comp_mask = 1 };
	struct ibv_qp_attr attr = { .port_num = 1, .ah_attr = { .port_num = 2 } };
	struct ibv_send_wr send = { .wr_id = 1 }, *bad = NULL;
	struct ibv_qp *qp;
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	struct sockaddr strange = { .sa_family = 99 };
	int mask;

	REFUSED(ibv_alloc_mw(pd, 0), EINVAL);
	REFUSED(ibv_alloc_mw(pd, 3), EINVAL);
	REFUSED(ibv_alloc_mw(pd, -1), EINVAL);
	for (int type = -1; type < 300; type++) {
		init.qp_type = type;
		if (type != IBV_QPT_RC)
			REFUSED(ibv_create_qp(pd, &init), (type >= 3 && type <= 4) || (type >= 8 && type <= 10) || type == 0xff ? EOPNOTSUPP : EINVAL);
	}
	/* Bits of later versions of rdma-core as well: their tests take this for "not supported". */
	for (parent.comp_mask = 1; parent.comp_mask; parent.comp_mask <<= 1)
		REFUSED(ibv_alloc_parent_domain(context, &parent), EOPNOTSUPP);
	REFUSED(ibv_alloc_td(context, &thread), EINVAL);

	init.qp_type = IBV_QPT_RC;
	qp = ibv_create_qp(pd, &init);
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_AV), EINVAL);
	attr.ah_attr.port_num = 1;
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_AV), 0);
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_ALT_PATH), EINVAL);
	attr.cur_qp_state = 7;
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_CUR_STATE), EINVAL);
	attr.path_mtu = 6;
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_PATH_MTU), EINVAL);
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_RATE_LIMIT), EOPNOTSUPP);
	EXPECT(ibv_modify_qp(qp, &attr, 1 << 21), EOPNOTSUPP);
	EXPECT(ibv_query_qp(qp, &attr, IBV_QP_RATE_LIMIT, &init), EOPNOTSUPP);
	EXPECT(ibv_query_qp(qp, &attr, IBV_QP_RATE_LIMIT - 1, &init), 0);
	/* A queue pair in the error state takes each request that it knows. */
	attr.qp_state = IBV_QPS_ERR;
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	send.opcode = IBV_WR_TSO;
	EXPECT(ibv_post_send(qp, &send, &bad), EOPNOTSUPP);
	send.opcode = 77;
	EXPECT(ibv_post_send(qp, &send, &bad), EINVAL);
	EXPECT(bad == &send, 1);
	EXPECT(ibv_destroy_qp(qp), 0);

	EXPECT(rdma_create_id(channel, &id, NULL, RDMA_PS_IB), -1);
	EXPECT(errno, EPROTONOSUPPORT);
	EXPECT(rdma_create_id(channel, &id, NULL, 0x999), -1);
	EXPECT(errno, EINVAL);
	EXPECT(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), 0);
	EXPECT(rdma_bind_addr(id, &strange), -1);
	EXPECT(errno, EINVAL);
	EXPECT(rdma_resolve_addr(id, NULL, &strange, 100), -1);
	EXPECT(errno, EINVAL);
	attr.qp_state = 9;
	EXPECT(rdma_init_qp_attr(id, &attr, &mask), -1);
	EXPECT(errno, EINVAL);
	EXPECT(rdma_destroy_id(id), 0);
	rdma_destroy_event_channel(channel);
	EXPECT(ibv_destroy_cq(cq), 0);
	EXPECT(ibv_dealloc_pd(pd), 0);
}

/* What the program sets it reads again, also the path to a peer by number: it connects with that after a reset. */
static void kept_attributes(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_qp_attr set = { .path_mtu = IBV_MTU_2048, .rq_psn = 11, .sq_psn = 12, .dest_qp_num = 13, .pkey_index = 0, .timeout = 14,
				   .retry_cnt = 5, .rnr_retry = 6, .min_rnr_timer = 7, .max_rd_atomic = 8, .max_dest_rd_atomic = 9,
				   .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 3, .dgid.raw = { 1, 2, 3 } } } };
	struct ibv_qp_attr got;

	EXPECT(ibv_modify_qp(qp, &set,
			     IBV_QP_PATH_MTU | IBV_QP_RQ_PSN | IBV_QP_SQ_PSN | IBV_QP_DEST_QPN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				     IBV_QP_RNR_RETRY | IBV_QP_MIN_RNR_TIMER | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC |
				     IBV_QP_AV),
	       0);
	EXPECT(ibv_query_qp(qp, &got, IBV_QP_AV, &init), 0);
	EXPECT(got.path_mtu == IBV_MTU_2048 && got.rq_psn == 11 && got.sq_psn == 12 && got.dest_qp_num == 13 && got.timeout == 14, 1);
	EXPECT(got.retry_cnt == 5 && got.rnr_retry == 6 && got.min_rnr_timer == 7, 1);
	EXPECT(got.max_rd_atomic == 8 && got.max_dest_rd_atomic == 9, 1);
	EXPECT(got.ah_attr.is_global && got.ah_attr.grh.hop_limit == 3 && !memcmp(got.ah_attr.grh.dgid.raw, "\1\2\3", 3), 1);
	EXPECT(ibv_destroy_qp(qp), 0);
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
	/* Lists that there are not. */
	second.num_sge = -1;
	EXPECT(ibv_post_recv(qp, &second, &bad_recv), EINVAL);
	second.num_sge = 33;
	EXPECT(ibv_post_recv(qp, &second, &bad_recv), EINVAL);
	second.num_sge = 1, second.sg_list = NULL;
	EXPECT(ibv_post_recv(qp, &second, &bad_recv), EINVAL);
	EXPECT(bad_recv == &second, 1);
	EXPECT(ibv_post_recv(qp, NULL, &bad_recv), 0);
	second.sg_list = &sge;
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
	registrations_again(context);
	mappings(context);
	limits(context);
	extended_queues(context);
	what_iwarp_cannot(context);
	unknown_values(context);
	kept_attributes(context);
	null_pointers(context);
	states_and_posts(context);
	descriptors(context);
	a_child(context);
	EXPECT(ibv_close_device(context), 0);
	EXPECT(ibv_close_device(context), EINVAL);
	printf("%d failures\n", failures);
	return failures != 0;
}
