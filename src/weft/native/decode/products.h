/* Rows of a matrix times a vector. The matrix is float32, bf16, or whole numbers of 8 or 4 bits with scales
 * (`rounding.py`); with whole numbers, the vector is rounded to 8 bits too (`bands.h`). */
#pragma once

#include "several.h"

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

/* A band times up to `left` x → sums: how many it were. */
static inline int band(const Matrix *m, int64_t number, Rounded x, int left, float sums[MOST][BAND]) {
    int64_t blocks = m->columns / BLOCK, at = number * blocks * BAND;
    const float *centres = m->centres ? m->centres + at : 0;
    const void *w = (const int32_t *)m->weights + at * (m->kind == INT8 ? WORDS8 : WORDS4);
    const float *scales = (const float *)m->scales + number * BAND;
    const uint16_t *halves = (const uint16_t *)m->scales + at;
#if defined(SEVERAL)
    int count = left >= MOST ? MOST : left >= 4 ? 4 : 1;
    if (count > 1 && m->kind == INT8)
        bands8(w, scales, x, blocks, count, sums[0]);
    else if (count > 1)
        bands4(w, halves, centres, x, blocks, count, sums[0]);
    if (count > 1) return count;
#endif
    (void)left;
    if (m->kind == INT8)
        band8(w, scales, x, blocks, sums[0]);
    else
        band4(w, halves, centres, x, blocks, sums[0]);
    return 1;
}

static inline Rounded of_row(Rounded all, int64_t row, int columns) {
    int blocks = columns / BLOCK;
    Rounded one = {all.numbers + row * columns, all.scales + row * blocks, all.offsets + row * blocks,
                   all.sums + row * blocks};
    return one;
}

/* Rows `row` up to `end`, as `end_of` gives it, of a matrix times the x numbered t of (some, columns) → y[0], and where
 * that is faster the next ones too → y[1] …: how many it were. They are given rounded too where weights are whole numbers. */
static inline int products(const Matrix *m, int row, int end, const float *x, Rounded rounded, int t, int some,
                           float y[MOST][BAND]) {
    int count = 1, from = m->kind >= INT8 ? row % BAND : 0;
    x += (int64_t)t * m->columns;
    if (m->kind >= INT8)
        count = band(m, row / BAND, of_row(rounded, t, m->columns), some - t, y);
    else if (m->kind == FLOAT32 && t + 1 < some)
        few_rows_twice(m, row, end, x, y[0], y[1]), count = 2;
    else
        few_rows(m, row, end, x, y[0]);
    for (int k = 0; from && k < count; k++) memmove(y[k], y[k] + from, 4 * (size_t)(end - row));
    for (int k = 0; m->bias && k < count; k++)
        for (int r = 0; r < end - row; r++) y[k][r] += m->bias[row + r];
    return count;
}

/* Rows from `first` to before `last` times each x (some, columns) → y, of which the next is `apart` further on. */
static void all_products(const Matrix *m, int first, int last, const float *x, Rounded rounded, int some, float *y,
                         int64_t apart) {
    float found[MOST][BAND];
    for (int row = first, end; row < last; row = end) {
        end = end_of(m, row, last);
        for (int t = 0, count; t < some; t += count) {
            count = products(m, row, end, x, rounded, t, some, found);
            for (int k = 0; k < count; k++)
                if (end - row == BAND) /* a size that the compiler knows */
                    memcpy(y + (t + k) * apart + row, found[k], 4 * BAND);
                else
                    memcpy(y + (t + k) * apart + row, found[k], 4 * (size_t)(end - row));
        }
    }
}
