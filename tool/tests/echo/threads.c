// A library that is preloaded behind libxwarp-sdp.so: from the FAIL_FROM-th thread of the process on, pthread_create fails as it does
// at a limit of tasks.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument)
{
    static atomic_int made;
    const char *from = getenv("FAIL_FROM");
    if (from && atomic_fetch_add(&made, 1) + 1 >= atoi(from))
        return EAGAIN;
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create");
    return next(thread, attributes, run, argument);
}
