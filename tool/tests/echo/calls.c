/* Socket calls and options, one group for each connection. Both ends print what each call has done: over SDP it must be what it is over
   TCP. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static struct sockaddr_in address;
static const char *self, *host, *port;
static int listener = -1;
static const char *group = "";

static void say(const char *format, ...) {
    va_list list;
    printf("%s: ", group);
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
    putchar('\n');
    fflush(stdout);
}

static void fail(const char *what) {
    printf("%s: FAILED %s: %s\n", group, what, strerror(errno));
    fflush(stdout);
    exit(1);
}

/* What a call has returned, with the name of its error. */
static long told(const char *what, long done) {
    if (done < 0) say("%s -> %s", what, strerrorname_np(errno));
    else say("%s -> %ld", what, done);
    return done;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void pause_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&t, &t) && errno == EINTR) {}
}

/* Receives exactly so many bytes. */
static void get(int s, void *to, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t got = recv(s, (char *)to + at, n - at, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) fail("the stream ends early");
        at += got;
    }
}

static void put(int s, const void *from, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t sent = send(s, (const char *)from + at, n - at, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) fail("send");
        at += sent;
    }
}

/* Receives exactly so many bytes and prints them. */
static void show(const char *what, int s, size_t n) {
    char bytes[256] = {0};
    get(s, bytes, n);
    say("%s: %s", what, bytes);
}

static void step(int s) { put(s, "s", 1); }
static void await(int s) { char byte; get(s, &byte, 1); if (byte != 's') fail("another step"); }

/* Requests and answers: what passes the loopback by. */
static void warm(int s, int first) {
    char bytes[8];
    for (int i = 0; i < 30; i++) {
        if (first) put(s, "requests", 8);
        get(s, bytes, 8);
        if (!first) put(s, "answers.", 8);
    }
}

/* Receives by calls that do not wait. What takes a part of what came leaves the rest to the next call, which finds it at once. */
static long poll_by_reads(int s, char *to, size_t n) {
    long got;
    while ((got = recv(s, to, n, MSG_DONTWAIT)) < 0 && errno == EAGAIN) {}
    return got;
}

static void end_of(int s) {
    char byte;
    told("the end", recv(s, &byte, 1, 0));
}

static int dial(void) {
    int s = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(s, (struct sockaddr *)&address, sizeof address)) fail("connect");
    return s;
}

/* The group's connection, until the group closes it. */
static int present;
static int shut(int s) {
    present = -1;
    return close(s);
}

static int poll_for(int s, short events, int ms) {
    struct pollfd wait = {s, events, 0};
    int n;
    while ((n = poll(&wait, 1, ms)) < 0 && errno == EINTR) {}
    return n <= 0 ? 0 : wait.revents;
}

static void bits(const char *what, int events) {
    say("%s:%s%s%s%s%s%s", what, events & POLLIN ? " IN" : "", events & POLLOUT ? " OUT" : "", events & POLLPRI ? " PRI" : "",
        events & POLLRDHUP ? " RDHUP" : "", events & POLLHUP ? " HUP" : "", events & POLLERR ? " ERR" : "");
}

#define ALL (POLLIN | POLLOUT | POLLPRI | POLLRDHUP)

/* Waits until these events are there, lets others follow, and prints all. */
static void state(const char *what, int s, short events) {
    for (int i = 0; i < 2000 && (poll_for(s, ALL, 0) & events) != events; i++) pause_ms(5);
    pause_ms(30);
    bits(what, poll_for(s, ALL, 0));
}

/* ---- checked twins ---- */

static void checked_serve(int s) { warm(s, 0); put(s, "0123456789abcdefghij", 20); await(s); }
static void checked_call(int s) {
    /* The compiler does not know how long they are, but what there is room for. */
    volatile size_t four = 4, one = 1, far = 100;
    char bytes[32] = {0};
    struct pollfd wait[2] = {{s, POLLIN, 0}, {-1, 0, 0}};
    struct timespec limit = {20, 0};
    struct sockaddr_in from;
    socklen_t room = sizeof from;
    warm(s, 1);
    told("poll", poll(wait, one, 20000));
    told("ppoll", ppoll(wait, one, &limit, 0));
    told("read", read(s, bytes, four));
    told("recv", recv(s, bytes + 4, four, 0));
    told("recvfrom", recvfrom(s, bytes + 8, four, 0, (struct sockaddr *)&from, &room));
    say("room %u", room);
    told("recv peeks", recv(s, bytes + 12, four, MSG_PEEK));
    told("recv waits", recv(s, bytes + 12, four * 2, MSG_WAITALL));
    say("%s", bytes);
    for (int which = 0; which < 3; which++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            char few[8];
            struct rlimit none = {0, 0};
            setrlimit(RLIMIT_CORE, &none);
            close(2);
            if (which == 0) _exit(read(s, few, far) > 0);
            if (which == 1) _exit(recv(s, few, far, 0) > 0);
            _exit(recvfrom(s, few, far, 0, 0, 0) > 0);
        }
        int status;
        waitpid(child, &status, 0);
        say("too long: signal %d", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    }
    step(s);
}

/* ---- vectors ---- */

