/* A product's tile, which stays in registers: HIGH rows of ACROSS vectors. */
#pragma once

#include "vectors.h"

#if defined(__AVX512F__)
#define HIGH 8
#define ACROSS 2
#elif defined(__AVX__)
#define HIGH 4
#define ACROSS 2
#else
#define HIGH 4
#define ACROSS 4
#endif
#define WIDTH (ACROSS * LANES)

typedef struct { Vector sums[HIGH][ACROSS]; } Tile;

/* tile += a b over `depth`: a[r * down + i * along], b[i * apart + column]. */
static inline __attribute__((always_inline)) void multiply_add(
    Tile *tile, int depth, const float *a, int64_t down, int64_t along, const float *b, int64_t apart) {
    Tile t = *tile;
#pragma GCC unroll 4
    for (int i = 0; i < depth; i++) {
        Vector row[ACROSS];
        for (int c = 0; c < ACROSS; c++) row[c] = LOAD(b + i * apart + c * LANES);
        for (int r = 0; r < HIGH; r++)
            for (int c = 0; c < ACROSS; c++) t.sums[r][c] += a[r * down + i * along] * row[c];
    }
    *tile = t;
}

/* Sums that begin at 0 with every block round less than those that go on. */
static inline void add_tile(const Tile *t, float *to, int64_t apart) {
    for (int r = 0; r < HIGH; r++)
        for (int c = 0; c < ACROSS; c++) STORE(to + r * apart + c * LANES, LOAD(to + r * apart + c * LANES) + t->sums[r][c]);
}

static inline void write_tile(const Tile *t, float *to, int64_t apart) {
    for (int r = 0; r < HIGH; r++)
        for (int c = 0; c < ACROSS; c++) STORE(to + r * apart + c * LANES, t->sums[r][c]);
}

static inline Vector larger(Vector a, Vector b) {
    Integers mine = a > b;
    return (Vector)((mine & (Integers)a) | (~mine & (Integers)b));
}
