/* Rows of a matrix times one or a few vectors x. The matrix is float32, bf16, or int8 or int4 with scales
 * (`quantized_weights.py`). With integer weights x is quantised to int8 as well (quantised_gemv.h). */
#pragma once

#include "quantised_gemm.h"

enum { FLOAT32, BFLOAT16, INT8, INT4 };

typedef struct { /* (rows, columns). Integers, scales and centres are in panels; the last panel is padded. */
    int32_t dtype, rows, columns;
    const void *weights;
    const void *scales;   /* int8: float (rows); int4: bf16 (rows, blocks) */
    const float *centres; /* int4: (rows, blocks), or null */
    const float *bias;    /* (rows), or null */
} Matrix;

/* Rows that are multiplied together: a group. */
static inline int group_rows(const Matrix *m) { return m->dtype >= INT8 ? PANEL_ROWS : ROW_GROUP; }

/* End of the group that `row` is in, at most `end`. */
static inline int group_end(const Matrix *m, int row, int end) {
    int full = (row / group_rows(m) + 1) * group_rows(m);
    return full < end ? full : end;
}

/* Rows [row, end), up to ROW_GROUP of them, times x. The last row is repeated to fill the group, so that every row is
 * always summed in the same order. */
static inline void float_gemv(const Matrix *m, int row, int end, const float *x, float *sums) {
    float tail[ROW_GROUP] = {0};
    Vector v[ROW_GROUP];
    for (int r = 0; r < ROW_GROUP; r++) {
        int64_t at = (int64_t)(row + r < end ? row + r : end - 1) * m->columns;
        v[r] = m->dtype == FLOAT32 ? dot((const float *)m->weights + at, x, m->columns, tail + r)
                                   : dot_bf16((const uint16_t *)m->weights + at, x, m->columns, tail + r);
    }
    reduce_rows(v, sums);
    for (int r = 0; r < ROW_GROUP; r++) sums[r] += tail[r];
}

/* `float_gemv` of a float32 matrix with x → first, and with the next x → second. */
static inline void float_gemv_pair(const Matrix *m, int row, int end, const float *x, float *first, float *second) {
    float tail[2 * ROW_GROUP] = {0};
    Vector v[2 * ROW_GROUP];
    const float *rows[ROW_GROUP];
    for (int r = 0; r < ROW_GROUP; r++)
        rows[r] = (const float *)m->weights + (int64_t)(row + r < end ? row + r : end - 1) * m->columns;
    for (int r = 0; r < ROW_GROUP; r += 2) dot_2x2(rows + r, x, m->columns, v + 2 * r, tail + 2 * r);
    for (int t = 0; t < 2; t++) {
        Vector sums[ROW_GROUP] = {v[2 * t], v[2 * t + 1], v[4 + 2 * t], v[5 + 2 * t]};
        float tails[ROW_GROUP] = {tail[2 * t], tail[2 * t + 1], tail[4 + 2 * t], tail[5 + 2 * t]};
        float *to = t ? second : first;
        reduce_rows(sums, to);
        for (int r = 0; r < ROW_GROUP; r++) to[r] += tails[r];
    }
}

/* A panel times the next x of `left` → sums. Returns how many x were multiplied. */
static inline int multiply_panel(
    const Matrix *m, int64_t panel, QuantisedRows x, int left, float sums[MAX_BATCH][PANEL_ROWS]) {
    int64_t blocks = m->columns / BLOCK, at = panel * blocks * PANEL_ROWS;
    const float *centres = m->centres ? m->centres + at : 0;
    const void *w = (const int32_t *)m->weights + at * (m->dtype == INT8 ? BLOCK_WORDS8 : BLOCK_WORDS4);
    const float *scales8 = (const float *)m->scales + panel * PANEL_ROWS;
    const uint16_t *scales4 = (const uint16_t *)m->scales + at;
#if defined(HAS_PANEL_GEMM)
    int count = left >= MAX_BATCH ? MAX_BATCH : left >= 4 ? 4 : 1;
    if (count > 1 && m->dtype == INT8)
        panel_gemm8(w, scales8, x, blocks, count, sums[0]);
    else if (count > 1)
        panel_gemm4(w, scales4, centres, x, blocks, count, sums[0]);
    if (count > 1) return count;
#endif
    (void)left;
    if (m->dtype == INT8)
        panel_gemv8(w, scales8, x, blocks, sums[0]);
    else
        panel_gemv4(w, scales4, centres, x, blocks, sums[0]);
    return 1;
}

static inline QuantisedRows from_row(QuantisedRows all, int64_t row, int columns) {
    int blocks = columns / BLOCK;
    QuantisedRows rows = {all.values + row * columns, all.scales + row * blocks, all.offsets + row * blocks,
                          all.sums + row * blocks};
    return rows;
}

/* Rows [row, end) of a group times x[t] of x (count, columns) → y[0] and, where that is faster, times the following x
 * → y[1] …. Returns how many x were multiplied. With integer weights x is read from `quantised`. */
static inline int multiply_group(const Matrix *m, int row, int end, const float *x, QuantisedRows quantised, int t,
                                 int count, float y[MAX_BATCH][PANEL_ROWS]) {
    int done = 1, from = m->dtype >= INT8 ? row % PANEL_ROWS : 0;
    x += (int64_t)t * m->columns;
    if (m->dtype >= INT8)
        done = multiply_panel(m, row / PANEL_ROWS, from_row(quantised, t, m->columns), count - t, y);
    else if (m->dtype == FLOAT32 && t + 1 < count)
        float_gemv_pair(m, row, end, x, y[0], y[1]), done = 2;
    else
        float_gemv(m, row, end, x, y[0]);
    for (int k = 0; from && k < done; k++) memmove(y[k], y[k] + from, 4 * (size_t)(end - row));
    for (int k = 0; m->bias && k < done; k++)
        for (int r = 0; r < end - row; r++) y[k][r] += m->bias[row + r];
    return done;
}

/* Rows [first, last) times each of x (count, columns) → y, whose rows are `stride` apart. */
static void multiply_rows(const Matrix *m, int first, int last, const float *x, QuantisedRows quantised, int count,
                          float *y, int64_t stride) {
    float sums[MAX_BATCH][PANEL_ROWS];
    for (int row = first, end; row < last; row = end) {
        end = group_end(m, row, last);
        for (int t = 0, done; t < count; t += done) {
            done = multiply_group(m, row, end, x, quantised, t, count, sums);
            for (int k = 0; k < done; k++)
                if (end - row == PANEL_ROWS) /* a size known at compile time */
                    memcpy(y + (t + k) * stride + row, sums[k], 4 * PANEL_ROWS);
                else
                    memcpy(y + (t + k) * stride + row, sums[k], 4 * (size_t)(end - row));
        }
    }
}
