/* The register tile of a matrix product: TILE_ROWS rows of TILE_VECTORS vectors, accumulated in registers. */
#pragma once

#include "vectors.h"

#if defined(__AVX512F__)
#define TILE_ROWS 8
#define TILE_VECTORS 2
#elif defined(__AVX__)
#define TILE_ROWS 4
#define TILE_VECTORS 2
#else
#define TILE_ROWS 4
#define TILE_VECTORS 4
#endif
#define TILE_COLUMNS (TILE_VECTORS * LANES)

typedef struct { Vector sums[TILE_ROWS][TILE_VECTORS]; } Tile;

/* tile += a b over `depth`: a[row * a_row + i * a_step] and b[i * b_step + column]. */
static inline __attribute__((always_inline)) void multiply_add(
    Tile *tile, int depth, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step) {
    Tile t = *tile;
#pragma GCC unroll 4
    for (int i = 0; i < depth; i++) {
        Vector row[TILE_VECTORS];
        for (int c = 0; c < TILE_VECTORS; c++) row[c] = LOAD(b + i * b_step + c * LANES);
        for (int r = 0; r < TILE_ROWS; r++)
            for (int c = 0; c < TILE_VECTORS; c++) t.sums[r][c] += a[r * a_row + i * a_step] * row[c];
    }
    *tile = t;
}

/* Add a block's sums. Sums that restart from 0 in every block round less than one running sum. */
static inline void add_tile(const Tile *t, float *to, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < TILE_VECTORS; c++)
            STORE(to + r * stride + c * LANES, LOAD(to + r * stride + c * LANES) + t->sums[r][c]);
}

static inline void store_tile(const Tile *t, float *to, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < TILE_VECTORS; c++) STORE(to + r * stride + c * LANES, t->sums[r][c]);
}
