/* Blocking reads that sleep, one group for each connection, and the events that end them. Both ends print what each call has done: over SDP
   it must be what it is over TCP. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Of siginterrupt(). */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static struct sockaddr_in address;
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
    say("FAILED %s: %s", what, strerror(errno));
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

static void get(int s, void *to, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t got = recv(s, (char *)to + at, n - at, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) fail("the stream ends early");
        at += got;
    }
}

static void put(int s, const char *bytes) {
    if (send(s, bytes, strlen(bytes), MSG_NOSIGNAL) != (ssize_t)strlen(bytes)) fail("send");
}

static void step(int s) { put(s, "s"); }
static void await(int s) { char byte; get(s, &byte, 1); if (byte != 's') fail("another step"); }

static int dial(void) {
    int s = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(s, (struct sockaddr *)&address, sizeof address)) fail("connect");
    return s;
}

static pthread_t begin(void *(*run)(void *), int *s) {
    pthread_t thread;
    if (pthread_create(&thread, 0, run, s)) fail("pthread_create");
    return thread;
}

/* A thread that reads. */
struct reader { int s; char bytes[16]; ssize_t done; int error; };
static void *read_once(void *of) {
    struct reader *reader = of;
    reader->done = recv(reader->s, reader->bytes, 8, 0);
    reader->error = errno;
    return 0;
}
static pthread_t start(struct reader *reader, int s) {
    *reader = (struct reader){.s = s};
    pthread_t thread = begin(read_once, (int *)reader);
    pause_ms(100);
    return thread;
}
static void finish(const char *what, pthread_t thread, struct reader *reader) {
    pthread_join(thread, 0);
    errno = reader->error;
    told(what, reader->done);
}

static volatile int signals;
static void handle(int number) { (void)number; signals++; }
static void on_signal(int number, int flags) {
    struct sigaction action = {.sa_handler = handle, .sa_flags = flags};
    sigaction(number, &action, 0);
}
static void every(int ms) {
    struct itimerval timer = {{0, ms * 1000}, {0, ms * 1000}};
    setitimer(ITIMER_REAL, &timer, 0);
}

/* ---- data, of one and of several pieces, after sleeps of several lengths ---- */

#define ROUNDS 200
static void data_serve(int s) {
    char bytes[16];
    for (int i = 0; i < ROUNDS; i++) get(s, bytes, 16), put(s, bytes[15] & 1 ? "abcdefghijklmnop" : "qrstuvwxyz012345");
}
static void data_call(int s) {
    char bytes[16], request[17] = "0123456789abcde";
    int wrong = 0;
    for (int i = 0; i < ROUNDS; i++) {
        pause_ms(i % 8 == 7 ? 20 : 2);
        request[15] = '0' + i % 10;
        put(s, request);
        /* Sometimes in two pieces. */
        get(s, bytes, i % 5 ? 16 : 4);
        if (i % 5 == 0) get(s, bytes + 4, 12);
        wrong += memcmp(bytes, i & 1 ? "abcdefghijklmnop" : "qrstuvwxyz012345", 16) != 0;
    }
    say("wrong answers: %d", wrong);
}

/* ---- the end of the stream, a reset, an own shutdown, a close ---- */

