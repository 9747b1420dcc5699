/* A queue pair for which one piece was asked, and a Send of two, as siw and libcxgb4 take it: pieces s|c ADDRESS. */
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <string.h>
int main(int c, char **v) {
    struct rdma_addrinfo h = { .ai_port_space = RDMA_PS_TCP }, *r; struct rdma_cm_id *l, *id;
    struct ibv_qp_init_attr q = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 }, .sq_sig_all = 1 };
    struct ibv_wc w; char b[64];
    int server = v[1][0] == 's';
    if (server) h.ai_flags = RAI_PASSIVE;
    if (rdma_getaddrinfo(v[2], "7400", &h, &r) || rdma_create_ep(server ? &l : &id, r, NULL, &q)) return perror("ep"), 1;
    if (server) { if (rdma_listen(l, 1)) return perror("listen"), 1; puts("listening"); fflush(stdout); if (rdma_get_request(l, &id)) return perror("request"), 1; }
    printf("granted: %u send pieces, %u receive pieces\n", q.cap.max_send_sge, q.cap.max_recv_sge);
    struct ibv_mr *m = rdma_reg_msgs(id, b, sizeof b);
    if (rdma_post_recv(id, NULL, b, 16, m)) return perror("recv"), 1;
    if (server) {
        if (rdma_accept(id, NULL) || rdma_get_recv_comp(id, &w) < 0) return perror("accept"), 1;
        printf("received %u bytes, status %d\n", w.byte_len, w.status);
        return 0;
    }
    if (rdma_connect(id, NULL)) return perror("connect"), 1;
    struct ibv_sge s[2] = { { (uintptr_t)b + 16, 4, m->lkey }, { (uintptr_t)b + 32, 4, m->lkey } };
    struct ibv_send_wr wr = { .sg_list = s, .num_sge = 2, .opcode = IBV_WR_SEND }, *bad;
    int e = ibv_post_send(id->qp, &wr, &bad);
    printf("Send of two pieces: %s\n", e ? strerror(e) : "ok");
    if (!e) rdma_get_send_comp(id, &w);
    rdma_disconnect(id);
    return e;
}
