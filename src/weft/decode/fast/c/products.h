/* A row of a matrix times a vector. The matrix is float32, bf16, or whole numbers of 8 or 4 bits with scales
 * (`rounding.py`); with whole numbers, the vector is rounded to 8 bits too, in blocks of 32 with a scale each. */
#pragma once

#include "vectors.h"

#define BLOCK 32 /* numbers with one scale */

enum { FLOAT32, BFLOAT16, INT8, INT4 };

typedef struct { /* (rows, columns); as `quantize.py` packs them */
    int32_t kind, rows, columns;
    const void *weights;
    const void *scales;   /* float (rows) in 8 bits, bf16 (rows, blocks) in 4 */
    const float *centres; /* (rows, blocks) in 4 bits, or none */
    const float *bias;    /* (rows), or none */
} Matrix;

/* ---- what whole numbers are multiplied with */

typedef struct { /* x in blocks of 32: numbers, their scale, −8 · scale · their sum, and the sum of x itself */
    int8_t *numbers;
    float *scales, *offsets, *sums;
} Rounded;

static void round_blocks(const float *x, int n, Rounded out) {
    const Integers unsigned_ = (Integers){0} + INT32_MAX;
    const Vector half = (Vector){0} + 0.5f;
    for (int b = 0; b < n / BLOCK; b++) {
        const float *from = x + b * BLOCK;
        Vector most = {0}, sum = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            Vector v = LOAD(from + i), size = (Vector)((Integers)v & unsigned_);
            Integers larger = size > most;
            most = (Vector)((larger & (Integers)size) | (~larger & (Integers)most));
            sum += v;
        }
        float largest = 0, together = total(sum);
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        float scale = together - together == 0 ? largest / 127.0f : NAN; /* infinity and NaN are passed on */
        float inverse = largest > 0 ? 127.0f / largest : 0;
        Integers count = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            Vector v = LOAD(from + i) * inverse;
            Vector away = (Vector)((Integers)half | ((Integers)v & ~unsigned_)); /* ½ with the sign of v */
            Integers q = __builtin_convertvector(v + away, Integers);
            narrow(q, out.numbers + b * BLOCK + i);
            count += q;
        }
        int whole = 0;
        for (int i = 0; i < LANES; i++) whole += count[i];
        out.scales[b] = scale;
        out.offsets[b] = -8.0f * scale * (float)whole;
        out.sums[b] = together;
    }
}

/* ---- products of two blocks of whole numbers */

