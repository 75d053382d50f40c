/* GEMM in float32: many rows of x times a matrix, whose weights are read in place, since a packed copy would be as
 * large as they are.
 *
 * x is packed: transposed in panels of a few vectors, so that a vector holds one column of several rows of x and every
 * weight is multiplied by all of them. A register tile is up to 24 accumulators, which hides the latency of a
 * multiply-add. A few rows of x that fill no vector stay unpacked, with several columns per vector; if there are more,
 * they are padded with zeros. */
#pragma once

#include "gemv.h"

#if defined(__aarch64__)
#define GEMM_ROWS 8    /* matrix rows of a register tile */
#define GEMM_VECTORS 2 /* vectors of a packed panel of x */
#define GEMM_TILES 1   /* tiles whose results are written to y together */
#define MAX_UNPACKED 3 /* rows of x that stay unpacked */
#else
#define GEMM_ROWS (LANES == 16 ? 8 : 4)
#define GEMM_VECTORS 3
#define GEMM_TILES (64 / GEMM_ROWS) /* rows of y are on different pages: write a whole cache line or more to each */
#define MAX_UNPACKED (LANES / 2)
#endif
#define X_PANEL (GEMM_VECTORS * LANES) /* rows of x in a packed panel */
#define COLUMN_BLOCK 512 /* columns at a time: those of GEMM_ROWS rows, on ARM also those of a panel, stay in L1 */

#if defined(__aarch64__)
#define LOAD_ROW(i) float32x4_t w##i = vld1q_f32(w + (int64_t)i * n + k);
#define TIMES_LANE(sum, x, i, lane) sum = (Vector)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)x, w##i, lane);
#define BEGIN(i) Vector a##i = sums[i], b##i = vectors > 1 ? sums[GEMM_ROWS + i] : a##i;
#define END(i)                                                                                                         \
    sums[i] = a##i;                                                                                                    \
    if (vectors > 1) sums[GEMM_ROWS + i] = b##i;
