/* A signal handler that calls exit, as many programs have, while the program polls. */
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>

static void leave(int number)
{
	(void)number;
	exit(0);
}

int main(void)
{
	struct itimerval soon = { .it_value.tv_usec = 50000 };
	struct ibv_context *context = ibv_open_device(ibv_get_device_list(NULL)[0]);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_wc wc;

	signal(SIGALRM, leave);
	setitimer(ITIMER_REAL, &soon, NULL);
	for (;;)
		ibv_poll_cq(cq, 1, &wc);
}