#if defined(__ARM_FEATURE_DOTPROD)
typedef float32x4_t Sum;
#define NOTHING vdupq_n_f32(0)
static inline Sum add8(Sum s, const int8_t *w, const int8_t *x, float scale) {
    int32x4_t t = vdotq_s32(vdupq_n_s32(0), vld1q_s8(w), vld1q_s8(x));
    t = vdotq_s32(t, vld1q_s8(w + 16), vld1q_s8(x + 16));
    return vfmaq_n_f32(s, vcvtq_f32_s32(t), scale);
}
/* the sums of four numbers each, of one block */
static inline int32x4_t quarters(const uint8_t *w, const int8_t *x) {
    uint8x16_t both = vld1q_u8(w);
    int8x16_t low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), low, vld1q_s8(x)), high, vld1q_s8(x + 16));
}
/* four blocks, with a scale each */
static inline Sum add_four(Sum s, const uint8_t *w, const int8_t *x, Vector scales) {
    int32x4_t first = vpaddq_s32(quarters(w, x), quarters(w + 16, x + 32));
    int32x4_t second = vpaddq_s32(quarters(w + 32, x + 64), quarters(w + 48, x + 96));
    return vfmaq_f32(s, vcvtq_f32_s32(vpaddq_s32(first, second)), scales);
}
static inline Sum add4(Sum s, const uint8_t *w, const int8_t *x, float scale) {
    return vfmaq_n_f32(s, vcvtq_f32_s32(quarters(w, x)), scale);
}
static inline float summed(Sum s) { return vaddvq_f32(s); }
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 Sum;
#define NOTHING _mm256_setzero_ps()
/* unsigned times signed bytes, in fours; the smaller instructions can't overflow: 2 · 127 · 119 < 2¹⁵ */
static inline __m256i times(__m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), a, b);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), a, b);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#endif
}
static inline Sum add8(Sum s, const int8_t *w, const int8_t *x, float scale) {
    __m256i a = _mm256_loadu_si256((const __m256i *)w), b = _mm256_loadu_si256((const __m256i *)x);
    __m256i t = times(_mm256_abs_epi8(b), _mm256_sign_epi8(a, b));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(t), _mm256_set1_ps(scale), s);
}
static inline Sum add4(Sum s, const uint8_t *w, const int8_t *x, float scale) {
    __m128i both = _mm_loadu_si128((const __m128i *)w), mask = _mm_set1_epi8(15);
    __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    __m256i t = times(_mm256_set_m128i(high, low), _mm256_loadu_si256((const __m256i *)x));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(t), _mm256_set1_ps(scale), s);
}
static inline float summed(Sum s) {
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
#else
typedef float Sum;
#define NOTHING 0.0f
static inline Sum add8(Sum s, const int8_t *w, const int8_t *x, float scale) {
    int t = 0;
    for (int i = 0; i < BLOCK; i++) t += w[i] * x[i];
    return s + (float)t * scale;
}
static inline Sum add4(Sum s, const uint8_t *w, const int8_t *x, float scale) {
    int t = 0;
    for (int i = 0; i < BLOCK / 2; i++) t += (w[i] & 15) * x[i] + (w[i] >> 4) * x[i + BLOCK / 2];
    return s + (float)t * scale;
}
static inline float summed(Sum s) { return s; }
#endif

static float dot8(const int8_t *w, Rounded x, int blocks) {
    Sum s0 = NOTHING, s1 = NOTHING;
    int b = 0;
    for (; b + 2 <= blocks; b += 2) {
        s0 = add8(s0, w + b * BLOCK, x.numbers + b * BLOCK, x.scales[b]);
        s1 = add8(s1, w + (b + 1) * BLOCK, x.numbers + (b + 1) * BLOCK, x.scales[b + 1]);
    }
    if (b < blocks) s0 = add8(s0, w + b * BLOCK, x.numbers + b * BLOCK, x.scales[b]);
    return summed(s0) + summed(s1);
}

static float dot4(const uint8_t *w, const uint16_t *scales, const float *centres, Rounded x, int blocks) {
    Sum s0 = NOTHING, s1 = NOTHING;
    Vector offset = {0};
    float rest = 0;
    int b = 0;
    for (; b + LANES <= blocks; b += LANES) {
        Vector scale = widen(scales + b), both = scale * LOAD(x.scales + b);
        offset += scale * LOAD(x.offsets + b);
#if defined(__ARM_FEATURE_DOTPROD)
        s0 = add_four(s0, w + b * (BLOCK / 2), x.numbers + b * BLOCK, both);
#else
        float each[LANES]; /* from memory, where one that is to fill a vector is cheaply found */
        STORE(each, both);
        for (int i = 0; i < LANES; i += 2) {
            s0 = add4(s0, w + (b + i) * (BLOCK / 2), x.numbers + (b + i) * BLOCK, each[i]);
            s1 = add4(s1, w + (b + i + 1) * (BLOCK / 2), x.numbers + (b + i + 1) * BLOCK, each[i + 1]);
        }
#endif
    }
    for (; b < blocks; b++) {
        float scale = widened(scales[b]);
        s0 = add4(s0, w + b * (BLOCK / 2), x.numbers + b * BLOCK, scale * x.scales[b]);
        rest += scale * x.offsets[b];
    }
    rest += total(offset) + (centres ? dot(centres, x.sums, blocks) : 0.0f);
    return summed(s0) + summed(s1) + rest;
}

/* Row `row` of a matrix times x, which is given rounded where the weights are whole numbers. */
static inline float product(const Matrix *m, int row, const float *x, Rounded rounded) {
    int64_t n = m->columns, at = row * n;
    float y;
    switch (m->kind) {
    case FLOAT32: y = dot((const float *)m->weights + at, x, n); break;
    case BFLOAT16: y = dot_bf16((const uint16_t *)m->weights + at, x, n); break;
    case INT8: y = ((const float *)m->scales)[row] * dot8((const int8_t *)m->weights + at, rounded, n / BLOCK); break;
    default:
        y = dot4((const uint8_t *)m->weights + at / 2, (const uint16_t *)m->scales + at / BLOCK,
                 m->centres ? m->centres + at / BLOCK : 0, rounded, n / BLOCK);
    }
    return m->bias ? y + m->bias[row] : y;
}
