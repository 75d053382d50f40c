/* SIMD vectors as wide as the target's registers, dot products over them, and exponentials. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t IntVector __attribute__((vector_size(4 * LANES), aligned(4)));
#define LOAD(pointer) (*(const Vector *)(pointer))
#define LOAD_INT(pointer) (*(const IntVector *)(pointer))
#define STORE(pointer, value) (*(Vector *)(pointer) = (value))
#define ACCUMULATORS 4 /* independent sums of a dot product: they hide the latency of a multiply-add */
#define ROW_GROUP 4    /* matrix rows whose sums are reduced across lanes together */
#define FOR_EACH_8(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)

/* 1.5 · 2²³. A float this large has no fraction bits, so adding it rounds to the nearest integer, ties to even, and
 * leaves that integer in the low mantissa bits. Valid for magnitudes below 2²². */
#define ROUND_MAGIC 12582912.0f
#define ROUND_MAGIC_BITS 0x4b400000

/* Keeps gcc from reordering a function's multiply-adds so that they stall on one another or on loads. */
#if defined(__clang__)
#define KEEP_ORDER __attribute__((noinline))
#else
#define KEEP_ORDER __attribute__((noinline, optimize("no-schedule-insns")))
#endif

/* Bytes to prefetch ahead. Hardware prefetchers stop at the end of a page. */
#if defined(__aarch64__)
#define PREFETCH_BYTES 512
#else
#define PREFETCH_BYTES 2048
#endif
static inline void prefetch(const void *from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + PREFETCH_BYTES + i);
}

/* Horizontal sums of ROW_GROUP vectors. One at a time they would take as long as a row's products. */
#if defined(__aarch64__)
static inline void reduce_rows(const Vector *v, float *sums) {
    float32x4_t first = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    vst1q_f32(sums, vpaddq_f32(first, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
}
#elif defined(__AVX__)
static inline void reduce_rows_256(const __m256 *v, float *sums) {
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
#if defined(__AVX512F__)
static inline __m256 fold_to_256(Vector v) {
    __m256d upper = _mm512_extractf64x4_pd((__m512d)v, 1);
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm256_castpd_ps(upper));
}
#else
static inline __m256 fold_to_256(Vector v) { return (__m256)v; }
#endif
static inline void reduce_rows(const Vector *v, float *sums) {
    __m256 halves[ROW_GROUP] = {fold_to_256(v[0]), fold_to_256(v[1]), fold_to_256(v[2]), fold_to_256(v[3])};
    reduce_rows_256(halves, sums);
}
#else
static inline void reduce_rows(const Vector *v, float *sums) {
    for (int r = 0; r < ROW_GROUP; r++) {
        sums[r] = 0;
        for (int i = 0; i < LANES; i++) sums[r] += v[r][i];
    }
}
#endif

static inline float reduce(Vector v) {
    Vector rows[ROW_GROUP] = {v};
    float sums[ROW_GROUP];
    reduce_rows(rows, sums);
    return sums[0];
}

static inline float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* bf16 to float32, and int32 lanes to bytes: compilers scalarise the generic loops. */
#if defined(__aarch64__)
static inline Vector load_bf16(const uint16_t *from) { return (Vector)vshll_n_u16(vld1_u16(from), 16); }
static inline void store_int8(IntVector q, int8_t *to) {
    int16x4_t half = vmovn_s32((int32x4_t)q);
    int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));
    memcpy(to, &bytes, 4);
}
#elif defined(__AVX512F__)
static inline Vector load_bf16(const uint16_t *from) {
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}
static inline void store_int8(IntVector q, int8_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)q));
}
#elif defined(__AVX2__)
static inline Vector load_bf16(const uint16_t *from) {
    return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
}
static inline void store_int8(IntVector q, int8_t *to) {
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)q), _mm256_extracti128_si256((__m256i)q, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(half, half));
}
#else
static inline Vector load_bf16(const uint16_t *from) {
    Vector v;
    for (int i = 0; i < LANES; i++) v[i] = bf16_to_float(from[i]);
    return v;
}
static inline void store_int8(IntVector q, int8_t *to) {
    for (int i = 0; i < LANES; i++) to[i] = (int8_t)q[i];
}
#endif

static inline Vector sum_accumulators(const Vector *s) { return (s[0] + s[1]) + (s[2] + s[3]); }

/* Lane-wise sums of a · b. Products after the last full vector are added to `tail`. */
static inline Vector dot(const float *a, const float *b, int n, float *tail) {
    Vector s[ACCUMULATORS] = {0};
    int i = 0;
    for (; i + 2 * ACCUMULATORS * LANES <= n; i += 2 * ACCUMULATORS * LANES) {
        prefetch(a + i, 8 * ACCUMULATORS * LANES);
        for (int j = 0; j < 2 * ACCUMULATORS; j++)
            s[j % ACCUMULATORS] += LOAD(a + i + j * LANES) * LOAD(b + i + j * LANES);
    }
    for (; i + ACCUMULATORS * LANES <= n; i += ACCUMULATORS * LANES)
        for (int j = 0; j < ACCUMULATORS; j++) s[j] += LOAD(a + i + j * LANES) * LOAD(b + i + j * LANES);
    for (; i + LANES <= n; i += LANES) s[0] += LOAD(a + i) * LOAD(b + i);
    for (; i < n; i++) *tail += a[i] * b[i];
    return sum_accumulators(s);
}

/* Dot products of rows[0] and rows[1] with x and x + n, each in the order of `dot`; every load is used twice. The
 * results are v[2 · x + row] and tail[2 · x + row]. */
