/* Rows of a matrix times a vector. The matrix is float32, bf16, or whole numbers of 8 or 4 bits with scales
 * (`rounding.py`); with whole numbers, the vector is rounded to 8 bits too (`bands.h`). */
#pragma once

#include "bands.h"

enum { FLOAT32, BFLOAT16, INT8, INT4 };

typedef struct { /* (rows, columns); whole numbers, their scales and centres are in bands, of which the last is full too */
    int32_t kind, rows, columns;
    const void *weights;
    const void *scales;   /* float (rows) in 8 bits, bf16 (rows, blocks) in 4 */
    const float *centres; /* (rows, blocks) in 4 bits, or none */
    const float *bias;    /* (rows), or none */
} Matrix;

/* How many rows are multiplied at a time. */
static inline int at_once(const Matrix *m) { return m->kind >= INT8 ? BAND : ROWS; }

/* Where those that are multiplied together with `row` end, before `last`. */
static inline int end_of(const Matrix *m, int row, int last) {
    int end = (row / at_once(m) + 1) * at_once(m);
    return end < last ? end : last;
}

/* ROWS rows times x; of fewer the last is multiplied again and again: so each is summed in one order always. */
static inline void few_rows(const Matrix *m, int row, int end, const float *x, float *sums) {
    float rest[ROWS] = {0};
    Vector v[ROWS];
    for (int r = 0; r < ROWS; r++) {
        int64_t at = (int64_t)(row + r < end ? row + r : end - 1) * m->columns;
        v[r] = m->kind == FLOAT32 ? dot((const float *)m->weights + at, x, m->columns, rest + r)
                                  : dot_bf16((const uint16_t *)m->weights + at, x, m->columns, rest + r);
    }
    totals(v, sums);
    for (int r = 0; r < ROWS; r++) sums[r] += rest[r];
}

static inline void band(const Matrix *m, int64_t number, Rounded x, float *sums) {
    int64_t blocks = m->columns / BLOCK, at = number * blocks * BAND;
    if (m->kind == INT8)
        band8((const int32_t *)m->weights + at * WORDS8, (const float *)m->scales + number * BAND, x, blocks, sums);
    else
        band4((const int32_t *)m->weights + at * WORDS4, (const uint16_t *)m->scales + at,
              m->centres ? m->centres + at : 0, x, blocks, sums);
}

/* Rows `row` up to `end`, as `end_of` gives it, of a matrix times x → y; x is given rounded too where the weights are
 * whole numbers. */
static inline void products(const Matrix *m, int row, int end, const float *x, Rounded rounded, float *y) {
    float sums[BAND], *found = sums;
    if (m->kind >= INT8) {
        band(m, row / BAND, rounded, sums);
        found += row % BAND;
    } else {
        few_rows(m, row, end, x, sums);
    }
    for (int r = 0; r < end - row; r++) y[r] = found[r] + (m->bias ? m->bias[row + r] : 0.0f);
}

/* Rows from `first` to before `last` times x → y[0], y[1] and so on. */
static void all_products(const Matrix *m, int first, int last, const float *x, Rounded rounded, float *y) {
    for (int row = first, end; row < last; row = end) {
        end = end_of(m, row, last);
        products(m, row, end, x, rounded, y + row - first);
    }
}
