/* GELU, x · Φ(x), and its tanh approximation x · σ(u) with u = SLOPE · (x + CUBE · x³), with their gradients. */
#pragma once

#include "threads.h"
#include "vectors.h"

#define SLOPE 1.5957691216057308f
#define CUBE 0.044715f
#define UNROLL 4       /* vectors at a time, to hide the latency of a polynomial's steps */
#define MIN_SHARE 4096 /* elements in a thread's smallest share */

static inline Vector magnitude(Vector x) { return (Vector)((IntVector)x & 0x7fffffff); }

/* Φ(x), and x · Φ′(x) → slope. Φ(−t) is e^(−t²/2) times a polynomial in 1 / (1 + 0.21 t); its relative error is 2e-8. */
static inline Vector normal_cdf(Vector x, Vector *slope) {
    Vector e = exp_nonpositive(x * x * -0.5f), s = 1.0f / (1.0f + 0.21f * magnitude(x));
    Vector p = (((((((-0.0716582512f * s + 0.283598338f) * s - 0.33027432f) * s + 0.349425923f) * s -
                   0.0939431959f) * s + 0.124880788f) * s + 0.0691899836f) * s + 0.085069186f) * s + 0.0837115548f;
    Vector tail = p * s * e;
    *slope = x * e * 0.3989422804014327f;
    return select_lanes(x < 0.0f, tail, 1.0f - tail);
}

/* σ(u), and x times its derivative → slope. */
static inline Vector tanh_cdf(Vector x, Vector *slope) {
    Vector square = x * x, e = exp_nonpositive(-magnitude(x) * (SLOPE + SLOPE * CUBE * square)), s = 1.0f / (1.0f + e);
    *slope = x * e * s * s * (SLOPE + 3.0f * SLOPE * CUBE * square);
    return select_lanes(x < 0.0f, e * s, s);
}

typedef struct {
    const float *x, *d_y; /* d_y is null in the forward pass */
    float *y;             /* values, or the gradient of x */
    int64_t count;
    int32_t exact; /* whether not approximated by tanh */
} Gelu;

static inline __attribute__((always_inline)) Vector gelu_vector(Vector x, const Vector *d_y, int exact) {
    Vector slope, cdf = exact ? normal_cdf(x, &slope) : tanh_cdf(x, &slope);
    return d_y ? *d_y * (cdf + slope) : x * cdf;
}

/* Elements [first, last). */
static inline __attribute__((always_inline)) void gelu_range(
    const Gelu *g, int64_t first, int64_t last, int exact, int backward) {
    int64_t i = first;
    for (; i + UNROLL * LANES <= last; i += UNROLL * LANES) {
        Vector x[UNROLL], d_y[UNROLL];
        for (int j = 0; j < UNROLL; j++) x[j] = LOAD(g->x + i + j * LANES);
        if (backward)
            for (int j = 0; j < UNROLL; j++) d_y[j] = LOAD(g->d_y + i + j * LANES);
        for (int j = 0; j < UNROLL; j++) x[j] = gelu_vector(x[j], backward ? d_y + j : 0, exact);
        for (int j = 0; j < UNROLL; j++) STORE(g->y + i + j * LANES, x[j]);
    }
    for (; i + LANES <= last; i += LANES)
        STORE(g->y + i, gelu_vector(LOAD(g->x + i), backward ? &LOAD(g->d_y + i) : 0, exact));
    if (i == last) return;
    Vector x = {0}, d_y = {0};
    memcpy(&x, g->x + i, sizeof(float) * (last - i));
    if (backward) memcpy(&d_y, g->d_y + i, sizeof(float) * (last - i));
    Vector y = gelu_vector(x, backward ? &d_y : 0, exact);
    memcpy(g->y + i, &y, sizeof(float) * (last - i));
}

static void gelu_share(void *argument, int thread, int threads) {
    const Gelu *g = argument;
    int64_t pieces = (g->count + MIN_SHARE - 1) / MIN_SHARE;
    int64_t first = pieces * thread / threads * MIN_SHARE, end = pieces * (thread + 1) / threads * MIN_SHARE;
    int64_t last = end < g->count ? end : g->count;
    if (g->exact)
        g->d_y ? gelu_range(g, first, last, 1, 1) : gelu_range(g, first, last, 1, 0);
    else
        g->d_y ? gelu_range(g, first, last, 0, 1) : gelu_range(g, first, last, 0, 0);
}

void weft_gelu(Gelu *g, int threads) { run_parallel(gelu_share, g, threads); }