static inline void dot_2x2(const float *const *rows, const float *x, int n, Vector *v, float *tail) {
    Vector s[4][ACCUMULATORS] = {0};
    const float *a = rows[0], *b = rows[1], *y = x + n;
    int i = 0;
    for (; i + ACCUMULATORS * LANES <= n; i += ACCUMULATORS * LANES) {
        prefetch(a + i, 4 * ACCUMULATORS * LANES);
        prefetch(b + i, 4 * ACCUMULATORS * LANES);
        for (int j = 0; j < ACCUMULATORS; j++) {
            int at = i + j * LANES;
            s[0][j] += LOAD(a + at) * LOAD(x + at), s[1][j] += LOAD(b + at) * LOAD(x + at);
            s[2][j] += LOAD(a + at) * LOAD(y + at), s[3][j] += LOAD(b + at) * LOAD(y + at);
        }
    }
    for (; i + LANES <= n; i += LANES) {
        s[0][0] += LOAD(a + i) * LOAD(x + i), s[1][0] += LOAD(b + i) * LOAD(x + i);
        s[2][0] += LOAD(a + i) * LOAD(y + i), s[3][0] += LOAD(b + i) * LOAD(y + i);
    }
    for (; i < n; i++) {
        tail[0] += a[i] * x[i], tail[1] += b[i] * x[i];
        tail[2] += a[i] * y[i], tail[3] += b[i] * y[i];
    }
    for (int k = 0; k < 4; k++) v[k] = sum_accumulators(s[k]);
}

static inline Vector dot_bf16(const uint16_t *w, const float *x, int n, float *tail) {
    Vector s[ACCUMULATORS] = {0};
    int i = 0;
    for (; i + 2 * ACCUMULATORS * LANES <= n; i += 2 * ACCUMULATORS * LANES) {
        prefetch(w + i, 4 * ACCUMULATORS * LANES);
#if defined(__aarch64__)
        for (int j = 0; j < 2 * ACCUMULATORS; j += 2) { /* interleaving with zeros widens each half of a register */
            uint16x8_t both = vld1q_u16(w + i + j * LANES), zeros = vdupq_n_u16(0);
            s[j % ACCUMULATORS] += (Vector)vzip1q_u16(zeros, both) * LOAD(x + i + j * LANES);
            s[(j + 1) % ACCUMULATORS] += (Vector)vzip2q_u16(zeros, both) * LOAD(x + i + (j + 1) * LANES);
        }
#else
        for (int j = 0; j < 2 * ACCUMULATORS; j++)
            s[j % ACCUMULATORS] += load_bf16(w + i + j * LANES) * LOAD(x + i + j * LANES);
#endif
    }
    for (; i + ACCUMULATORS * LANES <= n; i += ACCUMULATORS * LANES)
        for (int j = 0; j < ACCUMULATORS; j++) s[j] += load_bf16(w + i + j * LANES) * LOAD(x + i + j * LANES);
    for (; i + LANES <= n; i += LANES) s[0] += load_bf16(w + i) * LOAD(x + i);
    for (; i < n; i++) *tail += bf16_to_float(w[i]) * x[i];
    return sum_accumulators(s);
}

/* Dot products of ROW_GROUP rows with x. */
static inline void dot_rows(const float *const *rows, const float *x, int n, float *sums) {
    Vector v[ROW_GROUP];
    float tail[ROW_GROUP] = {0};
    for (int r = 0; r < ROW_GROUP; r++) v[r] = dot(rows[r], x, n, tail + r);
    reduce_rows(v, sums);
    for (int r = 0; r < ROW_GROUP; r++) sums[r] += tail[r];
}

/* Lane by lane, a where `mask` is set (all bits), b elsewhere. */
static inline Vector select_lanes(IntVector mask, Vector a, Vector b) {
    return (Vector)((mask & (IntVector)a) | (~mask & (IntVector)b));
}

static inline Vector max_lanes(Vector a, Vector b) {
    IntVector larger = a > b;
    return (Vector)((larger & (IntVector)a) | (~larger & (IntVector)b));
}

/* e^x to about one unit in the last place: x = n ln 2 + r, and a polynomial in r. NaN stays NaN. */
static inline Vector exp_vector(Vector x) {
    const Vector low = (Vector){0} - 87.0f, high = (Vector){0} + 88.0f;
    IntVector small = x < low, large = x > high;
    Vector y = (Vector)((small & (IntVector)low) | (large & (IntVector)high) | (~(small | large) & (IntVector)x));
    Vector scaled = y * 1.44269504088896341f;
    Vector half = select_lanes(scaled < 0.0f, (Vector){0} - 0.5f, (Vector){0} + 0.5f);
    IntVector n = __builtin_convertvector(scaled + half, IntVector);
    Vector exponent = __builtin_convertvector(n, Vector);
    Vector r = y - exponent * 0.693359375f + exponent * 2.12194440e-4f;
    Vector p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
                1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Vector power = (Vector)((n + 127) << 23);
    return p * power;
}

/* e^x for x ≤ 0, as exact as `exp_vector`, but rounding with ROUND_MAGIC. */
static inline Vector exp_nonpositive(Vector x) {
    const Vector low = (Vector){0} - 87.0f;
    IntVector small = x < low;
    x = (Vector)((small & (IntVector)low) | (~small & (IntVector)x));
    Vector shifted = x * 1.44269504088896341f + ROUND_MAGIC, exponent = shifted - ROUND_MAGIC;
    Vector r = x - exponent * 0.693359375f + exponent * 2.12194440e-4f;
    Vector square = r * r, first = 1.0f + r, second = 5.0000001201e-1f + 1.6666665459e-1f * r;
    Vector third = 4.1665795894e-2f + 8.3334519073e-3f * r, fourth = 1.3981999507e-3f + 1.9875691500e-4f * r;
    Vector p = first + square * (second + square * (third + square * fourth));
    return p * (Vector)(((IntVector)shifted << 23) + (127 << 23));
}
