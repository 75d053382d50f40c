/* Many rows of x times a matrix in float32, a few rows of it at a time, which are read as they lie: a copy of all weights
 * would be as large as they are.
 *
 * x is turned, in panels of a few vectors: a vector holds a column of several rows, and each weight is multiplied with
 * them all. That are up to 24 sums, each ready some cycles after it began. A few rows that fill no vector are multiplied as
 * they lie too, several columns a vector; zeros fill it where there are more. */
#pragma once

#include "products.h"

#if defined(__aarch64__)
#define TALL 8  /* rows of the matrix at a time: a tile */
#define WIDE 2  /* vectors of a panel */
#define TILES 1 /* that are written to y together */
#define LEFT 3  /* rows of x that are multiplied as they lie, at most */
#else
#define TALL (LANES == 16 ? 8 : 4)
#define WIDE 3
#define TILES (64 / TALL) /* of a few numbers in each row of y, every one is in another page */
#define LEFT (LANES / 2)
#endif
#define PANEL (WIDE * LANES) /* rows of x */
#define DEEP 512             /* columns: those of TALL rows stay in the first cache, on ARM with those of a panel */

#if defined(__aarch64__)
#define FOUR(i) float32x4_t w##i = vld1q_f32(w + (int64_t)i * n + k);
#define TIMES_LANE(sum, x, i, lane) sum = (Vector)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)x, w##i, lane);
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
#else
#define EACH_SUM(do)                                                                                                   \
    for (int v = 0; v < vectors; v++)                                                                                  \
        for (int i = 0; i < TALL; i++) do;

/* Columns (in sixteens) of TALL rows, of which the next is n further on, times those of a panel of one to three vectors, or
 * of as many rows of x as they lie, added to sums. The same columns of the rows at `ahead`, of which the next is `hop`
 * further on, are asked for meanwhile. */
static inline __attribute__((always_inline)) void add_columns(const float *w, int64_t n, const float *x, int columns,
                                                              const float *ahead, int hop, int vectors, Vector *sums) {
    Vector s[WIDE][TALL];
    EACH_SUM(s[v][i] = sums[v * TALL + i])
    for (int k = 0; k < columns; k += 16)
        for (int row = 0; row < TALL; row++) {
            __builtin_prefetch(ahead + row * (int64_t)hop + k);
#pragma GCC unroll 4
            for (int j = 0; j < 16 / TALL; j++, w++, x += vectors * LANES)
#pragma GCC unroll 8
                for (int i = 0; i < TALL; i++)
                    for (int v = 0; v < vectors; v++) s[v][i] += LOAD(x + v * LANES) * w[i * n];
        }
    EACH_SUM(sums[v * TALL + i] = s[v][i])
}

static inline __attribute__((always_inline)) void add_as_they_lie(const float *w, int64_t n, const float *x, int columns,
                                                                  const float *ahead, int hop, int vectors,
                                                                  Vector *sums) {
    Vector s[WIDE][TALL];
    EACH_SUM(s[v][i] = sums[v * TALL + i])
    for (int k = 0; k < columns; k += LANES)
#pragma GCC unroll 8
        for (int i = 0; i < TALL; i++) {
            __builtin_prefetch(ahead + i * (int64_t)hop + k);
            for (int v = 0; v < vectors; v++) s[v][i] += LOAD(x + v * n + k) * LOAD(w + i * n + k);
        }
    EACH_SUM(sums[v * TALL + i] = s[v][i])
}

IN_THIS_ORDER static void tile(const float *w, int64_t n, const float *x, int columns, const float *ahead, int hop,
                               int vectors, int turned, Vector *sums) {
    switch (turned ? vectors : -vectors) {
    case 3: add_columns(w, n, x, columns, ahead, hop, 3, sums); break;
    case 2: add_columns(w, n, x, columns, ahead, hop, 2, sums); break;
    case 1: add_columns(w, n, x, columns, ahead, hop, 1, sums); break;
    case -1: add_as_they_lie(w, n, x, columns, ahead, hop, 1, sums); break;
    case -2: add_as_they_lie(w, n, x, columns, ahead, hop, 2, sums); break;
    default: add_as_they_lie(w, n, x, columns, ahead, hop, 3, sums);
    }
}
#endif

/* Four vectors turned: to `to` what is first in each, `apart` further on what is second. */
static inline void scatter(const Vector *v, float *to, int64_t apart) {
#if LANES == 16
    __m512 a = _mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]), b = _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]);
    __m512 c = _mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]), d = _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]);
    __m512 t[4] = {_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xee), _mm512_shuffle_ps(b, d, 0x44),
                   _mm512_shuffle_ps(b, d, 0xee)};
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++, to += apart) {
        _mm_storeu_ps(to, _mm512_castps512_ps128(t[r]));
        _mm_storeu_ps(to + 4 * apart, _mm512_extractf32x4_ps(t[r], 1));
        _mm_storeu_ps(to + 8 * apart, _mm512_extractf32x4_ps(t[r], 2));
        _mm_storeu_ps(to + 12 * apart, _mm512_extractf32x4_ps(t[r], 3));
    }