static void vectors_serve(int s) {
    warm(s, 0);
    put(s, "abcdefghijklmnopqrstuvwxyz", 26);
    show("many pieces", s, 26);
    show("pwritev2", s, 5);
    show("sendmsg", s, 6);
    show("writev after it", s, 3);
    put(s, "behind", 6);
    await(s);
}
static void vectors_call(int s) {
    char bytes[40] = {0}, name[64];
    struct iovec in[13], out[13];
    volatile int too_many = IOV_MAX + 1;
    warm(s, 1);
    for (int i = 0; i < 13; i++) in[i] = (struct iovec){bytes + 2 * i, 2}, out[i] = in[i];
    poll_for(s, POLLIN, 20000);
    told("readv of one", readv(s, in, 1));
    told("readv of thirteen", readv(s, in + 1, 11));
    told("preadv2", preadv2(s, in + 12, 1, -1, 0));
    say("%s", bytes);
    told("writev", writev(s, out, 13));
    told("pwritev2", pwritev2(s, &(struct iovec){"hello", 5}, 1, -1, 0));
    struct iovec pieces[3] = {{"one", 3}, {0, 0}, {"two", 3}};
    struct msghdr message = {.msg_name = &address, .msg_namelen = sizeof address, .msg_iov = pieces, .msg_iovlen = 3};
    told("sendmsg", sendmsg(s, &message, MSG_NOSIGNAL));
    told("writev", writev(s, &(struct iovec){"end", 3}, 1));
    memset(bytes, 0, sizeof bytes);
    char control[64];
    struct msghdr got = {.msg_name = name, .msg_namelen = sizeof name, .msg_iov = in, .msg_iovlen = 3, .msg_control = control,
        .msg_controllen = sizeof control, .msg_flags = 0x7777};
    told("recvmsg", recvmsg(s, &got, MSG_WAITALL | MSG_CMSG_CLOEXEC));
    say("%s, name %u, control %zu, flags %x", bytes, got.msg_namelen, got.msg_controllen, got.msg_flags & ~MSG_CMSG_CLOEXEC);
    told("no pieces", writev(s, out, 0));
    told("too many pieces", writev(s, out, too_many));
    told("no bytes", write(s, bytes, 0));
    told("no room", read(s, bytes, 0));
    told("preadv", preadv(s, in, 1, 0));
    told("pread", pread(s, bytes, 1, 0));
    told("pwrite", pwrite(s, bytes, 1, 0));
    told("lseek", lseek(s, 0, SEEK_CUR));
    step(s);
}

/* ---- several messages ---- */

static void several_serve(int s) {
    warm(s, 0);
    show("sendmmsg", s, 9);
    put(s, "abcdef", 6);
    await(s);
    put(s, "ghi", 3);
    show("send after it", s, 4);
    put(s, "jkl", 3);
    await(s);
}
static void several_call(int s) {
    char bytes[3][8] = {{0}};
    struct iovec pieces[3] = {{"one", 3}, {"two", 3}, {"six", 3}};
    struct mmsghdr messages[3] = {0};
    warm(s, 1);
    for (int i = 0; i < 3; i++) messages[i].msg_hdr.msg_iov = &pieces[i], messages[i].msg_hdr.msg_iovlen = 1;
    told("sendmmsg", sendmmsg(s, messages, 3, 0));
    say("lengths %u %u %u", messages[0].msg_len, messages[1].msg_len, messages[2].msg_len);
    for (int i = 0; i < 3; i++) pieces[i] = (struct iovec){bytes[i], 3};
    while (recv(s, bytes[0], 6, MSG_PEEK) < 6) pause_ms(1);
    struct timespec limit = {20, 0};
    told("recvmmsg", recvmmsg(s, messages, 2, MSG_WAITALL, &limit));
    told("recvmmsg finds nothing", recvmmsg(s, messages, 3, MSG_DONTWAIT, 0));
    step(s);
    told("recvmmsg waits for one", recvmmsg(s, messages + 2, 1, MSG_WAITFORONE | MSG_WAITALL, &limit));
    say("%s %s %s", bytes[0], bytes[1], bytes[2]);
    told("send", send(s, "last", 4, 0));
    show("recv", s, 3);
    step(s);
}

/* ---- files and pipes ---- */

#define LONG 300000
static void files_serve(int s) {
    static char bytes[LONG];
    warm(s, 0);
    show("sendfile with an offset", s, 10);
    show("sendfile without", s, 10);
    show("splice", s, 11);
    show("write after it", s, 5);
    get(s, bytes, LONG);
    int same = 1;
    for (int i = 0; i < LONG; i++) same &= bytes[i] == (char)(i * 7);
    say("the file %s", same ? "is the same" : "has changed");
    put(s, "through a pipe", 14);
    put(s, bytes, LONG);
    await(s);
}
static void files_call(int s) {
    static char bytes[LONG], back[LONG];
    FILE *file = tmpfile();
    int fd = fileno(file), through[2];
    warm(s, 1);
    if (pipe(through) || write(fd, "0123456789ABCDEFGHIJ", 20) != 20) fail("pipe");
    off_t at = 5;
    told("sendfile", sendfile(s, fd, &at, 10));
    say("offset %ld, position %ld", (long)at, (long)lseek(fd, 0, SEEK_CUR));
    lseek(fd, 2, SEEK_SET);
    told("sendfile", sendfile(s, fd, 0, 10));
    say("position %ld", (long)lseek(fd, 0, SEEK_CUR));
    if (write(through[1], "from a pipe", 11) != 11) fail("write");
    told("splice", splice(through[0], 0, s, 0, 11, 0));
    told("write", write(s, "close", 5));
    for (int i = 0; i < LONG; i++) bytes[i] = (char)(i * 7);
    /* The kernel sends pages of the first file, which must stay. */
    FILE *longer = tmpfile();
    if (pwrite(fileno(longer), bytes, LONG, 0) != LONG) fail("pwrite");
    at = 0;
    while (at < LONG) if (sendfile64(s, fileno(longer), (off64_t *)&at, LONG - at) <= 0) fail("sendfile64");
    told("splice", splice(s, 0, through[1], 0, 14, 0));
    told("read", read(through[0], back, 14));
    say("%s", back);
    for (int done = 0; done < LONG;) {
        ssize_t n = splice(s, 0, through[1], 0, LONG - done, done & 1 ? SPLICE_F_MOVE : 0);
        if (n <= 0) fail("splice");
        for (ssize_t left = n; left;) {
            ssize_t got = read(through[0], back + done, left);
            if (got <= 0) fail("read");
            left -= got, done += got;
        }
    }
    say("%s", memcmp(bytes, back, LONG) ? "other bytes" : "the same bytes");
    fcntl(s, F_SETFL, O_NONBLOCK);
    told("splice finds nothing", splice(s, 0, through[1], 0, 5, 0));
    fcntl(s, F_SETFL, 0);
    told("splice with an offset", splice(s, &(off64_t){0}, through[1], 0, 5, 0));
    told("copy_file_range", copy_file_range(fd, 0, s, 0, 5, 0));
    fclose(file), fclose(longer), close(through[0]), close(through[1]);
    step(s);
}

