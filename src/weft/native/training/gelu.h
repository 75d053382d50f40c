/* GELU, x · Φ(x), and its approximation by a tanh, x · σ(u) with u = SLOPE · (x + CUBE x³), with their gradients. */
#pragma once

#include "threads.h"
#include "vectors.h"

#define SLOPE 1.5957691216057308f
#define CUBE 0.044715f
#define GROUP 4 /* vectors at a time: one waits for the other's steps otherwise */
#define AT_ONCE 4096 /* numbers that a thread takes at least */

static inline Vector where(Integers chosen, Vector a, Vector b) {
    return (Vector)((chosen & (Integers)a) | (~chosen & (Integers)b));
}

static inline Vector size(Vector x) { return (Vector)((Integers)x & 0x7fffffff); }

/* Φ(x), and x times its derivative: Φ(−t) is e^(−t²/2) times a polynomial of 1 / (1 + 0.21 t), off by 2e-8 of it. */
static inline Vector exact(Vector x, Vector *steep) {
    Vector e = falling(x * x * -0.5f), s = 1.0f / (1.0f + 0.21f * size(x));
    Vector p = (((((((-0.0716582512f * s + 0.283598338f) * s - 0.33027432f) * s + 0.349425923f) * s - 0.0939431959f) * s +
                  0.124880788f) * s + 0.0691899836f) * s + 0.085069186f) * s + 0.0837115548f;
    Vector tail = p * s * e;
    *steep = x * e * 0.3989422804014327f;
    return where(x < 0.0f, tail, 1.0f - tail);
}

/* σ(u), and x times its derivative. */
static inline Vector approximate(Vector x, Vector *steep) {
    Vector square = x * x, e = falling(-size(x) * (SLOPE + SLOPE * CUBE * square)), s = 1.0f / (1.0f + e);
    *steep = x * e * s * s * (SLOPE + 3.0f * SLOPE * CUBE * square);
    return where(x < 0.0f, e * s, s);
}

typedef struct {
    const float *x, *d_y; /* without d_y, the values; else what the gradient is */
    float *y;
    int64_t count;
    int32_t exact;
} Gelu;

static inline __attribute__((always_inline)) Vector one(Vector x, const Vector *d_y, int exactly) {
    Vector steep, share = exactly ? exact(x, &steep) : approximate(x, &steep);
    return d_y ? *d_y * (share + steep) : x * share;
}

static inline __attribute__((always_inline)) void each(const Gelu *g, int64_t first, int64_t last, int exactly, int back) {
    int64_t i = first;
    for (; i + GROUP * LANES <= last; i += GROUP * LANES) {
        Vector x[GROUP], d_y[GROUP];
        for (int j = 0; j < GROUP; j++) x[j] = LOAD(g->x + i + j * LANES);
        if (back)
            for (int j = 0; j < GROUP; j++) d_y[j] = LOAD(g->d_y + i + j * LANES);
        for (int j = 0; j < GROUP; j++) x[j] = one(x[j], back ? d_y + j : 0, exactly);
        for (int j = 0; j < GROUP; j++) STORE(g->y + i + j * LANES, x[j]);
    }
    for (; i + LANES <= last; i += LANES)
        STORE(g->y + i, one(LOAD(g->x + i), back ? &LOAD(g->d_y + i) : 0, exactly));
    if (i == last) return;
    Vector x = {0}, d_y = {0};
    memcpy(&x, g->x + i, sizeof(float) * (last - i));
    if (back) memcpy(&d_y, g->d_y + i, sizeof(float) * (last - i));
    Vector y = one(x, back ? &d_y : 0, exactly);
    memcpy(g->y + i, &y, sizeof(float) * (last - i));
}

static void gelu(void *given, int thread, int threads) {
    const Gelu *g = given;
    int64_t pieces = (g->count + AT_ONCE - 1) / AT_ONCE;
    int64_t first = pieces * thread / threads * AT_ONCE, end = pieces * (thread + 1) / threads * AT_ONCE;
    int64_t last = end < g->count ? end : g->count;
    if (g->exact)
        g->d_y ? each(g, first, last, 1, 1) : each(g, first, last, 1, 0);
    else
        g->d_y ? each(g, first, last, 0, 1) : each(g, first, last, 0, 0);
}

void weft_gelu(Gelu *g, int threads) { together(gelu, g, threads); }
