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

/* The same times x and the one after it, in float32. */
static inline void few_rows_twice(const Matrix *m, int row, int end, const float *x, float *sums, float *others) {
    float rest[2 * ROWS] = {0};
    Vector v[2 * ROWS];
    const float *rows[ROWS];
    for (int r = 0; r < ROWS; r++)
        rows[r] = (const float *)m->weights + (int64_t)(row + r < end ? row + r : end - 1) * m->columns;
    for (int r = 0; r < ROWS; r += 2) four_dots(rows + r, x, m->columns, v + 2 * r, rest + 2 * r);
    for (int t = 0; t < 2; t++) {
        Vector own[ROWS] = {v[2 * t], v[2 * t + 1], v[4 + 2 * t], v[5 + 2 * t]};
        float left[ROWS] = {rest[2 * t], rest[2 * t + 1], rest[4 + 2 * t], rest[5 + 2 * t]};
        float *to = t ? others : sums;
        totals(own, to);
        for (int r = 0; r < ROWS; r++) to[r] += left[r];
    }
}

static inline void band(const Matrix *m, int64_t number, Rounded x, float *sums) {
    int64_t blocks = m->columns / BLOCK, at = number * blocks * BAND;
    if (m->kind == INT8)
        band8((const int32_t *)m->weights + at * WORDS8, (const float *)m->scales + number * BAND, x, blocks, sums);
    else
        band4((const int32_t *)m->weights + at * WORDS4, (const uint16_t *)m->scales + at,
              m->centres ? m->centres + at : 0, x, blocks, sums);
}

static inline Rounded of_row(Rounded all, int64_t row, int columns) {
    int blocks = columns / BLOCK;
    Rounded one = {all.numbers + row * columns, all.scales + row * blocks, all.offsets + row * blocks,
                   all.sums + row * blocks};
    return one;
}

/* Rows `row` up to `end`, as `end_of` gives it, of a matrix times the x numbered t of (some, columns) → y[0], and where
 * that is faster the next one too → y[1]: how many it were. They are given rounded too where weights are whole numbers. */
static inline int products(const Matrix *m, int row, int end, const float *x, Rounded rounded, int t, int some,
                           float y[2][BAND]) {
    int both = m->kind == FLOAT32 && t + 1 < some, from = m->kind >= INT8 ? row % BAND : 0;
    float sums[2][BAND];
    x += (int64_t)t * m->columns;
    if (m->kind >= INT8)
        band(m, row / BAND, of_row(rounded, t, m->columns), sums[0]);
    else if (both)
        few_rows_twice(m, row, end, x, sums[0], sums[1]);
    else
        few_rows(m, row, end, x, sums[0]);
    for (int k = 0; k <= both; k++)
        for (int r = 0; r < end - row; r++) y[k][r] = sums[k][from + r] + (m->bias ? m->bias[row + r] : 0.0f);
    return 1 + both;
}

/* Rows from `first` to before `last` times each x (some, columns) → y, of which the next is `apart` further on. */
static void all_products(const Matrix *m, int first, int last, const float *x, Rounded rounded, int some, float *y,
                         int64_t apart) {
    float found[2][BAND];
    for (int row = first, end; row < last; row = end) {
        end = end_of(m, row, last);
        for (int t = 0, count; t < some; t += count) {
            count = products(m, row, end, x, rounded, t, some, found);
            for (int k = 0; k < count; k++) memcpy(y + (t + k) * apart + row, found[k], 4 * (size_t)(end - row));
        }
    }
}