/* ---- flags ---- */

static void flags_serve(int s) {
    warm(s, 0);
    pause_ms(50);
    put(s, "0123456789", 10);
    show("MORE", s, 10);
    show("EOR and CONFIRM", s, 4);
    await(s);
    put(s, "whole", 5);
    pause_ms(50);
    put(s, "thing", 5);
    await(s);
    for (int i = 0; i < 50; i++) await(s), put(s, "0123456789", 10);
}
static void flags_call(int s) {
    char bytes[32] = {0};
    warm(s, 1);
    told("a part", poll_by_reads(s, bytes, 2));
    told("PEEK and DONTWAIT behind it", recv(s, bytes + 2, 20, MSG_PEEK | MSG_DONTWAIT));
    told("TRUNC", recv(s, 0, 3, MSG_TRUNC));
    told("PEEK", recv(s, bytes + 2, 2, MSG_PEEK));
    told("the rest", recv(s, bytes + 4, 20, MSG_DONTWAIT));
    say("%s", bytes);
    told("DONTWAIT", recv(s, bytes, 1, MSG_DONTWAIT));
    told("OOB", recv(s, bytes, 1, MSG_OOB));
    told("ERRQUEUE", recv(s, bytes, 1, MSG_ERRQUEUE));
    told("MORE", send(s, "01234", 5, MSG_MORE));
    told("no more", send(s, "56789", 5, 0));
    told("EOR and CONFIRM", sendto(s, "this", 4, MSG_EOR | MSG_CONFIRM, (struct sockaddr *)&address, sizeof address));
    step(s);
    memset(bytes, 0, sizeof bytes);
    told("WAITALL", recv(s, bytes, 10, MSG_WAITALL));
    say("%s", bytes);
    step(s);
    int unseen = 0, n;
    for (int i = 0; i < 50; i++) {
        step(s);
        if (poll_by_reads(s, bytes, 2) != 2) fail("a part");
        if (i % 2) unseen += recv(s, bytes, 20, MSG_PEEK | MSG_DONTWAIT) != 8;
        else unseen += ioctl(s, FIONREAD, &n) || n != 8;
        get(s, bytes, 8);
    }
    say("rests that were not seen at once: %d", unseen);
}

/* ---- readiness ---- */

static void ready_serve(int s) {
    warm(s, 0);
    put(s, "data", 4);
    await(s);
    shutdown(s, SHUT_WR);
    state("own SHUT_WR", s, POLLOUT);
    await(s);
    state("peer's SHUT_WR", s, POLLIN | POLLRDHUP | POLLHUP);
    int again = accept(listener, 0, 0);
    warm(again, 0);
    await(again);
    setsockopt(again, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
    close(again);
}
static void ready_call(int s) {
    char bytes[8];
    int fresh = socket(AF_INET, SOCK_STREAM, 0);
    bits("new", poll_for(fresh, ALL, 0));
    listen(fresh, 1);
    bits("listens", poll_for(fresh, ALL, 0));
    close(fresh);
    warm(s, 1);
    state("data", s, POLLIN | POLLOUT);
    get(s, bytes, 4);
    state("open", s, POLLOUT);
    fd_set in, out, other;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&other);
    FD_SET(s, &in), FD_SET(s, &out), FD_SET(s, &other);
    struct timeval limit = {20, 0};
    told("select", select(s + 1, &in, &out, &other, &limit));
    say("in %d out %d other %d", !!FD_ISSET(s, &in), !!FD_ISSET(s, &out), !!FD_ISSET(s, &other));
    FD_ZERO(&in);
    FD_SET(s, &in);
    double begin = now();
    told("pselect", pselect(s + 1, &in, 0, 0, &(struct timespec){0, 60000000}, 0));
    say("in time %d", now() - begin > 0.055 && now() - begin < 10);
    begin = now();
    told("ppoll", ppoll(&(struct pollfd){s, POLLIN, 0}, 1, &(struct timespec){0, 60000000}, 0));
    say("in time %d", now() - begin > 0.055 && now() - begin < 10);
    step(s);
    pause_ms(300);
    state("peer's SHUT_WR", s, POLLIN | POLLRDHUP | POLLOUT);
    end_of(s);
    step(s);
    shutdown(s, SHUT_WR);
    state("both", s, POLLIN | POLLHUP);
    int again = dial();
    warm(again, 1);
    shutdown(again, SHUT_RD);
    state("own SHUT_RD", again, POLLIN | POLLRDHUP);
    end_of(again);
    step(again);
    state("reset", again, POLLERR | POLLHUP);
    close(again);
}