#define ADD(i, lane)                                                                                                   \
    TIMES_LANE(a##i, x0, i, lane)                                                                                      \
    if (vectors > 1) TIMES_LANE(b##i, x1, i, lane)
#define COLUMN(lane)                                                                                                   \
    {                                                                                                                  \
        const float *at = x + (k + lane) * vectors * LANES;                                                            \
        Vector x0 = LOAD(at), x1 = vectors > 1 ? LOAD(at + LANES) : x0;                                                \
        ADD(0, lane) ADD(1, lane) ADD(2, lane) ADD(3, lane) ADD(4, lane) ADD(5, lane) ADD(6, lane) ADD(7, lane)        \
    }
#define ADD_UNPACKED(i)                                                                                                \
    {                                                                                                                  \
        Vector v = LOAD(w + (int64_t)i * n + k);                                                                       \
        a##i += v * x0;                                                                                                \
        if (vectors > 1) b##i += v * x1;                                                                               \
    }

/* sums += `columns` columns (a multiple of 4) of GEMM_ROWS rows, n apart, times a packed panel of one or two vectors.
 * Prefetches from `next`. */
static inline __attribute__((always_inline)) void add_packed(const float *w, int64_t n, const float *x, int columns,
                                                             const float *next, int next_step, int vectors,
                                                             Vector *sums) {
    FOR_EACH_8(BEGIN)
    for (int k = 0; k < columns; k += 4, next += next_step) {
        FOR_EACH_8(LOAD_ROW)
        __builtin_prefetch(next);
        __builtin_prefetch(next + next_step / 2);
        COLUMN(0) COLUMN(1) COLUMN(2) COLUMN(3)
    }
    FOR_EACH_8(END)
}

/* sums += `columns` columns of GEMM_ROWS rows, n apart, times one or two unpacked rows of x. */
static inline __attribute__((always_inline)) void add_unpacked(const float *w, int64_t n, const float *x, int columns,
                                                               int vectors, Vector *sums) {
    FOR_EACH_8(BEGIN)
    for (int k = 0; k < columns; k += LANES) {
        Vector x0 = LOAD(x + k), x1 = vectors > 1 ? LOAD(x + n + k) : x0;
        FOR_EACH_8(ADD_UNPACKED)
    }
    FOR_EACH_8(END)
}

KEEP_ORDER static void multiply_tile(const float *w, int64_t n, const float *x, int columns, const float *next,
                                     int next_step, int vectors, int packed, Vector *sums) {
    if (packed && vectors > 1)
        add_packed(w, n, x, columns, next, next_step, 2, sums);
    else if (packed)
        add_packed(w, n, x, columns, next, next_step, 1, sums);
    else if (vectors > 1)
        add_unpacked(w, n, x, columns, 2, sums);
    else
        add_unpacked(w, n, x, columns, 1, sums);
}
#else
#define EACH_SUM(do)                                                                                                   \
    for (int v = 0; v < vectors; v++)                                                                                  \
        for (int i = 0; i < GEMM_ROWS; i++) do;

/* sums += `columns` columns (a multiple of 16) of GEMM_ROWS rows, n apart, times a packed panel of one to three
 * vectors. Prefetches the same columns of the rows at `next`, `next_step` apart. */
static inline __attribute__((always_inline)) void add_packed(const float *w, int64_t n, const float *x, int columns,
                                                             const float *next, int next_step, int vectors,
                                                             Vector *sums) {
    Vector s[GEMM_VECTORS][GEMM_ROWS];
    EACH_SUM(s[v][i] = sums[v * GEMM_ROWS + i])
    for (int k = 0; k < columns; k += 16)
        for (int row = 0; row < GEMM_ROWS; row++) {
            __builtin_prefetch(next + row * (int64_t)next_step + k);
#pragma GCC unroll 4
            for (int j = 0; j < 16 / GEMM_ROWS; j++, w++, x += vectors * LANES)
#pragma GCC unroll 8
                for (int i = 0; i < GEMM_ROWS; i++)
                    for (int v = 0; v < vectors; v++) s[v][i] += LOAD(x + v * LANES) * w[i * n];
        }
    EACH_SUM(sums[v * GEMM_ROWS + i] = s[v][i])
}

/* sums += `columns` columns of GEMM_ROWS rows, n apart, times one to three unpacked rows of x. */
static inline __attribute__((always_inline)) void add_unpacked(const float *w, int64_t n, const float *x, int columns,
                                                               const float *next, int next_step, int vectors,
                                                               Vector *sums) {
    Vector s[GEMM_VECTORS][GEMM_ROWS];
    EACH_SUM(s[v][i] = sums[v * GEMM_ROWS + i])
    for (int k = 0; k < columns; k += LANES)
#pragma GCC unroll 8
        for (int i = 0; i < GEMM_ROWS; i++) {
            __builtin_prefetch(next + i * (int64_t)next_step + k);
            for (int v = 0; v < vectors; v++) s[v][i] += LOAD(x + v * n + k) * LOAD(w + i * n + k);
        }
    EACH_SUM(sums[v * GEMM_ROWS + i] = s[v][i])
}

KEEP_ORDER static void multiply_tile(const float *w, int64_t n, const float *x, int columns, const float *next,
                                     int next_step, int vectors, int packed, Vector *sums) {
    switch (packed ? vectors : -vectors) {
    case 3: add_packed(w, n, x, columns, next, next_step, 3, sums); break;
    case 2: add_packed(w, n, x, columns, next, next_step, 2, sums); break;
    case 1: add_packed(w, n, x, columns, next, next_step, 1, sums); break;
    case -1: add_unpacked(w, n, x, columns, next, next_step, 1, sums); break;
    case -2: add_unpacked(w, n, x, columns, next, next_step, 2, sums); break;
    default: add_unpacked(w, n, x, columns, next, next_step, 3, sums);
    }
}
#endif

/* Store four vectors transposed: lane i of each at to + i · stride. */
static inline void store_transposed(const Vector *v, float *to, int64_t stride) {
#if LANES == 16
    __m512 a = _mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]), b = _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]);
    __m512 c = _mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]), d = _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]);
    __m512 t[4] = {_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xee), _mm512_shuffle_ps(b, d, 0x44),
                   _mm512_shuffle_ps(b, d, 0xee)};
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++, to += stride) {
        _mm_storeu_ps(to, _mm512_castps512_ps128(t[r]));
        _mm_storeu_ps(to + 4 * stride, _mm512_extractf32x4_ps(t[r], 1));
        _mm_storeu_ps(to + 8 * stride, _mm512_extractf32x4_ps(t[r], 2));
        _mm_storeu_ps(to + 12 * stride, _mm512_extractf32x4_ps(t[r], 3));
    }
