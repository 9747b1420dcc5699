// The life of a device in one process: the names of its cases are the first argument, those of their outcomes the output.
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void fail(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    fflush(stdout);
    _Exit(1);
}

static struct sockaddr *address(const char *host, const char *port)
{
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(host, port, &hints, &found))
        fail("getaddrinfo");
    return found->ai_addr;
}

// bind ADDRESS PORT: whether an identifier can have the address, and listen there.
static void bind_at(char **arguments)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id;
    if (!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
        fail("rdma_create_id");
    if (rdma_bind_addr(id, address(arguments[0], arguments[1])))
        fail("rdma_bind_addr");
    if (rdma_listen(id, 1))
        fail("rdma_listen");
    char text[INET6_ADDRSTRLEN];
    const void *raw = id->route.addr.src_addr.sa_family == AF_INET
                          ? (void *)&id->route.addr.src_sin.sin_addr
                          : (void *)&id->route.addr.src_sin6.sin6_addr;
    printf("listens at %s %u\n", inet_ntop(id->route.addr.src_addr.sa_family, raw, text, sizeof text),
           ntohs(rdma_get_src_port(id)));
    rdma_destroy_id(id);
}

// reopen ROUNDS: a device is opened, used for a connection by number, and closed, again and again.
static void reopen(int rounds)
{
    for (int round = 0; round < rounds; round++) {
        struct ibv_device **list = ibv_get_device_list(NULL);
        struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
        if (!context)
            fail("ibv_open_device");
        struct ibv_pd *pd = ibv_alloc_pd(context);
        struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
        struct ibv_qp_init_attr init = {
            .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {1, 1, 1, 1, 0}};
        struct ibv_qp *qp = ibv_create_qp(pd, &init);
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
        if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
            fail("ibv_modify_qp");
        if (ibv_destroy_qp(qp) || ibv_destroy_cq(cq) || ibv_dealloc_pd(pd) || ibv_close_device(context))
            fail("close");
        ibv_free_device_list(list);
    }
    printf("%d rounds\n", rounds);
}

// The parent exits; the child continues when that has happened, as in daemon(3).
static void become_daemon(void)
{
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child)
        _exit(0);
    if (setsid() < 0)
        fail("setsid");
}

// daemon ADDRESS PORT: a program that becomes a daemon after its first call.
static void daemon_binds(char **arguments)
{
    if (!rdma_get_devices(NULL))
        fail("rdma_get_devices");
    become_daemon();
    bind_at(arguments);
}

// inherit ADDRESS PORT: a program that becomes a daemon after it listens; it then listens again.
static void daemon_inherits(char **arguments)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id;
    struct rdma_cm_event *event;
    if (!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
        fail("rdma_create_id");
    if (rdma_bind_addr(id, address(arguments[0], arguments[1])) || rdma_listen(id, 1))
        fail("rdma_listen");
    become_daemon();
    if (!rdma_get_cm_event(channel, &event))
        printf("an event of the parent\n");
    printf("rdma_get_cm_event: %s\n", strerror(errno));
    rdma_destroy_id(id);
    bind_at(arguments);
}

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    union ibv_gid gid;
    char memory[4096];
};

static void initialize(struct end *end)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
    if (ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("INIT");
}

