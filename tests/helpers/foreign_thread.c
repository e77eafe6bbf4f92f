/* A thread that Python did not make: it has a thread state for the time of each call of `step` alone. */
#include <pthread.h>

static void (*step)(int);

static void* run(void* steps)
{
    for (long i = 0; i < (long) steps; i++)
        step((int) i);
    return 0;
}

/* Call `function` so many times on one such thread, and wait for it. */
int run_steps(void (*function)(int), long steps)
{
    pthread_t thread;
    step = function;
    return pthread_create(&thread, 0, run, (void*) steps) || pthread_join(thread, 0);
}
