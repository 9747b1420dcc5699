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

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count == 4 && !strcmp(arguments[1], "bind"))
        bind_at(arguments + 2);
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
