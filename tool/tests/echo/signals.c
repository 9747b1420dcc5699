/* A signal comes while a long write waits for a peer that does not read. */
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static volatile int signals;
static void handle(int number) { (void)number; signals++; }

/* Sends more than the connection holds; a signal comes after some microseconds, and others each second later. Returns the number of
   signals by which the write has ended. */
static int write_ends_by(const struct sockaddr_in *peer, int microseconds, int flags, ssize_t *sent) {
    static char bytes[32 << 20];
    struct sigaction action;
    int s = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(s, (const struct sockaddr *)peer, sizeof *peer)) { perror("connect"); exit(1); }
    memset(&action, 0, sizeof action);
    action.sa_handler = handle;
    action.sa_flags = flags;
    sigaction(SIGALRM, &action, 0);
    struct itimerval timer = {{1, 0}, {0, microseconds}};
    signals = 0;
    setitimer(ITIMER_REAL, &timer, 0);
    *sent = send(s, bytes, sizeof bytes, MSG_NOSIGNAL);
    int error = errno, before = signals;
    memset(&timer, 0, sizeof timer);
    setitimer(ITIMER_REAL, &timer, 0);
    if (*sent < 0 && error != EINTR) { errno = error; perror("send"); exit(1); }
    close(s);
    return before;
}

int main(int count, char **arguments) {
    struct sockaddr_in peer = {.sin_family = AF_INET};
    if (count != 3) return 1;
    inet_pton(AF_INET, arguments[1], &peer.sin_addr);
    peer.sin_port = htons(atoi(arguments[2]));
    int late = 0, tries = 0;
    ssize_t sent;
    for (int flags = 0; flags <= SA_RESTART; flags += SA_RESTART)
        for (int microseconds = 100; microseconds <= 700; microseconds += 100, tries++) {
            int ended_by = write_ends_by(&peer, microseconds, flags, &sent);
            printf("flags %x, %d us: signal %d, sent %zd\n", flags, microseconds, ended_by, sent);
            late += ended_by > 1;
        }
    /* A signal that comes before the call ends none, as in the kernel. */
    if (late * 3 > tries) { printf("%d of %d late\n", late, tries); return 1; }
    puts("all is well");
    return 0;
}