/* ---- epoll ---- */

static void told_events(const char *what, int set, int ms) {
    struct epoll_event found[8];
    int n;
    while ((n = epoll_wait(set, found, 8, ms)) < 0 && errno == EINTR) {}
    if (n <= 0) say("%s: none", what);
    else bits(what, found[0].events);
}
static void epoll_serve(int s) {
    char byte;
    warm(s, 0);
    for (int i = 0; i < 8; i++) await(s), put(s, "x", 1);
    while (recv(s, &byte, 1, 0) > 0) {}
}
static void epoll_call(int s) {
    char byte;
    int set = epoll_create1(EPOLL_CLOEXEC), other = epoll_create1(0);
    struct epoll_event level = {EPOLLIN | EPOLLRDHUP, {.fd = s}};
    warm(s, 1);
    told("ADD", epoll_ctl(set, EPOLL_CTL_ADD, s, &level));
    told("ADD again", epoll_ctl(set, EPOLL_CTL_ADD, s, &level));
    told_events("nothing", set, 20);
    step(s);
    told_events("level", set, 20000);
    told_events("level again", set, 0);
    get(s, &byte, 1);
    told_events("level, read", set, 20);
    struct epoll_event edge = {EPOLLIN | EPOLLET, {.fd = s}};
    told("MOD to edges", epoll_ctl(set, EPOLL_CTL_MOD, s, &edge));
    step(s);
    told_events("edge", set, 20000);
    told_events("no edge", set, 20);
    step(s);
    told_events("another edge", set, 20000);
    edge.events |= EPOLLOUT;
    told("MOD", epoll_ctl(set, EPOLL_CTL_MOD, s, &edge));
    told_events("MOD reports", set, 20000);
    get(s, &byte, 1), get(s, &byte, 1);
    struct epoll_event once = {EPOLLIN | EPOLLONESHOT, {.fd = s}};
    told("MOD to once", epoll_ctl(set, EPOLL_CTL_MOD, s, &once));
    step(s);
    told_events("once", set, 20000);
    step(s);
    told_events("not twice", set, 50);
    told("MOD arms", epoll_ctl(set, EPOLL_CTL_MOD, s, &once));
    told_events("once again", set, 20000);
    get(s, &byte, 1), get(s, &byte, 1);
    told("DEL", epoll_ctl(set, EPOLL_CTL_DEL, s, 0));
    told("DEL again", epoll_ctl(set, EPOLL_CTL_DEL, s, 0));
    struct epoll_event alone = {EPOLLIN | EPOLLEXCLUSIVE, {.fd = s}};
    told("EXCLUSIVE", epoll_ctl(set, EPOLL_CTL_ADD, s, &alone));
    told("MOD of EXCLUSIVE", epoll_ctl(set, EPOLL_CTL_MOD, s, &level));
    step(s);
    struct epoll_event found;
    sigset_t none;
    sigemptyset(&none);
    told("epoll_pwait", epoll_pwait(set, &found, 1, 20000, &none));
    told("EXCLUSIVE in another set", epoll_ctl(other, EPOLL_CTL_ADD, s, &alone));
    told("epoll_pwait2", epoll_pwait2(other, &found, 1, &(struct timespec){20, 0}, &none));
    get(s, &byte, 1);
    epoll_ctl(set, EPOLL_CTL_DEL, s, 0);
    epoll_ctl(set, EPOLL_CTL_ADD, s, &level);
    int copy = dup(s);
    shut(s);
    step(copy);
    told_events("the duplicate keeps the entry", set, 20000);
    get(copy, &byte, 1);
    step(copy);
    get(copy, &byte, 1);
    close(copy);
    told_events("closed", set, 20);
    close(set), close(other);
}

/* ---- ioctl and fcntl ---- */

static volatile sig_atomic_t signals;
static void count_signal(int number) { (void)number; signals++; }
static void on_signal(int number, int flags) {
    struct sigaction action = {.sa_handler = count_signal, .sa_flags = flags};
    sigaction(number, &action, 0);
    signals = 0;
}

static void control_serve(int s) {
    warm(s, 0);
    pause_ms(50);
    put(s, "0123456789", 10);
    await(s);
    put(s, "x", 1);
    await(s);
    char bytes[2000];
    get(s, bytes, sizeof bytes);
    put(s, "y", 1);
    await(s);
}
static void control_call(int s) {
    char bytes[32] = {0}, many[2000] = {0};
    int n = -1, on = 1, off = 0;
    warm(s, 1);
    told("a part", poll_by_reads(s, bytes, 4));
    told("FIONREAD", ioctl(s, FIONREAD, &n));
    say("%d behind a part", n);
    told("SIOCATMARK", ioctl(s, SIOCATMARK, &n));
    say("%d", n);
    get(s, bytes, 6);
    told("FIONREAD", ioctl(s, FIONREAD, &n));
    say("%d", n);
    told("FIONBIO", ioctl(s, FIONBIO, &on));
    told("recv", recv(s, bytes, 1, 0));
    say("O_NONBLOCK %d", !!(fcntl(s, F_GETFL) & O_NONBLOCK));
    told("FIONBIO", ioctl(s, FIONBIO, &off));
    say("O_NONBLOCK %d", !!(fcntl(s, F_GETFL) & O_NONBLOCK));
    on_signal(SIGUSR1, 0);
    on_signal(SIGIO, 0);
    told("F_SETOWN", fcntl(s, F_SETOWN, getpid()));
    say("own %d", fcntl(s, F_GETOWN) == getpid());
    told("F_SETSIG", fcntl(s, F_SETSIG, SIGUSR1));
    told("O_ASYNC", fcntl(s, F_SETFL, fcntl(s, F_GETFL) | O_ASYNC));
    step(s);
    for (int i = 0; i < 2000 && !signals; i++) pause_ms(5);
    say("signal %d", signals > 0);
    fcntl(s, F_SETFL, fcntl(s, F_GETFL) & ~O_ASYNC);
    get(s, bytes, 1);
    told("F_DUPFD", fcntl(s, F_DUPFD, 300));
    told("F_DUPFD_CLOEXEC", fcntl(s, F_DUPFD_CLOEXEC, 301));
    say("flags %d %d", fcntl(300, F_GETFD), fcntl(301, F_GETFD));
    fcntl(301, F_SETFL, fcntl(301, F_GETFL) | O_NONBLOCK);
    told("recv by the first", recv(s, bytes, 1, 0));
    fcntl(300, F_SETFL, fcntl(300, F_GETFL) & ~O_NONBLOCK);
    told("dup3 onto itself", dup3(300, 300, 0));
    told("dup2 onto itself", dup2(300, 300));
    step(s);
    put(300, many, 1000), put(301, many, 1000);
    get(301, bytes, 1);
    for (int i = 0; i < 2000 && !ioctl(s, SIOCOUTQ, &n) && n; i++) pause_ms(5);
    say("SIOCOUTQ %d", n);
    close(300), close(301);
    step(s);
}

