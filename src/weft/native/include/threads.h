/* Work sharing: one function runs on several threads, which meet at barriers inside it.
 *
 * Threads spin at a barrier: the wait takes microseconds, and waking a thread takes longer. They are the threads of
 * torch's OpenMP runtime where it has one, since two pools would compete for the cores; otherwise this file's pool. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef void (*Work)(void *argument, int thread, int threads);
typedef struct { atomic_uint arrived, phase; } Barrier;

/* First of the `count` items that belong to a thread. Its share ends where the next thread's begins. */
static inline int share_start(int count, int thread, int threads) { return (int)((int64_t)count * thread / threads); }

static struct {
    pthread_mutex_t calls, sleep; /* `calls` is held for a whole call: one runs at a time */
    pthread_cond_t wake;
    atomic_uint begun, sleeping; /* calls so far; threads that wait for `wake` */
    Barrier inside, end;         /* of the threads of a call; of all threads, when a call ends */
    int started, threads;        /* threads besides the caller; threads of this call */
    Work work;
    void *argument;
} pool = {.calls = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* One iteration of a spin loop. */
static inline void spin(int tries) {
    if (tries > 2048) {
        sched_yield(); /* there are more threads than cores */
        return;
    }
#if defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    _mm_pause();
#endif
}

static void barrier_wait(Barrier *barrier, int threads) {
    if (threads == 1) return;
    unsigned phase = atomic_load_explicit(&barrier->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) + 1 == (unsigned)threads) {
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&barrier->phase, phase + 1, memory_order_release);
        return;
    }
    for (int tries = 0; atomic_load_explicit(&barrier->phase, memory_order_acquire) == phase; tries++) spin(tries);
}

typedef struct { int number; unsigned seen; } WorkerStart;

static void *worker(void *argument) {
    WorkerStart start = *(WorkerStart *)argument;
    free(argument);
    for (;;) {
        for (int tries = 0; atomic_load_explicit(&pool.begun, memory_order_acquire) == start.seen; tries++) {
            if (tries < 10000) { /* the next call usually comes soon */
                spin(tries & 1023);
                continue;
            }
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.sleeping, 1);
            while (atomic_load(&pool.begun) == start.seen) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        start.seen++;
        if (start.number < pool.threads) pool.work(pool.argument, start.number, pool.threads);
        barrier_wait(&pool.end, pool.started + 1);
    }
    return 0;
}

/* ---- OpenMP's threads, through the entry points that compilers call */

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void), (*threads)(void);
} openmp;

void weft_use_openmp(
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned), int (*thread)(void), int (*threads)(void)) {
    openmp.parallel = parallel, openmp.thread = thread, openmp.threads = threads;
}

typedef struct { Work work; void *argument; } Task;

static void run_task(void *task) {
    Task *t = task;
    t->work(t->argument, openmp.thread(), openmp.threads());
}

/* A forked child has one thread. Locks may be held, and barriers half full, by threads that exist only in the parent,
 * and OpenMP would wait for its threads forever: the child begins with an empty pool. */
static void reset_after_fork(void) {
    openmp.parallel = 0;
    pool.started = 0;
    pthread_mutex_init(&pool.calls, 0);
    pthread_mutex_init(&pool.sleep, 0);
    pthread_cond_init(&pool.wake, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.inside.arrived, 0);
    atomic_store(&pool.end.arrived, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(0, 0, reset_after_fork); }

/* Run `work` on up to `threads` threads, the caller among them, and return when all have finished. */
static void run_parallel(Work work, void *argument, int threads) {
    if (threads == 1) {
        work(argument, 0, 1);
        return;
    }
    pthread_mutex_lock(&pool.calls);
    if (openmp.parallel) {
        Task task = {work, argument};
        openmp.parallel(run_task, &task, threads, 0);
        pthread_mutex_unlock(&pool.calls);
        return;
    }
    while (pool.started + 1 < threads) {
        pthread_t thread;
        WorkerStart *start = malloc(sizeof *start);
        if (!start) break;
        start->number = pool.started + 1, start->seen = atomic_load(&pool.begun);
        if (pthread_create(&thread, 0, worker, start)) {
            free(start);
            break;
        }
        pthread_detach(thread);
        pool.started++;
    }
    pool.threads = threads < pool.started + 1 ? threads : pool.started + 1;
    pool.work = work, pool.argument = argument;
    if (pool.started) {
        pthread_mutex_lock(&pool.sleep);
        atomic_fetch_add_explicit(&pool.begun, 1, memory_order_acq_rel);
        if (atomic_load(&pool.sleeping)) pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    work(argument, 0, pool.threads);
    barrier_wait(&pool.end, pool.started + 1);
    pthread_mutex_unlock(&pool.calls);
}
