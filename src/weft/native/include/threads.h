/* A few threads that share a piece of work and meet inside it. They wait by looking again and again: what they wait for
 * takes microseconds, and being woken takes longer. They are those of torch's own operations where these are OpenMP's,
 * for two such pools would take the processors from each other; else a pool of its own. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef void (*Work)(void *given, int thread, int threads);
typedef struct { atomic_uint waiting, turn; } Gate;

/* Where a thread's part of so many things begins; the next one's is where it ends. */
static inline int share(int count, int thread, int threads) { return (int)((int64_t)count * thread / threads); }

static struct {
    pthread_mutex_t calls, sleep; /* one call at a time */
    pthread_cond_t wake;
    atomic_uint begun, asleep;
    Gate inside, end; /* where the threads of a call meet, and where all do when it ends */
    int started, threads; /* beside the caller; in this call */
    pid_t process;
    Work work;
    void *given;
} pool = {.calls = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void rest(int tries) {
    if (tries > 2048) {
        sched_yield(); /* there are more threads than processors */
        return;
    }
#if defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    _mm_pause();
#endif
}

/* Until so many threads are here. */
static void meet(Gate *gate, int threads) {
    if (threads == 1) return;
    unsigned turn = atomic_load_explicit(&gate->turn, memory_order_acquire);
    if (atomic_fetch_add_explicit(&gate->waiting, 1, memory_order_acq_rel) + 1 == (unsigned)threads) {
        atomic_store_explicit(&gate->waiting, 0, memory_order_relaxed);
        atomic_store_explicit(&gate->turn, turn + 1, memory_order_release);
        return;
    }
    for (int tries = 0; atomic_load_explicit(&gate->turn, memory_order_acquire) == turn; tries++) rest(tries);
}

typedef struct { int number; unsigned seen; } Start;

static void *worker(void *given) {
    Start start = *(Start *)given;
    free(given);
    for (;;) {
        for (int tries = 0; atomic_load_explicit(&pool.begun, memory_order_acquire) == start.seen; tries++) {
            if (tries < 10000) { /* the next call mostly comes soon */
                rest(tries & 1023);
                continue;
            }
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.asleep, 1);
            while (atomic_load(&pool.begun) == start.seen) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.asleep, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        start.seen++;
        if (start.number < pool.threads) pool.work(pool.given, start.number, pool.threads);
        meet(&pool.end, pool.started + 1);
    }
    return 0;
}

/* ---- OpenMP's threads, as compilers call them */

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*number)(void), (*count)(void);
    pid_t process; /* in a fork of it, OpenMP's threads are gone and waited for forever */
} shared;

void weft_share(void (*parallel)(void (*)(void *), void *, unsigned, unsigned), int (*number)(void), int (*count)(void)) {
    shared.parallel = parallel, shared.number = number, shared.count = count, shared.process = getpid();
}

typedef struct { Work work; void *given; } Task;

static void part(void *task) {
    Task *t = task;
    t->work(t->given, shared.number(), shared.count());
}

/* Do a piece of work with so many threads, of which the caller is one. */
static void together(Work work, void *given, int threads) {
    if (threads == 1) {
        work(given, 0, 1);
        return;
    }
    pthread_mutex_lock(&pool.calls);
    if (shared.parallel && shared.process == getpid()) {
        Task task = {work, given};
        shared.parallel(part, &task, threads, 0);
        pthread_mutex_unlock(&pool.calls);
        return;
    }
    if (pool.process != getpid()) { /* threads don't survive a fork, nor what they were in the middle of */
        pool.process = getpid(), pool.started = 0;
        pthread_mutex_init(&pool.sleep, 0);
        pthread_cond_init(&pool.wake, 0);
        atomic_store(&pool.asleep, 0);
        atomic_store(&pool.inside.waiting, 0);
        atomic_store(&pool.end.waiting, 0);
    }
    while (pool.started + 1 < threads) {
        pthread_t thread;
        Start *start = malloc(sizeof *start);
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
    pool.work = work, pool.given = given;
    if (pool.started) {
        pthread_mutex_lock(&pool.sleep);
        atomic_fetch_add_explicit(&pool.begun, 1, memory_order_acq_rel);
        if (atomic_load(&pool.asleep)) pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    work(given, 0, pool.threads);
    meet(&pool.end, pool.started + 1);
    pthread_mutex_unlock(&pool.calls);
}