/* ---- options ---- */

static int option(int s, int level, int name) {
    int value = -1;
    socklen_t len = sizeof value;
    return getsockopt(s, level, name, &value, &len) ? -errno : value;
}
static void set_option(const char *what, int s, int level, int name, int value) {
    int done = setsockopt(s, level, name, &value, sizeof value);
    say("%s %d: %s, %d", what, value, done ? strerrorname_np(errno) : "set", option(s, level, name));
}
static void options_of(int s) {
    say("type %d, domain %d, protocol %d, listens %d, error %d", option(s, SOL_SOCKET, SO_TYPE), option(s, SOL_SOCKET, SO_DOMAIN),
        option(s, SOL_SOCKET, SO_PROTOCOL), option(s, SOL_SOCKET, SO_ACCEPTCONN), option(s, SOL_SOCKET, SO_ERROR));
    set_option("KEEPALIVE", s, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option("KEEPIDLE", s, IPPROTO_TCP, TCP_KEEPIDLE, 33);
    set_option("KEEPINTVL", s, IPPROTO_TCP, TCP_KEEPINTVL, 11);
    set_option("KEEPCNT", s, IPPROTO_TCP, TCP_KEEPCNT, 5);
    set_option("USER_TIMEOUT", s, IPPROTO_TCP, TCP_USER_TIMEOUT, 4321);
    set_option("TOS", s, IPPROTO_IP, IP_TOS, 0x10);
    set_option("TTL", s, IPPROTO_IP, IP_TTL, 77);
    set_option("PRIORITY", s, SOL_SOCKET, SO_PRIORITY, 3);
    set_option("MARK", s, SOL_SOCKET, SO_MARK, 0);
    set_option("NODELAY", s, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option("CORK", s, IPPROTO_TCP, TCP_CORK, 0);
    set_option("QUICKACK", s, IPPROTO_TCP, TCP_QUICKACK, 1);
    set_option("NOTSENT_LOWAT", s, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 16384);
    set_option("SYNCNT", s, IPPROTO_TCP, TCP_SYNCNT, 4);
    set_option("LINGER2", s, IPPROTO_TCP, TCP_LINGER2, 9);
    set_option("DEFER_ACCEPT", s, IPPROTO_TCP, TCP_DEFER_ACCEPT, 3);
    set_option("REUSEADDR", s, SOL_SOCKET, SO_REUSEADDR, 1);
    set_option("OOBINLINE", s, SOL_SOCKET, SO_OOBINLINE, 1);
    set_option("BROADCAST", s, SOL_SOCKET, SO_BROADCAST, 1);
    set_option("BUSY_POLL", s, SOL_SOCKET, SO_BUSY_POLL, 0);
    set_option("TIMESTAMP", s, SOL_SOCKET, SO_TIMESTAMP, 1);
    set_option("TIMESTAMP", s, SOL_SOCKET, SO_TIMESTAMP, 0);
    set_option("RCVBUF", s, SOL_SOCKET, SO_RCVBUF, 50000);
    set_option("SNDBUF", s, SOL_SOCKET, SO_SNDBUF, 60000);
    set_option("no such level", s, 12345, 1, 1);
    set_option("no such option", s, IPPROTO_TCP, 12345, 1);
    told("ULP", setsockopt(s, IPPROTO_TCP, TCP_ULP, "none such", 9) < 0 ? 0 : 1);
}
static void options_serve(int s) { warm(s, 0); show("after all options", s, 5); put(s, "other", 5); await(s); }
static void options_call(int s) {
    struct tcp_info info = {0};
    socklen_t len = sizeof info;
    warm(s, 1);
    options_of(s);
    told("TCP_INFO", getsockopt(s, IPPROTO_TCP, TCP_INFO, &info, &len));
    say("state %d, round trip time %d, mss %d", info.tcpi_state, info.tcpi_rtt > 0, info.tcpi_snd_mss > 0);
    put(s, "whole", 5);
    show("and back", s, 5);
    step(s);
    say("listens %d", option(listener < 0 ? s : listener, SOL_SOCKET, SO_ACCEPTCONN));
}

/* ---- time limits ---- */

static void limits_serve(int s) {
    warm(s, 0);
    /* Does not read until the peer has reset the connection. */
    for (int i = 0; i < 4000 && !(poll_for(s, POLLRDHUP, 0) & (POLLERR | POLLHUP)); i++) pause_ms(5);
}
static void limits_call(int s) {
    static char bytes[1 << 20];
    struct timeval limit = {0, 120000}, is;
    socklen_t len = sizeof is;
    warm(s, 1);
    told("RCVTIMEO", setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    getsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &is, &len);
    say("is %d", is.tv_sec == 0 && is.tv_usec >= 120000 && is.tv_usec < 130000);
    for (int i = 0; i < 3; i++) {
        double begin = now();
        told(i ? "read" : "recv", i ? read(s, bytes, 9) : recv(s, bytes, 9, 0));
        say("in time %d", now() - begin > 0.11 && now() - begin < 10);
    }
    told("SNDTIMEO", setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
    ssize_t sent;
    double begin = now();
    while ((sent = send(s, bytes, sizeof bytes, MSG_NOSIGNAL)) > 0) {}
    told("send", sent);
    say("in time %d", now() - begin > 0.11 && now() - begin < 20);
    setsockopt(s, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
}

/* ---- close ---- */

static void linger_serve(int s) {
    static char bytes[200000];
    warm(s, 0);
    get(s, bytes, sizeof bytes);
    end_of(s);
    int again = accept(listener, 0, 0);
    warm(again, 0);
    step(again);
    for (int i = 0; i < 2000 && !(poll_for(again, ALL, 0) & POLLERR); i++) pause_ms(5);
    told("after a reset", recv(again, bytes, 1, 0));
    told("again", recv(again, bytes, 1, 0));
    struct sockaddr_in name;
    socklen_t len = sizeof name;
    told("getpeername", getpeername(again, (struct sockaddr *)&name, &len));
    on_signal(SIGPIPE, 0);
    told("write", write(again, "x", 1));
    say("signals %d", signals);
    told("NOSIGNAL", send(again, "x", 1, MSG_NOSIGNAL));
    say("signals %d", signals);
    signal(SIGPIPE, SIG_IGN);
    told("ignored", write(again, "x", 1));
    close(again);
}
static void linger_call(int s) {
    static char bytes[200000];
    struct linger some = {1, 5}, none = {1, 0}, is;
    socklen_t len = sizeof is;
    warm(s, 1);
    told("LINGER", setsockopt(s, SOL_SOCKET, SO_LINGER, &some, sizeof some));
    getsockopt(s, SOL_SOCKET, SO_LINGER, &is, &len);
    say("%d %d", is.l_onoff, is.l_linger);
    put(s, bytes, sizeof bytes);
    double begin = now();
    told("close", shut(s));
    say("in time %d", now() - begin < 5);
    int again = dial();
    warm(again, 1);
    await(again);
    setsockopt(again, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    told("close", close(again));
}

/* ---- connect, accept, listen ---- */

static void connect_serve(int s) {
    warm(s, 0);
    /* Flags of the listener are not inherited; accept4 sets them. */
    fcntl(listener, F_SETFL, fcntl(listener, F_GETFL) | O_NONBLOCK);
    told("nobody calls", accept(listener, 0, 0));
    await(s);
    shut(s);
    for (int i = 0; i < 3; i++) {
        poll_for(listener, POLLIN, 50000);
        struct sockaddr_in name = {0};
        socklen_t len = i == 1 ? 4 : sizeof name;
        int again = i == 2 ? accept4(listener, (struct sockaddr *)&name, &len, SOCK_NONBLOCK | SOCK_CLOEXEC)
                           : accept(listener, (struct sockaddr *)&name, &len);
        say("O_NONBLOCK %d, FD_CLOEXEC %d, length %u", !!(fcntl(again, F_GETFL) & O_NONBLOCK), fcntl(again, F_GETFD), len);
        fcntl(again, F_SETFL, 0);
        warm(again, 0);
        if (i == 0) {
            len = sizeof name;
            getpeername(again, (struct sockaddr *)&name, &len);
            struct sockaddr_in own = {0};
            getsockname(again, (struct sockaddr *)&own, &len);
            say("own address %d, port %d", own.sin_addr.s_addr == address.sin_addr.s_addr, own.sin_port == address.sin_port);
            put(again, &name, sizeof name);
        }
        end_of(again);
        close(again);
    }
    fcntl(listener, F_SETFL, 0);
    told("shutdown of a listener's copy", accept4(dup(0), 0, 0, 0) < 0 && errno == ENOTSOCK ? 0 : 1);
}
static void connect_call(int s) {
    struct sockaddr_in name = {0}, other = address, nobody = address;
    socklen_t len = sizeof name;
    warm(s, 1);
    told("connect again", connect(s, (struct sockaddr *)&address, sizeof address));
    told("listen", listen(s, 1));
    told("accept", accept(s, 0, 0));
    step(s);
    end_of(s);
    int fresh = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    told("getpeername", getpeername(fresh, (struct sockaddr *)&name, &len));
    told("send", send(fresh, "x", 1, MSG_NOSIGNAL));
    told("recv", recv(fresh, &name, 1, 0));
    told("shutdown", shutdown(fresh, SHUT_WR));
    told("accept", accept(fresh, 0, 0));
    nobody.sin_port = htons(ntohs(address.sin_port) + 1);
    told("connect where nobody listens", connect(fresh, (struct sockaddr *)&nobody, sizeof nobody));
    poll_for(fresh, POLLOUT, 20000);
    say("SO_ERROR %s", strerrorname_np(option(fresh, SOL_SOCKET, SO_ERROR)));
    say("SO_ERROR %d", option(fresh, SOL_SOCKET, SO_ERROR));
    close(fresh);
    other.sin_family = 77;
    fresh = socket(AF_INET, SOCK_STREAM, 0);
    told("another family", connect(fresh, (struct sockaddr *)&other, sizeof other));
    told("a short address", connect(fresh, (struct sockaddr *)&address, 5));
    told("refused", connect(fresh, (struct sockaddr *)&nobody, sizeof nobody));
    inet_pton(AF_INET, "203.0.113.1", &other.sin_addr);
    other.sin_family = AF_INET;
    told("no route", connect(fresh, (struct sockaddr *)&other, sizeof other));
    told("bad descriptor", connect(999, (struct sockaddr *)&address, sizeof address));
    /* Then it can be connected. */
    told("connect", connect(fresh, (struct sockaddr *)&address, sizeof address));
    warm(fresh, 1);
    struct sockaddr_in mine = {0}, seen = {0};
    len = sizeof mine;
    getsockname(fresh, (struct sockaddr *)&mine, &len);
    get(fresh, &seen, sizeof seen);
    say("names agree %d", mine.sin_port == seen.sin_port && mine.sin_addr.s_addr == seen.sin_addr.s_addr);
    /* Dissolved, and connected again. */
    shutdown(fresh, SHUT_WR);
    end_of(fresh);
    struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    told("dissolve", connect(fresh, &nowhere, sizeof nowhere));
    told("connect", connect(fresh, (struct sockaddr *)&address, sizeof address));
    warm(fresh, 1);
    close(fresh);
    fresh = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int done = connect(fresh, (struct sockaddr *)&address, sizeof address);
    say("EINPROGRESS or connected %d", done == 0 || errno == EINPROGRESS);
    bits("connected", poll_for(fresh, POLLOUT, 20000));
    say("SO_ERROR %d", option(fresh, SOL_SOCKET, SO_ERROR));
    told("connect again", connect(fresh, (struct sockaddr *)&address, sizeof address) < 0 && errno != EISCONN ? -1 : 0);
    fcntl(fresh, F_SETFL, 0);
    warm(fresh, 1);
    close(fresh);
}

/* ---- a source that is bound ---- */

static void bound_serve(int s) {
    /* Connections over SDP and TCP may overtake each other until the program has accepted them. */
    warm(s, 0);
    for (int i = 0; i < 2; i++) {
        struct sockaddr_in name;
        socklen_t len = sizeof name;
        int again = accept(listener, (struct sockaddr *)&name, &len);
        char text[INET_ADDRSTRLEN];
        inet_ntop(AF_INET, &name.sin_addr, text, sizeof text);
        if (i) say("from %s", text);
        else say("from %s, port %u", text, ntohs(name.sin_port));
        warm(again, 0);
        close(again);
    }
}
static void bound_call(int s) {
    struct sockaddr_in mine = {0};
    socklen_t len = sizeof mine;
    getsockname(s, (struct sockaddr *)&mine, &len);
    warm(s, 1);
    for (int i = 0; i < 2; i++) {
        /* A port of the program's choice, which the kernel gives to no other connection; then a second address of the host. */
        int fresh = socket(AF_INET, SOCK_STREAM, 0), on = 1;
        struct sockaddr_in from = mine, is = {0};
        from.sin_port = i ? 0 : htons(24567);
        if (i) from.sin_addr.s_addr = htonl(ntohl(mine.sin_addr.s_addr) + 100);
        else from.sin_addr.s_addr = INADDR_ANY;
        setsockopt(fresh, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        told("bind", bind(fresh, (struct sockaddr *)&from, sizeof from));
        told("connect", connect(fresh, (struct sockaddr *)&address, sizeof address));
        len = sizeof is;
        getsockname(fresh, (struct sockaddr *)&is, &len);
        if (i) say("own address %d", is.sin_addr.s_addr == from.sin_addr.s_addr);
        else say("own port %u", ntohs(is.sin_port));
        warm(fresh, 1);
        end_of(fresh);
        close(fresh);
    }
}

/* ---- signals ---- */

static void every(int ms) {
    struct itimerval timer = {{0, ms * 1000}, {0, ms * 1000}};
    setitimer(ITIMER_REAL, &timer, 0);
}
static void signals_serve(int s) {
    warm(s, 0);
    await(s);
    pause_ms(200);
    put(s, "late", 4);
    await(s);
    pause_ms(200);
    put(s, "late", 4);
    await(s);
}
static void signals_call(int s) {
    static char bytes[1 << 20];
    struct iovec piece = {bytes, 8};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    struct epoll_event found;
    int set = epoll_create1(0), lonely = socket(AF_INET, SOCK_STREAM, 0);
    fd_set in;
    listen(lonely, 1);
    epoll_ctl(set, EPOLL_CTL_ADD, s, &(struct epoll_event){EPOLLIN, {.fd = s}});
    warm(s, 1);
    for (int restarts = 0; restarts < 2; restarts++) {
        say("restarts %d", restarts);
        on_signal(SIGALRM, restarts ? SA_RESTART : 0);
        every(30);
        if (!restarts) {
            told("read", read(s, bytes, 8));
            told("readv", readv(s, &piece, 1));
            told("recv", recv(s, bytes, 8, 0));
            told("recv PEEK", recv(s, bytes, 8, MSG_PEEK));
            told("recv WAITALL", recv(s, bytes, 8, MSG_WAITALL));
            told("recvfrom", recvfrom(s, bytes, 8, 0, 0, 0));
            told("recvmsg", recvmsg(s, &message, 0));
            told("recvmmsg", recvmmsg(s, &(struct mmsghdr){message, 0}, 1, 0, 0));
            told("accept", accept(lonely, 0, 0));
        }
        /* These are never restarted. */
        told("poll", poll(&(struct pollfd){s, POLLIN, 0}, 1, 20000));
        told("ppoll", ppoll(&(struct pollfd){s, POLLIN, 0}, 1, 0, 0));
        FD_ZERO(&in);
    FD_SET(s, &in);
        told("select", select(s + 1, &in, 0, 0, 0));
        told("epoll_wait", epoll_wait(set, &found, 1, 20000));
        if (restarts) {
            step(s);
            told("read", read(s, bytes, 8));
            step(s);
            told("recv", recv(s, bytes, 4, MSG_WAITALL));
            say("signals %d", signals > 3);
            struct timeval limit = {20, 0};
            setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
            told("read with a time limit", read(s, bytes, 8));
        }
        every(0);
    }
    step(s);
    close(set), close(lonely);
}

/* ---- processes ---- */

static void forks_serve(int s) {
    char bytes[8];
    int from_parent = 0, from_child = 0;
    warm(s, 0);
    for (int i = 0; i < 400; i++) {
        get(s, bytes, 8);
        from_parent += !memcmp(bytes, "parents.", 8), from_child += !memcmp(bytes, "children", 8);
        put(s, "answers.", 8);
    }
    say("parent %d, child %d", from_parent, from_child);
    show("after the child", s, 5);
    put(s, "yes!!", 5);
    show("spawned", s, 7);
    show("vforked", s, 7);
    show("at last", s, 4);
}
static void forks_call(int s) {
    warm(s, 1);
    fflush(stdout);
    int turn[2], back[2];
    char byte = 0, bytes[8];
    if (pipe(turn) || pipe(back)) fail("pipe");
    pid_t child = fork();
    /* Both send and receive, in turn. */
    for (int i = 0; i < 200; i++) {
        if (child) {
            put(s, "parents.", 8), get(s, bytes, 8);
            if (write(turn[1], "t", 1) != 1 || read(back[0], &byte, 1) != 1) fail("turn");
        } else {
            if (read(turn[0], &byte, 1) != 1) _exit(1);
            put(s, "children", 8), get(s, bytes, 8);
            if (write(back[1], "t", 1) != 1) _exit(1);
        }
    }
    if (!child) _exit(0);
    int status = -1;
    waitpid(child, &status, 0);
    say("status %d", status);
    put(s, "alive", 5);
    show("answer", s, 5);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, s, 1);
    char *arguments[] = {"printf", "spawned", 0};
    if (posix_spawnp(&child, "printf", &actions, 0, arguments, environ)) fail("posix_spawn");
    waitpid(child, &status, 0);
    say("status %d", status);
    child = vfork();
    if (child == 0) {
        dup2(s, 1);
        execlp("printf", "printf", "vforked", (char *)0);
        _exit(1);
    }
    waitpid(child, &status, 0);
    say("status %d", status);
    put(s, "last", 4);
    for (int i = 0; i < 2; i++) close(turn[i]), close(back[i]);
}

/* The server starts itself again with its listening socket, as inetd does. */
static void inherit_serve(int s) {
    char number[16];
    await(s);
    snprintf(number, sizeof number, "%d", listener);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl(self, self, "inherit", host, port, number, (char *)0);
        _exit(1);
    }
    step(s);
    int status = -1;
    waitpid(child, &status, 0);
    say("status %d", status);
}
static void inherit_call(int s) {
    step(s);
    await(s);
    int again = dial();
    show("from the executed program", again, 8);
    put(again, "question", 8);
    end_of(again);
    close(again);
}
static int inherited(int with) {
    int s = accept(with, 0, 0);
    group = "inherit";
    if (s < 0) fail("accept");
    put(s, "executed", 8);
    show("to the executed program", s, 8);
    return close(s);
}

static const struct {
    const char *name;
    void (*serve)(int), (*call)(int);
} GROUPS[] = {
    {"checked", checked_serve, checked_call}, {"vectors", vectors_serve, vectors_call}, {"several", several_serve, several_call},
    {"files", files_serve, files_call}, {"flags", flags_serve, flags_call}, {"ready", ready_serve, ready_call},
    {"epoll", epoll_serve, epoll_call}, {"control", control_serve, control_call}, {"options", options_serve, options_call},
    {"limits", limits_serve, limits_call}, {"linger", linger_serve, linger_call}, {"connect", connect_serve, connect_call},
    {"bound", bound_serve, bound_call}, {"signals", signals_serve, signals_call}, {"forks", forks_serve, forks_call},
    {"inherit", inherit_serve, inherit_call},
};

int main(int count, char **arguments) {
    int on = 1;
    if (count < 4) return 1;
    self = arguments[0], host = arguments[2], port = arguments[3];
    address.sin_family = AF_INET;
    inet_pton(AF_INET, host, &address.sin_addr);
    address.sin_port = htons(atoi(port));
    signal(SIGPIPE, SIG_IGN);
    if (!strcmp(arguments[1], "inherit")) return inherited(atoi(arguments[4]));
    int serves = !strcmp(arguments[1], "serve");
    if (serves) {
        listener = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16)) fail("listen");
    }
    for (size_t i = 0; i < sizeof GROUPS / sizeof *GROUPS; i++) {
        if (count > 4 && strcmp(arguments[4], GROUPS[i].name)) continue;
        group = GROUPS[i].name;
        int s = serves ? accept(listener, 0, 0) : dial();
        if (s < 0) fail("accept");
        present = s;
        if (serves) GROUPS[i].serve(s);
        else GROUPS[i].call(s);
        if (present >= 0) close(s);
    }
    puts("all is well");
    return 0;
}
