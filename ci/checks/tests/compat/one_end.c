/* Calls of one end, and what rdma-core and a kernel driver of iWARP answer: on side A of the lab, under xwarp run. Prints what differs, and counts. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static int n, bad;
#define IS(why, what, want) do { errno = 0; long g_ = (long)(what), w_ = (long)(want); n++; if (g_ != w_) { bad++; printf("%3d %s: %s = %ld (errno %s), rdma-core: %ld\n", n, why, #what, g_, strerrorname_np(errno), w_); } } while (0)
#define ERR(why, call, e) do { errno = 0; long r_ = (long)(call); n++; if (r_ != -1 || errno != e) { bad++; printf("%3d %s: %s = %ld %s, rdma-core: -1 %s\n", n, why, #call, r_, strerrorname_np(errno), strerrorname_np(e)); } } while (0)
#define NUL(why, call, e) do { errno = 0; void *r_ = (void *)(call); n++; if (r_ || errno != e) { bad++; printf("%3d %s: %s = %p %s, rdma-core: NULL %s\n", n, why, #call, r_, strerrorname_np(errno), strerrorname_np(e)); } } while (0)
static struct sockaddr_in at(const char *ip, int p) { struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(p) }; inet_pton(AF_INET, ip, &a.sin_addr); return a; }
static struct rdma_cm_event *next(struct rdma_event_channel *c, int ms) { struct pollfd p = { c->fd, POLLIN }; struct rdma_cm_event *e; return poll(&p, 1, ms) > 0 && !rdma_get_cm_event(c, &e) ? e : NULL; }
int main(void)
{
	int num = -1;
	struct ibv_device **l = ibv_get_device_list(&num); setvbuf(stdout, 0, _IOLBF, 0);
	IS("list", num >= 1 && l[num] == NULL, 1);
	struct ibv_context *c = ibv_open_device(l[0]), *c2 = ibv_open_device(l[0]);
	ibv_free_device_list(l);
	IS("device outlives its list", ibv_get_device_name(c->device) != NULL, 1);
	IS("index", ibv_get_device_index(c->device) >= -1, 1);
	struct ibv_port_attr pa;
	struct ibv_device_attr da; ibv_query_device(c, &da);
	IS("port 0", ibv_query_port(c, 0, &pa) != 0, 1);
	IS("port 2", ibv_query_port(c, 2, &pa) != 0, 1);
	IS("port 1", ibv_query_port(c, 1, &pa), 0);
	IS("state", pa.state, IBV_PORT_ACTIVE);
	IS("ethernet", pa.link_layer, IBV_LINK_LAYER_ETHERNET);
	struct ibv_gid_entry ge[32];
	IS("gid_ex flags", ibv_query_gid_ex(c, 1, 0, ge, 1), EINVAL);
	IS("gid_ex index", ibv_query_gid_ex(c, 1, 1000, ge, 0), ENODATA);
	IS("gid table", ibv_query_gid_table(c, ge, 32, 0) == pa.gid_tbl_len, 1);
	IS("gid table 1", ibv_query_gid_table(c, ge, 1, 0), pa.gid_tbl_len > 1 ? -EINVAL : 1);
	IS("gid table 0", ibv_query_gid_table(c, ge, 0, 0), -EINVAL);
	IS("flags", !!(da.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS), 1);
	struct ibv_device other = { .name = "other0" };
	IS("a device that is not ours", strcmp(ibv_get_device_name(&other), "other0"), 0);
	IS("pkey index", ibv_get_pkey_index(c, 1, 0xffff), 0);
	ERR("pkey absent", ibv_get_pkey_index(c, 1, 0x1234), ENOENT);
	IS("status string", strcmp(ibv_wc_status_str(9999), "unknown"), 0);
	IS("event string", strcmp(ibv_event_type_str(9999), "unknown"), 0);
	IS("node string", strcmp(ibv_node_type_str(99), "unknown"), 0);
	IS("port string", strcmp(ibv_port_state_str(99), "unknown"), 0);
	IS("flush string", strcmp(ibv_wc_status_str(IBV_WC_WR_FLUSH_ERR), "Work Request Flushed Error"), 0);
	IS("rate", ibv_rate_to_mbps(IBV_RATE_10_GBPS), 10000);
	IS("rate mult", ibv_rate_to_mult(IBV_RATE_10_GBPS), 4);
	struct ibv_pd *pd = ibv_alloc_pd(c), *pd2 = ibv_alloc_pd(c2);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(c);
	struct ibv_cq *cq = ibv_create_cq(c, 10, (void *)7, ch, 0), *cq2 = ibv_create_cq(c2, 10, 0, 0, 0);
	IS("cqe", cq->cqe >= 10, 1);
	IS("cq context", (long)cq->cq_context, 7);
	struct ibv_qp_init_attr qa = { .send_cq = cq2, .recv_cq = cq2, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 16 } };
	{ struct ibv_qp *x = ibv_create_qp(pd, &qa);
	IS("queue of another context", x == NULL, 1); if (x) ibv_destroy_qp(x); }
	qa.send_cq = qa.recv_cq = cq;
	qa.cap = (struct ibv_qp_cap){ 4, 4, 1, 1, 16 };
	struct ibv_qp *qp = ibv_create_qp(pd, &qa);
	IS("caps", qa.cap.max_send_wr >= 4 && qa.cap.max_recv_wr >= 4 && qa.cap.max_inline_data >= 16, 1);
	{ struct ibv_qp_init_attr none = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC };
	struct ibv_qp *x = ibv_create_qp(pd, &none);
	IS("capacities of 0", x && none.cap.max_send_wr && none.cap.max_recv_wr && none.cap.max_send_sge && none.cap.max_recv_sge, 1); if (x) ibv_destroy_qp(x); }
	NUL("channel of another context", ibv_create_cq(c2, 10, 0, ch, 0), EINVAL);
	qa.cap.max_inline_data = 1 << 20;
	IS("inline too large", ibv_create_qp(pd, &qa) == NULL, 1);
	qa.cap.max_inline_data = 0;
	NUL("no send queue", (qa.send_cq = NULL, ibv_create_qp(pd, &qa)), EINVAL);
	qa.send_cq = cq;
	struct ibv_qp_attr q;
	struct ibv_qp_init_attr qi; ibv_query_qp(qp, &q, IBV_QP_STATE, &qi);
	IS("a fresh queue pair of iWARP", q.qp_state, IBV_QPS_INIT);
	IS("pieces that devices take", qa.cap.max_send_sge >= 6 && qa.cap.max_recv_sge >= 6, 1);
	IS("plain qp", ibv_qp_to_qp_ex(qp) == NULL, 1);
	struct ibv_qp_attr m = { .qp_state = IBV_QPS_RTS, .port_num = 2 };
	IS("INIT to RTS", ibv_modify_qp(qp, &m, IBV_QP_STATE), EINVAL);
	m.qp_state = IBV_QPS_INIT;
	IS("port 2", ibv_modify_qp(qp, &m, IBV_QP_STATE | IBV_QP_PORT), EINVAL); m.port_num = 1;
	m.qp_state = IBV_QPS_RESET;
	IS("RESET", ibv_modify_qp(qp, &m, IBV_QP_STATE), 0);
	m.qp_state = IBV_QPS_RTR;
	IS("RESET to RTR", ibv_modify_qp(qp, &m, IBV_QP_STATE), EINVAL);
	m.qp_state = IBV_QPS_RTS;
	IS("RESET to RTS", ibv_modify_qp(qp, &m, IBV_QP_STATE), EINVAL);
	m.qp_state = 77;
	IS("no such state", ibv_modify_qp(qp, &m, IBV_QP_STATE), EINVAL);
	m.qp_state = IBV_QPS_INIT;
	IS("no such attribute", ibv_modify_qp(qp, &m, IBV_QP_STATE | 1 << 29) != 0, 1);
	m.qp_state = IBV_QPS_RESET; ibv_modify_qp(qp, &m, IBV_QP_STATE);
	static char buf[65536] __attribute__((aligned(4096)));
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge s = { (uintptr_t)buf, 64, mr->lkey };
	struct ibv_recv_wr rw = { .wr_id = 5, .sg_list = &s, .num_sge = 1 }, *rb;
	struct ibv_send_wr sw = { .wr_id = 6, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *sb;
	IS("post recv in RESET", ibv_post_recv(qp, &rw, &rb), EINVAL);
	IS("bad", rb == &rw, 1);
	m.qp_state = IBV_QPS_INIT;
	IS("INIT", ibv_modify_qp(qp, &m, IBV_QP_STATE), 0);
	IS("INIT again", ibv_modify_qp(qp, &m, IBV_QP_STATE), 0);
	ibv_query_qp(qp, &q, IBV_QP_STATE, &qi);
	IS("query", q.qp_state, IBV_QPS_INIT);
	IS("query init", qi.send_cq == cq && qi.qp_type == IBV_QPT_RC, 1);
	ibv_req_notify_cq(cq, 0); sw.num_sge = 1 << 20;
	IS("list of a million pieces", ibv_post_send(qp, &sw, &sb), EINVAL);
	IS("bad", sb == &sw, 1); sw.num_sge = 1; rw.num_sge = 1 << 20;
	IS("list of a million pieces", ibv_post_recv(qp, &rw, &rb), EINVAL); rw.num_sge = 1;
	IS("post recv", ibv_post_recv(qp, &rw, &rb), 0);
	m.qp_state = IBV_QPS_ERR;
	IS("ERR", ibv_modify_qp(qp, &m, IBV_QP_STATE), 0);
	struct ibv_cq *ecq; void *ectx;
	struct pollfd p = { ch->fd, POLLIN };
	IS("event", poll(&p, 1, 2000), 1);
	IS("get", ibv_get_cq_event(ch, &ecq, &ectx), 0);
	IS("queue", ecq == cq && (long)ectx == 7, 1); ibv_ack_cq_events(cq, 1);
	struct ibv_wc wc[8];
	IS("flushed", ibv_poll_cq(cq, 8, wc), 1);
	IS("flush status", wc[0].status == IBV_WC_WR_FLUSH_ERR && wc[0].wr_id == 5, 1);
	IS("post send in ERR", ibv_post_send(qp, &sw, &sb), 0);
	IS("post recv in ERR", ibv_post_recv(qp, &rw, &rb), 0); usleep(50000);
	IS("both flushed", ibv_poll_cq(cq, 8, wc), 2);
	IS("one event an arm", poll(&p, 1, 50), 0);
	IS("ERR to RTS", ibv_modify_qp(qp, (m.qp_state = IBV_QPS_RTS, &m), IBV_QP_STATE), EINVAL);
	IS("ERR to RESET", ibv_modify_qp(qp, (m.qp_state = IBV_QPS_RESET, &m), IBV_QP_STATE), 0);
	ibv_req_notify_cq(cq, 1);
	m.qp_state = IBV_QPS_INIT; ibv_modify_qp(qp, &m, IBV_QP_STATE); ibv_post_recv(qp, &rw, &rb);
	m.qp_state = IBV_QPS_ERR; ibv_modify_qp(qp, &m, IBV_QP_STATE);
	IS("an error is an event even if only solicited ones are asked for", poll(&p, 1, 500), 1); if (p.revents) { ibv_get_cq_event(ch, &ecq, &ectx); ibv_ack_cq_events(cq, 1); } ibv_poll_cq(cq, 8, wc);
	IS("destroy a queue in use", ibv_destroy_cq(cq), EBUSY);
	IS("destroy qp", ibv_destroy_qp(qp), 0);
	// shared receive queues
	struct ibv_srq_init_attr sa = { .attr = { 4, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &sa);
	IS("pieces of an srq", sa.attr.max_sge >= 6, 1); int k = 0; while (k < 100 && !ibv_post_srq_recv(srq, &rw, &rb)) k++;
	IS("srq takes max_wr", k >= 4 && k < 100, 1);
	IS("then ENOMEM", ibv_post_srq_recv(srq, &rw, &rb), ENOMEM);
	struct ibv_srq_attr at1 = { .max_wr = 1 };
	IS("shrink below what waits", ibv_modify_srq(srq, &at1, IBV_SRQ_MAX_WR) != 0, 1); at1.srq_limit = 100;
	IS("limit above size", ibv_modify_srq(srq, &at1, IBV_SRQ_LIMIT), EINVAL); at1.srq_limit = 2;
	IS("limit", ibv_modify_srq(srq, &at1, IBV_SRQ_LIMIT), 0); ibv_query_srq(srq, &at1);
	IS("limit read", at1.srq_limit, 2);
	qa.srq = srq; qp = ibv_create_qp(pd, &qa);
	IS("post recv to a qp with srq", ibv_post_recv(qp, &rw, &rb) != 0, 1);
	IS("srq in use", ibv_destroy_srq(srq), EBUSY); ibv_destroy_qp(qp);
	IS("srq", ibv_destroy_srq(srq), 0);
	qa.srq = NULL;
	// extended queue
	struct ibv_cq_init_attr_ex ea = { .cqe = 8, .wc_flags = IBV_WC_STANDARD_FLAGS, .channel = ch };
	struct ibv_cq_ex *ex = ibv_create_cq_ex(c, &ea);
	struct ibv_poll_cq_attr pat = { .comp_mask = 1 };
	IS("start_poll comp_mask", ibv_start_poll(ex, &pat), EINVAL); pat.comp_mask = 0;
	IS("empty", ibv_start_poll(ex, &pat), ENOENT);
	qa.cap = (struct ibv_qp_cap){ 4, 4, 1, 1, 0 };
	qa.recv_cq = qa.send_cq = ibv_cq_ex_to_cq(ex); qp = ibv_create_qp(pd, &qa);
	m.qp_state = IBV_QPS_INIT; ibv_modify_qp(qp, &m, IBV_QP_STATE); for (int i = 0; i < 3; i++) rw.wr_id = 100 + i, ibv_post_recv(qp, &rw, &rb);
	m.qp_state = IBV_QPS_ERR; ibv_modify_qp(qp, &m, IBV_QP_STATE);
	IS("first", ibv_start_poll(ex, &pat), 0);
	IS("wr_id", ex->wr_id, 100);
	IS("status", ex->status, IBV_WC_WR_FLUSH_ERR);
	IS("qp_num", ibv_wc_read_qp_num(ex), qp->qp_num);
	IS("next", ibv_next_poll(ex), 0);
	IS("wr_id 2", ex->wr_id, 101); ibv_end_poll(ex);
	IS("old poll takes the rest", ibv_poll_cq(ibv_cq_ex_to_cq(ex), 8, wc), 1);
	IS("wr_id 3", wc[0].wr_id, 102);
	IS("qp_ex of a plain qp is none", ibv_qp_to_qp_ex(qp) == NULL, 1); ibv_destroy_qp(qp);
	IS("cq_ex", ibv_destroy_cq(ibv_cq_ex_to_cq(ex)), 0);
	qa.send_cq = qa.recv_cq = cq;
	IS("fork_init", ibv_fork_init(), 0);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	IS("window", mw != NULL, 1); if (mw) IS("dealloc", ibv_dealloc_mw(mw), 0);
	// events of a context
	fcntl(c->async_fd, F_SETFL, O_NONBLOCK);
	struct ibv_async_event ae;
	ERR("no event", ibv_get_async_event(c, &ae), EAGAIN);
	// connection manager
	struct rdma_event_channel *ec = rdma_create_event_channel();
	struct rdma_cm_id *id, *id2;
	struct sockaddr_in a;
	struct rdma_cm_event *e;
	rdma_create_id(ec, &id, (void *)9, RDMA_PS_TCP);
	IS("context", (long)id->context, 9);
	IS("no verbs yet", id->verbs == NULL, 1);
	ERR("route first", rdma_resolve_route(id, 1000), EINVAL);
	ERR("connect first", rdma_connect(id, &(struct rdma_conn_param){ 0 }), EINVAL);
	ERR("accept first", rdma_accept(id, &(struct rdma_conn_param){ 0 }), EINVAL);
	ERR("disconnect first", rdma_disconnect(id), EINVAL);
	ERR("reject first", rdma_reject(id, NULL, 0), EINVAL);
	ERR("notify first", rdma_notify(id, IBV_EVENT_COMM_EST), EINVAL);
	struct ibv_qp_init_attr ca = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	ERR("qp before the address", rdma_create_qp(id, NULL, &ca), EINVAL);
	a = at("192.0.2.77", 1);
	ERR("foreign address", rdma_bind_addr(id, (void *)&a), EADDRNOTAVAIL);
	a = at("10.77.0.1", 17001);
	IS("bind", rdma_bind_addr(id, (void *)&a), 0);
	IS("verbs", id->verbs != NULL, 1);
	IS("port", ntohs(rdma_get_src_port(id)), 17001);
	ERR("bind twice", rdma_bind_addr(id, (void *)&a), EINVAL);
	rdma_create_id(ec, &id2, NULL, RDMA_PS_TCP);
	ERR("address in use", rdma_bind_addr(id2, (void *)&a), EADDRINUSE);
	IS("listen", rdma_listen(id, 3), 0);
	ERR("listen twice", rdma_listen(id, 3), EINVAL);
	ERR("connect a listener", rdma_connect(id, &(struct rdma_conn_param){ 0 }), EINVAL);
	ERR("resolve a listener", rdma_resolve_addr(id, NULL, (void *)&a, 100), EINVAL);
	IS("listen without an address", rdma_listen(id2, 1), 0);
	IS("its port", rdma_get_src_port(id2) != 0, 1); rdma_destroy_id(id2); rdma_destroy_id(id);
	ERR("destroyed", rdma_destroy_id(id), EINVAL);
	rdma_create_id(ec, &id, NULL, RDMA_PS_TCP);
	a = at("192.0.2.77", 7); int r = rdma_resolve_addr(id, NULL, (void *)&a, 500); e = r ? NULL : next(ec, 2000);
	IS("no route is an error at once or an event", r == -1 || (e && e->event == RDMA_CM_EVENT_ADDR_ERROR), 1); if (e) { IS("negative status", e->status < 0, 1); rdma_ack_cm_event(e); } rdma_destroy_id(id);
	rdma_create_id(ec, &id, NULL, RDMA_PS_TCP);
	a = at("10.77.0.99", 7);
	IS("resolve", rdma_resolve_addr(id, NULL, (void *)&a, 300), 0); e = next(ec, 5000);
	IS("silent host", e && e->event == RDMA_CM_EVENT_ADDR_ERROR && e->status < 0, 1); if (e) rdma_ack_cm_event(e); rdma_destroy_id(id);
	rdma_create_id(ec, &id, NULL, RDMA_PS_TCP);
	a = at("10.77.0.2", 9);
	IS("resolve", rdma_resolve_addr(id, NULL, (void *)&a, 2000), 0); e = next(ec, 3000);
	IS("resolved", e && e->event == RDMA_CM_EVENT_ADDR_RESOLVED, 1); if (e) rdma_ack_cm_event(e);
	ERR("connect without a route", rdma_connect(id, &(struct rdma_conn_param){ 0 }), EINVAL);
	IS("route", rdma_resolve_route(id, 2000), 0); e = next(ec, 2000);
	IS("route resolved", e && e->event == RDMA_CM_EVENT_ROUTE_RESOLVED, 1); if (e) rdma_ack_cm_event(e);
	ERR("connect without a qp", rdma_connect(id, &(struct rdma_conn_param){ 0 }), EINVAL);
	IS("qp", rdma_create_qp(id, NULL, &ca), 0);
	IS("own queues", id->send_cq && id->recv_cq && id->send_cq_channel, 1);
	ERR("qp twice", rdma_create_qp(id, NULL, &ca), EINVAL);
	IS("connect", rdma_connect(id, &(struct rdma_conn_param){ .responder_resources = 1, .initiator_depth = 1 }), 0); e = next(ec, 5000);
	IS("refused", e ? e->event : -1, RDMA_CM_EVENT_REJECTED); if (e) { IS("status", e->status, -ECONNREFUSED); rdma_ack_cm_event(e); } rdma_destroy_qp(id);
	IS("qp is gone", id->qp == NULL, 1);
	uint8_t tos = 8; int one = 1;
	IS("tos", rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1), 0);
	ERR("tos of 4 bytes", rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &one, 4), EINVAL);
	ERR("no such option", rdma_set_option(id, RDMA_OPTION_ID, 99, &one, 4), ENOSYS);
	ERR("no such level", rdma_set_option(id, 99, 0, &one, 4), ENOSYS); rdma_destroy_id(id);
	struct rdma_addrinfo h = { .ai_flags = RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP }, *ai;
	IS("no numeric host", rdma_getaddrinfo("nosuchhost", "1", &h, &ai) != 0, 1); h.ai_flags = RAI_PASSIVE;
	IS("passive", rdma_getaddrinfo(NULL, "17002", &h, &ai), 0); rdma_freeaddrinfo(ai);
	IS("answer", rdma_getaddrinfo("10.77.0.2", "17002", NULL, &ai), 0); free(ai);
	IS("answer", rdma_getaddrinfo("10.77.0.2", "17002", NULL, &ai), 0); free(ai->ai_dst_addr); ai->ai_dst_addr = calloc(1, 64); rdma_freeaddrinfo(ai);
	IS("no service", rdma_getaddrinfo("10.77.0.2", "no-such-service", NULL, &ai) != 0, 1);
	IS("event string", strcmp(rdma_event_str(999), "UNKNOWN EVENT"), 0); int nd;
	struct ibv_context **dl = rdma_get_devices(&nd);
	IS("devices", nd >= 1 && dl[nd] == NULL, 1); for (int i = 0; i < 3; i++) { free(dl); free(ibv_get_device_list(NULL)); dl = rdma_get_devices(&nd); } IS("devices after free()", dl[nd] == NULL, 1); rdma_free_devices(dl); rdma_destroy_event_channel(ec);
	IS("pd in use", ibv_dealloc_pd(pd), EBUSY); ibv_dereg_mr(mr);
	IS("pd", ibv_dealloc_pd(pd), 0);
	IS("cq", ibv_destroy_cq(cq), 0);
	IS("channel", ibv_destroy_comp_channel(ch), 0);
	IS("close", ibv_close_device(c), 0);
	IS("the other context lives", ibv_dealloc_pd(pd2), 0);
	printf("%d checks, %d differ\n", n, bad);
	return bad != 0;
}