static void ends_serve(int s) {
    await(s);
    pause_ms(200);
    shutdown(s, SHUT_WR);
    await(s);
    for (int i = 0; i < 3; i++) {
        int again = accept(listener, 0, 0);
        await(again);
        pause_ms(200);
        if (i == 0) setsockopt(again, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
        else if (i == 2) put(again, "late");
        close(again);
    }
}
static void ends_call(int s) {
    char bytes[8];
    step(s);
    told("the end", recv(s, bytes, 8, 0));
    told("again", recv(s, bytes, 8, 0));
    step(s);
    int again = dial();
    step(again);
    told("a reset", recv(again, bytes, 8, 0));
    told("after it", recv(again, bytes, 8, 0));
    close(again);
    struct reader reader;
    again = dial();
    pthread_t thread = start(&reader, again);
    shutdown(again, SHUT_RD);
    finish("own shutdown", thread, &reader);
    step(again);
    close(again);
    again = dial();
    thread = start(&reader, again);
    step(again);
    close(again);
    pthread_join(thread, 0);
    /* With the data, or because the number is another file's. */
    say("closed %d", reader.done == 4 || (reader.done < 0 && reader.error == EBADF));
}

/* ---- signals ---- */

static void signals_serve(int s) {
    for (int i = 0; i < 4; i++) await(s), pause_ms(300), put(s, "late");
}
static void signals_call(int s) {
    char bytes[8];
    on_signal(SIGALRM, 0);
    every(50);
    told("interrupts", recv(s, bytes, 8, 0));
    on_signal(SIGALRM, SA_RESTART);
    step(s);
    told("restarts", recv(s, bytes, 8, 0));
    signal(SIGALRM, handle);
    step(s);
    told("by signal()", recv(s, bytes, 8, 0));
    siginterrupt(SIGALRM, 1);
    told("by siginterrupt()", recv(s, bytes, 8, 0));
    on_signal(SIGUSR1, SA_RESTART);
    told("one of each kind, interrupts", recv(s, bytes, 8, 0));
    on_signal(SIGALRM, SA_RESTART), on_signal(SIGUSR1, 0);
    step(s);
    told("one of each kind, restarts", recv(s, bytes, 8, 0));
    signal(SIGALRM, SIG_IGN);
    step(s);
    told("ignored", recv(s, bytes, 8, 0));
    signal(SIGUSR1, SIG_DFL);
    on_signal(SIGALRM, SA_RESTART);
    struct timeval limit = {20, 0};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    told("with a time limit", recv(s, bytes, 8, 0));
    every(0);
    say("signals %d", signals > 5);
}

/* ---- time limits ---- */

static void limits_serve(int s) { await(s); pause_ms(300); put(s, "late"); await(s); }
static void limits_call(int s) {
    char bytes[8];
    struct timeval limit = {0, 150000}, none = {0, 0};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    for (int i = 0; i < 3; i++) {
        double begun = now();
        told("recv", recv(s, bytes, 8, 0));
        say("in time %d", now() - begun > 0.14 && now() - begun < 10);
    }
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
    step(s);
    told("without limit", recv(s, bytes, 8, 0));
    step(s);
}

/* ---- several threads ---- */

static void threads_serve(int s) {
    for (int i = 0; i < 2; i++) await(s), pause_ms(100), put(s, "message1"), pause_ms(100), put(s, "message2");
    await(s);
    put(s, "both parts of it");
    await(s);
}
static void threads_call(int s) {
    struct reader readers[2];
    char bytes[8];
    /* Both read the same socket. */
    for (int i = 0; i < 2; i++) {
        pthread_t first = start(&readers[0], s), second = start(&readers[1], s);
        step(s);
        pthread_join(first, 0), pthread_join(second, 0);
        say("%zd and %zd, both messages %d", readers[0].done, readers[1].done,
            !memcmp(readers[0].bytes, "message", 7) && !memcmp(readers[1].bytes, "message", 7) && readers[0].bytes[7] != readers[1].bytes[7]);
    }
    /* One reads half of a message, the other one polls for the rest. */
    pthread_t first = start(&readers[0], s);
    step(s);
    finish("a half", first, &readers[0]);
    struct pollfd wait = {s, POLLIN, 0};
    told("poll", poll(&wait, 1, 20000));
    told("the other half", recv(s, bytes, 8, 0));
    step(s);
}

/* ---- two connections of a device, each with a thread ---- */

static void *echo(void *of) {
    char bytes[8];
    int s = *(int *)of;
    for (int i = 0; i < 100; i++) get(s, bytes, 8), put(s, "answers.");
    return 0;
}
static void pair_serve(int s) {
    int again = accept(listener, 0, 0);
    pthread_t thread = begin(echo, &again);
    echo(&s);
    pthread_join(thread, 0);
    close(again);
}
static void *ask(void *of) {
    char bytes[8];
    int s = *(int *)of;
    for (int i = 0; i < 100; i++) put(s, "requests"), get(s, bytes, 8), pause_ms(i % 4);
    return 0;
}
static void pair_call(int s) {
    int again = dial();
    pthread_t thread = begin(ask, &again);
    ask(&s);
    pthread_join(thread, 0);
    say("all answered");
    close(again);
}

/* ---- a program that reads, and then waits otherwise ---- */

static void turns_serve(int s) {
    char bytes[8];
    for (int i = 0; i < 120; i++) get(s, bytes, 8), pause_ms(2), put(s, "answers.");
}
static void turns_call(int s) {
    char bytes[8];
    struct epoll_event found;
    int set = epoll_create1(0), seen = 0;
    epoll_ctl(set, EPOLL_CTL_ADD, s, &(struct epoll_event){EPOLLIN, {.fd = s}});
    for (int i = 0; i < 120; i++) {
        put(s, "requests");
        if (i % 6 == 4) seen += epoll_wait(set, &found, 1, 20000) == 1;
        if (i % 6 == 5) seen += poll(&(struct pollfd){s, POLLIN, 0}, 1, 20000) == 1;
        get(s, bytes, 8);
    }
    say("seen %d", seen);
    close(set);
}

/* ---- cancellation ---- */

static void cancel_serve(int s) {
    for (int i = 0; i < 3; i++) await(s), put(s, "answers.");
}
static void *read_for_ever(void *of) {
    char bytes[8];
    recv(*(int *)of, bytes, 8, 0);
    return 0;
}
static void cancel_call(int s) {
    char bytes[8];
    for (int i = 0; i < 3; i++) {
        if (i == 1) on_signal(SIGUSR1, 0);
        if (i == 2) on_signal(SIGUSR1, SA_RESTART);
        pthread_t thread = begin(read_for_ever, &s);
        void *result = 0;
        pause_ms(100);
        pthread_cancel(thread);
        pthread_join(thread, &result);
        say("cancelled %d", result == PTHREAD_CANCELED);
        step(s);
        get(s, bytes, 8);
    }
}

static const struct {
    const char *name;
    void (*serve)(int), (*call)(int);
} GROUPS[] = {
    {"data", data_serve, data_call}, {"ends", ends_serve, ends_call}, {"signals", signals_serve, signals_call},
    {"limits", limits_serve, limits_call}, {"threads", threads_serve, threads_call}, {"pair", pair_serve, pair_call},
    {"turns", turns_serve, turns_call}, {"cancel", cancel_serve, cancel_call},
};

int main(int count, char **arguments) {
    int on = 1;
    if (count < 5) return 1;
    address.sin_family = AF_INET;
    inet_pton(AF_INET, arguments[2], &address.sin_addr);
    address.sin_port = htons(atoi(arguments[3]));
    int serves = !strcmp(arguments[1], "serve");
    if (serves) {
        listener = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16)) fail("listen");
    }
    for (size_t i = 0; i < sizeof GROUPS / sizeof *GROUPS; i++) {
        if (strcmp(arguments[4], GROUPS[i].name)) continue;
        group = GROUPS[i].name;
        int s = serves ? accept(listener, 0, 0) : dial();
        if (s < 0) fail("accept");
        if (serves) GROUPS[i].serve(s);
        else GROUPS[i].call(s);
        close(s);
    }
    puts("all is well");
    return 0;
}