static void make_end(struct end *end, struct ibv_context *context)
{
    end->context = context;
    end->pd = ibv_alloc_pd(context);
    end->cq = ibv_create_cq(context, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {
        .send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
    end->qp = ibv_create_qp(end->pd, &init);
    end->mr = ibv_reg_mr(end->pd, end->memory, sizeof end->memory,
                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    if (!end->qp || !end->mr || ibv_query_gid(context, 1, 0, &end->gid))
        fail("make_end");
    initialize(end);
}

static int connect_end(struct end *end, union ibv_gid gid, uint32_t number)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR,
                               .path_mtu = IBV_MTU_1024,
                               .dest_qp_num = number,
                               .max_dest_rd_atomic = 1,
                               .min_rnr_timer = 12,
                               .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}}};
    if (ibv_modify_qp(end->qp, &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return -1;
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
    if (ibv_modify_qp(end->qp, &attr,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC))
        fail("RTS");
    return 0;
}

static enum ibv_wc_opcode completed(struct end *end)
{
    struct ibv_wc wc;
    int found;
    while (!(found = ibv_poll_cq(end->cq, 1, &wc)))
        ;
    if (found < 0 || wc.status != IBV_WC_SUCCESS || wc.qp_num != end->qp->qp_num) {
        printf("a completion: %s, opcode %d, of %u\n", ibv_wc_status_str(wc.status), wc.opcode, wc.qp_num);
        _Exit(1);
    }
    return wc.opcode;
}

// A Send, and an RDMA Read of what it carried. Both ends may be one.
static void exchange(struct end *from, struct end *to, int letter)
{
    struct ibv_sge to_here = {(uintptr_t)to->memory + 2048, 2048, to->mr->lkey};
    struct ibv_recv_wr receive = {.sg_list = &to_here, .num_sge = 1}, *bad_receive;
    memset(from->memory, letter, 2048);
    struct ibv_sge from_here = {(uintptr_t)from->memory, 2048, from->mr->lkey};
    struct ibv_send_wr send = {.sg_list = &from_here, .num_sge = 1, .opcode = IBV_WR_SEND,
                               .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad;
    if (ibv_post_recv(to->qp, &receive, &bad_receive) || ibv_post_send(from->qp, &send, &bad))
        fail("post");
    enum ibv_wc_opcode arrived = completed(to), sent = completed(from);
    if (arrived + sent != IBV_WC_RECV + IBV_WC_SEND || (from != to && sent != IBV_WC_SEND))
        fail("other completions");
    if (to->memory[2048] != letter || to->memory[4095] != letter)
        fail("other bytes arrived");
    struct ibv_send_wr read = {.sg_list = &from_here, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
                               .send_flags = IBV_SEND_SIGNALED,
                               .wr.rdma = {(uintptr_t)to->memory + 2048, to->mr->rkey}};
    memset(from->memory, 0, 2048);
    if (ibv_post_send(from->qp, &read, &bad))
        fail("post");
    if (completed(from) != IBV_WC_RDMA_READ || from->memory[0] != letter || from->memory[2047] != letter)
        fail("other bytes were read");
}

// A wrong key ends the connection with itself, and a reset prepares the next one.
static void refuse_own(struct end *end)
{
    struct ibv_sge here = {(uintptr_t)end->memory, 64, end->mr->lkey};
    struct ibv_send_wr read = {.sg_list = &here, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
                               .send_flags = IBV_SEND_SIGNALED,
                               .wr.rdma = {(uintptr_t)end->memory, end->mr->rkey + 256}};
    struct ibv_send_wr *bad;
    struct ibv_wc wc;
    int found;
    if (ibv_post_send(end->qp, &read, &bad))
        fail("post");
    while (!(found = ibv_poll_cq(end->cq, 1, &wc)))
        ;
    if (found < 0 || wc.status != IBV_WC_REM_ACCESS_ERR || wc.qp_num != end->qp->qp_num)
        fail("a wrong key is no error");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
    if (ibv_modify_qp(end->qp, &attr, IBV_QP_STATE))
        fail("RESET");
    initialize(end);
}

// own: a queue pair exchanges data with itself, then two of this process with each other, by number.
static void connect_own(void)
{
    static struct end ends[2];
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    if (!context)
        fail("ibv_open_device");
    for (int i = 0; i < 2; i++)
        make_end(&ends[i], context);
    for (int round = 0; round < 2; round++) {
        if (connect_end(&ends[0], ends[0].gid, ends[0].qp->qp_num))
            fail("RTR with itself");
        exchange(&ends[0], &ends[0], 'x' + round);
        refuse_own(&ends[0]);
    }
    printf("with itself\n");
    for (int i = 0; i < 2; i++)
        if (connect_end(&ends[i], ends[!i].gid, ends[!i].qp->qp_num))
            fail("RTR");
    for (int i = 0; i < 2; i++)
        exchange(&ends[i], &ends[!i], 'a' + i);
    for (int i = 0; i < 2; i++)
        if (ibv_destroy_qp(ends[i].qp) || ibv_destroy_cq(ends[i].cq) || ibv_dereg_mr(ends[i].mr) ||
            ibv_dealloc_pd(ends[i].pd))
            fail("destroy");
    printf("both directions\n");
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count == 4 && !strcmp(arguments[1], "bind"))
        bind_at(arguments + 2);
    else if (count == 2 && !strcmp(arguments[1], "own"))
        connect_own();
    else if (count == 3 && !strcmp(arguments[1], "reopen"))
        reopen(atoi(arguments[2]));
    else if (count == 4 && !strcmp(arguments[1], "daemon"))
        daemon_binds(arguments + 2);
    else if (count == 4 && !strcmp(arguments[1], "inherit"))
        daemon_inherits(arguments + 2);
    else
        return 2;
    return 0;
}
