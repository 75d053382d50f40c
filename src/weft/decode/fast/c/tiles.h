/* Many rows of x times a matrix in float32, eight rows of it at a time, which are read as they lie: a copy of all
 * weights would be as large as they are.
 *
 * x is turned, in panels of eight rows or four (twice that many on wider processors): a vector holds a column of several
 * rows, and each weight is multiplied with them all. That are up to sixteen sums, each ready some cycles after it began.
 * Rows that fill no panel are multiplied as they lie too, several columns a vector. */
#pragma once

#include "products.h"

#define TALL 8            /* rows of the matrix at a time */
#define PANEL (2 * LANES) /* rows of x */
#define DEEP 512          /* columns: those of TALL rows and of a panel stay in the first cache */

#if defined(__aarch64__)
#define FOUR(i) float32x4_t w##i = vld1q_f32(w + (int64_t)i * n + k);
#define TIMES_LANE(sum, x, i, lane) sum = (Vector)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)x, w##i, lane);
#else
#define FOUR(i)
#define TIMES_LANE(sum, x, i, lane) sum += x * w[(int64_t)i * n + k + lane];
#endif
#define BEGIN(i) Vector a##i = sums[i], b##i = vectors > 1 ? sums[TALL + i] : a##i;
#define END(i)                                                                                                         \
    sums[i] = a##i;                                                                                                    \
    if (vectors > 1) sums[TALL + i] = b##i;
#define ADD(i, lane)                                                                                                   \
    TIMES_LANE(a##i, x0, i, lane)                                                                                      \
    if (vectors > 1) TIMES_LANE(b##i, x1, i, lane)
#define COLUMN(lane)                                                                                                   \
    {                                                                                                                  \
        const float *at = x + (k + lane) * vectors * LANES;                                                            \
        Vector x0 = LOAD(at), x1 = vectors > 1 ? LOAD(at + LANES) : x0;                                                \
        ADD(0, lane) ADD(1, lane) ADD(2, lane) ADD(3, lane) ADD(4, lane) ADD(5, lane) ADD(6, lane) ADD(7, lane)        \
    }
#define ALONE(i)                                                                                                       \
    {                                                                                                                  \
        Vector v = LOAD(w + (int64_t)i * n + k);                                                                       \
        a##i += v * x0;                                                                                                \
        if (vectors > 1) b##i += v * x1;                                                                               \
    }

/* Columns (in fours) of TALL rows, of which the next is n further on, times those of a panel of one or two vectors, or of
 * one or two rows of x as they lie, added to sums. What `ahead` points to is asked for meanwhile. */
static inline __attribute__((always_inline)) void add_columns(const float *w, int64_t n, const float *x, int columns,
                                                              const float *ahead, int hop, int vectors, Vector *sums) {
    EACH(BEGIN)
    for (int k = 0; k < columns; k += 4, ahead += hop) {
        EACH(FOUR)
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + hop / 2);
        COLUMN(0) COLUMN(1) COLUMN(2) COLUMN(3)
    }
    EACH(END)
}

static inline __attribute__((always_inline)) void add_as_they_lie(const float *w, int64_t n, const float *x, int columns,
                                                                  int vectors, Vector *sums) {
    EACH(BEGIN)
    for (int k = 0; k < columns; k += LANES) {
        Vector x0 = LOAD(x + k), x1 = vectors > 1 ? LOAD(x + n + k) : x0;
        EACH(ALONE)
    }
    EACH(END)
}

IN_THIS_ORDER static void tile(const float *w, int64_t n, const float *x, int columns, const float *ahead, int hop,
                               int vectors, int turned, Vector *sums) {
    if (turned && vectors > 1)
        add_columns(w, n, x, columns, ahead, hop, 2, sums);
    else if (turned)
        add_columns(w, n, x, columns, ahead, hop, 1, sums);
    else if (vectors > 1)
        add_as_they_lie(w, n, x, columns, 2, sums);
    else
        add_as_they_lie(w, n, x, columns, 1, sums);
}

/* So many rows of x, column by column. */
static void turn(const float *x, int rows, int n, float *to) {
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < n; k++) to[k * rows + r] = x[(int64_t)r * n + k];
}

/* Sums of ROWS rows of a matrix with a vector of rows of x → y, of which the next row is `apart` further on. */
static inline void turn_back(const Vector *sums, const float *bias, float *y, int64_t apart) {
#if defined(__aarch64__)
    float64x2_t pairs[ROWS];
    float32x4_t added = vld1q_f32(bias);
    for (int i = 0; i < 2; i++) {
        pairs[i] = (float64x2_t)(i ? vtrn2q_f32((float32x4_t)sums[0], (float32x4_t)sums[1])
                                   : vtrn1q_f32((float32x4_t)sums[0], (float32x4_t)sums[1]));
        pairs[2 + i] = (float64x2_t)(i ? vtrn2q_f32((float32x4_t)sums[2], (float32x4_t)sums[3])
                                       : vtrn1q_f32((float32x4_t)sums[2], (float32x4_t)sums[3]));
    }
    for (int r = 0; r < 2; r++, y += apart) {
        vst1q_f32(y, (float32x4_t)vtrn1q_f64(pairs[r], pairs[2 + r]) + added);
        vst1q_f32(y + 2 * apart, (float32x4_t)vtrn2q_f64(pairs[r], pairs[2 + r]) + added);
    }
#else
    for (int r = 0; r < LANES; r++)
        for (int i = 0; i < ROWS; i++) y[r * apart + i] = sums[i][r] + bias[i];
#endif
}

/* TALL rows of a matrix times all of x (rows, columns), of which all that fill panels are turned too → y, in which they
 * stand from `row` on, but for the first `skip`. sums: (rows, TALL). */
static void tall_products(const Matrix *m, int row, int skip, const float *x, const float *turned, int rows, Vector *sums,
                          float *y) {
    int n = m->columns, full = rows / LANES * LANES;
    const float *w = (const float *)m->weights + (int64_t)row * n;
    memset(sums, 0, (size_t)(full / LANES + rows - full) * TALL * sizeof *sums);
    for (int k = 0, some; k < n; k += some) {
        Vector *at = sums;
        some = n - k < DEEP ? n - k : DEEP;
        for (int r = 0, count; r < rows; r += count) {
            const float *ahead = r ? w : w + (int64_t)TALL * (n + k);
            count = r + PANEL <= full ? PANEL : r < full ? LANES : rows - r < 2 ? 1 : 2;
            int vectors = r < full ? count / LANES : count;
            const float *from = r < full ? turned + (int64_t)r * n + k * count : x + (int64_t)r * n + k;
            tile(w + k, n, from, some, ahead, r ? 0 : 4 * TALL, vectors, r < full, at);
            at += vectors * TALL;
        }
    }
    float none[TALL] = {0};
    const float *bias = m->bias ? m->bias + row : none;
    for (int r = 0, count; r < rows; r += count, sums += TALL, y += count * (int64_t)m->rows) {
        float found[LANES * TALL];
        count = r < full ? LANES : 1;
        float *to = skip ? found : y + row;
        for (int i = 0; i < TALL; i += ROWS)
            if (r < full)
                turn_back(sums + i, bias + i, to + i, skip ? TALL : m->rows);
            else
                totals(sums + i, to + i);
        for (int i = 0; i < TALL && r >= full; i++) to[i] += bias[i];
        for (int k = 0; skip && k < count; k++)
            memcpy(y + (int64_t)k * m->rows + row + skip, found + k * TALL + skip, 4 * (TALL - skip));
    }
}