#elif LANES == 8
    __m256 a = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]), b = _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
    __m256 c = _mm256_unpacklo_ps((__m256)v[2], (__m256)v[3]), d = _mm256_unpackhi_ps((__m256)v[2], (__m256)v[3]);
    __m256 t[4] = {_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xee), _mm256_shuffle_ps(b, d, 0x44),
                   _mm256_shuffle_ps(b, d, 0xee)};
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++, to += stride) {
        _mm_storeu_ps(to, _mm256_castps256_ps128(t[r]));
        _mm_storeu_ps(to + 4 * stride, _mm256_extractf128_ps(t[r], 1));
    }
#else
    for (int r = 0; r < LANES; r++)
        for (int i = 0; i < 4; i++) to[r * stride + i] = v[i][r];
#endif
}

/* Pack rows of x into a panel of `width` rows, column by column; the rest of the panel is 0. */
static void pack_panel(const float *x, int rows, int n, int width, float *to) {
    int r = 0;
#if !defined(__aarch64__)
    for (; r + 4 <= rows; r += 4)
        for (int k = 0; k < n; k += LANES) {
            const float *from = x + (int64_t)r * n + k;
            Vector v[4] = {LOAD(from), LOAD(from + n), LOAD(from + 2 * n), LOAD(from + 3 * n)};
            store_transposed(v, to + (int64_t)k * width + r, width);
        }
#endif
    for (; r < width; r++)
        for (int k = 0; k < n; k++) to[k * width + r] = r < rows ? x[(int64_t)r * n + k] : 0;
}

/* Sums of ROW_GROUP matrix rows with LANES rows of x, plus bias → y, whose rows are `stride` apart. */
static inline void store_sums(const Vector *sums, const float *bias, float *y, int64_t stride) {
#if defined(__aarch64__)
    float64x2_t pairs[ROW_GROUP];
    float32x4_t added = vld1q_f32(bias);
    for (int i = 0; i < 2; i++) {
        pairs[i] = (float64x2_t)(i ? vtrn2q_f32((float32x4_t)sums[0], (float32x4_t)sums[1])
                                   : vtrn1q_f32((float32x4_t)sums[0], (float32x4_t)sums[1]));
        pairs[2 + i] = (float64x2_t)(i ? vtrn2q_f32((float32x4_t)sums[2], (float32x4_t)sums[3])
                                       : vtrn1q_f32((float32x4_t)sums[2], (float32x4_t)sums[3]));
    }
    for (int r = 0; r < 2; r++, y += stride) {
        vst1q_f32(y, (float32x4_t)vtrn1q_f64(pairs[r], pairs[2 + r]) + added);
        vst1q_f32(y + 2 * stride, (float32x4_t)vtrn2q_f64(pairs[r], pairs[2 + r]) + added);
    }
#else
    Vector v[ROW_GROUP] = {sums[0] + bias[0], sums[1] + bias[1], sums[2] + bias[2], sums[3] + bias[3]};
    store_transposed(v, y, stride);
#endif
}