#elif LANES == 8
    __m256 a = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]), b = _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
    __m256 c = _mm256_unpacklo_ps((__m256)v[2], (__m256)v[3]), d = _mm256_unpackhi_ps((__m256)v[2], (__m256)v[3]);
    __m256 t[4] = {_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xee), _mm256_shuffle_ps(b, d, 0x44),
                   _mm256_shuffle_ps(b, d, 0xee)};
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++, to += apart) {
        _mm_storeu_ps(to, _mm256_castps256_ps128(t[r]));
        _mm_storeu_ps(to + 4 * apart, _mm256_extractf128_ps(t[r], 1));
    }
#else
    for (int r = 0; r < LANES; r++)
        for (int i = 0; i < 4; i++) to[r * apart + i] = v[i][r];
#endif
}

/* So many rows of x, column by column, in a panel of `width`: what is beyond them is 0. */
static void turn(const float *x, int rows, int n, int width, float *to) {
    int r = 0;
#if !defined(__aarch64__)
    for (; r + 4 <= rows; r += 4)
        for (int k = 0; k < n; k += LANES) {
            const float *from = x + (int64_t)r * n + k;
            Vector v[4] = {LOAD(from), LOAD(from + n), LOAD(from + 2 * n), LOAD(from + 3 * n)};
            scatter(v, to + (int64_t)k * width + r, width);
        }
#endif
    for (; r < width; r++)
        for (int k = 0; k < n; k++) to[k * width + r] = r < rows ? x[(int64_t)r * n + k] : 0;
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
    Vector v[ROWS] = {sums[0] + bias[0], sums[1] + bias[1], sums[2] + bias[2], sums[3] + bias[3]};
    scatter(v, y, apart);
#endif
}

/* How many of so many rows of x are turned; those beyond the last are zeros. */
static inline int turned_of(int rows) { return (rows + LANES - 1 - LEFT) / LANES * LANES; }

/* How many vectors the sums of a tile with so many rows of x are. */
static inline int sums_of(int rows) {
    int full = turned_of(rows);
    return (full / LANES + (rows > full ? rows - full : 0)) * TALL;
}

/* Where a tile begins. The last of all begins earlier, so that it is whole. */
static inline int row_of(const Matrix *m, int tile) { return (tile + 1) * TALL > m->rows ? m->rows - TALL : tile * TALL; }

/* Some tiles of a matrix, TILES at most, times all of x (rows, columns), of which most rows are turned too → y. What
 * two tiles have is written once. */
static void tall_products(const Matrix *m, int first, int last, const float *x, const float *turned, int rows, Vector *sums,
                          float *y) {
    int n = m->columns, full = turned_of(rows), each = sums_of(rows);
    memset(sums, 0, (size_t)(last - first) * each * sizeof *sums);
    for (int k = 0, some; k < n; k += some) {
        some = n - k < DEEP ? n - k : DEEP;
        for (int t = first; t < last; t++) {
            Vector *at = sums + (t - first) * each;
            const float *w = (const float *)m->weights + (int64_t)row_of(m, t) * n;
#if defined(__aarch64__)
            const float *next = w + (int64_t)TALL * (n + k);
            int hop = 4 * TALL;
#else
            const float *of_first = (const float *)m->weights + (int64_t)row_of(m, first) * n;
            const float *next = t + 1 == last && k + some < n ? of_first + k + some : w + (int64_t)TALL * n + k;
            int hop = n;
#endif
            for (int r = 0, count; r < rows; r += count) {
                count = r < full ? full - r : rows - r;
                count = count < (r < full ? PANEL : WIDE) ? count : r < full ? PANEL : WIDE;
                int vectors = r < full ? count / LANES : count;
                const float *from = r < full ? turned + (int64_t)r * n + k * count : x + (int64_t)r * n + k;
                tile(w + k, n, from, some, r ? w : next, r ? 0 : hop, vectors, r < full, at);
                at += vectors * TALL;
            }
        }
    }
    float none[TALL] = {0}, found[LANES * TALL];
    for (int r = 0, count; r < rows; r += count, sums += TALL, y += count * (int64_t)m->rows) {
        count = r < full ? LANES : 1;
        int there = rows - r < count ? rows - r : count;
        for (int t = first; t < last; t++) {
            int row = row_of(m, t), skip = t * TALL - row, aside = skip || there < count;
            const Vector *from = sums + (t - first) * each;
            const float *bias = m->bias ? m->bias + row : none;
            float *to = aside ? found : y + row;
            for (int i = 0; i < TALL; i += ROWS)
                if (r < full)
                    turn_back(from + i, bias + i, to + i, aside ? TALL : m->rows);
                else
                    totals(from + i, to + i);
            for (int i = 0; i < TALL && r >= full; i++) to[i] += bias[i];
            for (int k = 0; aside && k < there; k++)
                memcpy(y + (int64_t)k * m->rows + row + skip, found + k * TALL + skip, 4 * (TALL - skip));
        }
    }
}