/* Packed rows of x, zero padding included, when x has `rows` rows. */
static inline int packed_rows(int rows) { return (rows + LANES - 1 - MAX_UNPACKED) / LANES * LANES; }

/* Vectors that hold the sums of one tile with all rows of x. */
static inline int tile_sums(int rows) {
    int packed = packed_rows(rows);
    return (packed / LANES + (rows > packed ? rows - packed : 0)) * GEMM_ROWS;
}

/* First row of a tile. The last tile overlaps the one before it, so that every tile is full. */
static inline int tile_row(const Matrix *m, int tile) {
    return (tile + 1) * GEMM_ROWS > m->rows ? m->rows - GEMM_ROWS : tile * GEMM_ROWS;
}

/* Tiles [first, last) of a matrix, at most GEMM_TILES, times all of x (rows, columns), most of which is in `packed`
 * too → y. Rows that two tiles share are written once. */
static void gemm_tiles(const Matrix *m, int first, int last, const float *x, const float *packed, int rows,
                       Vector *sums, float *y) {
    int n = m->columns, full = packed_rows(rows), per_tile = tile_sums(rows);
    memset(sums, 0, (size_t)(last - first) * per_tile * sizeof *sums);
    for (int k = 0, columns; k < n; k += columns) {
        columns = n - k < COLUMN_BLOCK ? n - k : COLUMN_BLOCK;
        for (int t = first; t < last; t++) {
            Vector *at = sums + (t - first) * per_tile;
            const float *w = (const float *)m->weights + (int64_t)tile_row(m, t) * n;
#if defined(__aarch64__)
            const float *next = w + (int64_t)GEMM_ROWS * (n + k);
            int next_step = 4 * GEMM_ROWS;
#else
            const float *of_first = (const float *)m->weights + (int64_t)tile_row(m, first) * n;
            const float *next =
                t + 1 == last && k + columns < n ? of_first + k + columns : w + (int64_t)GEMM_ROWS * n + k;
            int next_step = n;
#endif
            for (int r = 0, count; r < rows; r += count) {
                count = r < full ? full - r : rows - r;
                count = count < (r < full ? X_PANEL : GEMM_VECTORS) ? count : r < full ? X_PANEL : GEMM_VECTORS;
                int vectors = r < full ? count / LANES : count;
                const float *from = r < full ? packed + (int64_t)r * n + k * count : x + (int64_t)r * n + k;
                multiply_tile(w + k, n, from, columns, r ? w : next, r ? 0 : next_step, vectors, r < full, at);
                at += vectors * GEMM_ROWS;
            }
        }
    }
    float no_bias[GEMM_ROWS] = {0}, scratch[LANES * GEMM_ROWS];
    for (int r = 0, count; r < rows; r += count, sums += GEMM_ROWS, y += count * (int64_t)m->rows) {
        count = r < full ? LANES : 1;
        int real = rows - r < count ? rows - r : count;
        for (int t = first; t < last; t++) {
            int row = tile_row(m, t), skip = t * GEMM_ROWS - row, partial = skip || real < count;
            const Vector *from = sums + (t - first) * per_tile;
            const float *bias = m->bias ? m->bias + row : no_bias;
            float *to = partial ? scratch : y + row;
            for (int i = 0; i < GEMM_ROWS; i += ROW_GROUP)
                if (r < full)
                    store_sums(from + i, bias + i, to + i, partial ? GEMM_ROWS : m->rows);
                else
                    reduce_rows(from + i, to + i);
            for (int i = 0; i < GEMM_ROWS && r >= full; i++) to[i] += bias[i];
            for (int k = 0; partial && k < real; k++)
                memcpy(y + (int64_t)k * m->rows + row + skip, scratch + k * GEMM_ROWS + skip, 4 * (GEMM_ROWS - skip));
        }
    }
}
