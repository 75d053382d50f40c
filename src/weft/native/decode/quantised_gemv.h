/* Products of int8 or int4 weights with one vector x, which is quantised to int8 in blocks of 32 values.
 *
 * Weights are packed in panels of 16 interleaved rows (`native.interleave_rows`): four bytes of the first row, the same
 * four of the second and so on, then the next four of each. A vector therefore holds a few columns of several rows and
 * is multiplied by the same few values of x in every lane. Each row is summed in its own lane, so nothing is ever
 * reduced across lanes, which would take as long as the products. Scales and centres are interleaved too. */
#pragma once

#include "vectors.h"

#define BLOCK 32                           /* values with one scale */
#define PANEL_ROWS 16                      /* interleaved rows of a panel */
#define PANEL_VECTORS (PANEL_ROWS / LANES) /* vectors that hold one value of each of these rows */
#define BLOCK_WORDS8 (BLOCK / 4)           /* 32-bit words of one row's block, in 8 bits */
#define BLOCK_WORDS4 (BLOCK / 8)           /* and in 4 bits: the upper nibble of a byte is 16 columns after the lower */

/* On ARM an int-to-float conversion takes four times as long as a subtraction. Integer sums start at ROUND_MAGIC_BITS
 * there, and subtracting ROUND_MAGIC converts them. */
#if defined(__ARM_FEATURE_DOTPROD)
#define SUM_START ROUND_MAGIC_BITS
#define AS_FLOAT(t) ((Vector)(t) - ROUND_MAGIC)
#else
#define SUM_START 0
#define AS_FLOAT(t) __builtin_convertvector(t, Vector)
#endif

typedef struct { /* rows of x in int8, and for each block of 32 values: */
    int8_t *values;
    float *scales;
    int32_t *offsets; /* SUM_START − 8 · the sum of the int8 values */
    float *sums;      /* the sum of the original values */
} QuantisedRows;

#if defined(__aarch64__)
static inline float max_lane(Vector v) { return vmaxvq_f32((float32x4_t)v); }
static inline int reduce_int(IntVector v) { return vaddvq_s32((int32x4_t)v); }
#elif LANES == 16
static inline float max_lane(Vector v) { return _mm512_reduce_max_ps((__m512)v); }
static inline int reduce_int(IntVector v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
static inline float max_lane(Vector v) {
    float max = 0;
    for (int i = 0; i < LANES; i++) max = v[i] > max ? v[i] : max;
    return max;
}
static inline int reduce_int(IntVector v) {
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += (uint32_t)v[i];
    return (int)sum;
}
#endif

/* a · b + c modulo 2³². In a block with NaN or infinity the integers are meaningless, and may overflow. */
static inline int32_t wrapping_multiply_add(int32_t a, int32_t b, int32_t c) {
    return (int32_t)((uint32_t)a * (uint32_t)b + (uint32_t)c);
}

static void quantise_row(const float *x, int n, QuantisedRows out) {
    const IntVector magnitude = (IntVector){0} + INT32_MAX;
    for (int b = 0; b < n / BLOCK; b++) {
        const float *from = x + b * BLOCK;
        Vector maxima = {0}, sums = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            Vector v = LOAD(from + i);
            maxima = max_lanes((Vector)((IntVector)v & magnitude), maxima);
            sums += v;
        }
        float max = max_lane(maxima), sum = reduce(sums);
        float scale = sum - sum == 0 ? max / 127.0f : NAN; /* infinity and NaN propagate */
        float inverse = max > 0 ? 127.0f / max : 0;
        IntVector counts = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            IntVector q = (IntVector)(LOAD(from + i) * inverse + ROUND_MAGIC) - ROUND_MAGIC_BITS;
            store_int8(q, out.values + b * BLOCK + i);
            counts += q;
        }
        out.scales[b] = scale;
        out.offsets[b] = wrapping_multiply_add(reduce_int(counts), -8, SUM_START);
        out.sums[b] = sum;
    }
}

/* ---- four products per lane, added to a sum
 *
 * x holds the same four bytes in every lane. `add8` takes w as bytes from −119 to 119. `add4` takes w as pairs of
 * nibbles from 0 to 15, where the lower ones are multiplied by `low` and the upper ones by `high`. */

#define LOW_NIBBLES ((IntVector){0} + 0x0f0f0f0f)
#define WEIGHT_BIAS 0 /* added to each w by `add8`; its contribution to the sum is subtracted again */

#if defined(__ARM_FEATURE_DOTPROD)
#define HAS_PANEL_GEMM /* several x at a time (quantised_gemm.h); add_block8 and add_block4 need no add8 and add4 */
#elif defined(__aarch64__)
static inline IntVector add8(IntVector sum, IntVector w, IntVector x) {
    int16x8_t first = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)x));
    int16x8_t second = vmull_high_s8((int8x16_t)w, (int8x16_t)x);
    return sum + (IntVector)vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second));
}
static inline IntVector add4(IntVector sum, IntVector w, IntVector low, IntVector high) {
    int8x16_t a = (int8x16_t)(w & LOW_NIBBLES), b = (int8x16_t)vshrq_n_u8((uint8x16_t)w, 4);
    int16x8_t first = vmull_s8(vget_low_s8(a), vget_low_s8((int8x16_t)low));
    int16x8_t second = vmull_high_s8(a, (int8x16_t)low);
    first = vmlal_s8(first, vget_low_s8(b), vget_low_s8((int8x16_t)high));
    second = vmlal_high_s8(second, b, (int8x16_t)high);
    return sum + (IntVector)vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second));
}
#elif (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
/* VNNI multiplies unsigned by signed bytes. */
#define HAS_PANEL_GEMM
#if LANES == 16
#define DOT4(sum, w, x) ((IntVector)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x)))
#else
#define DOT4(sum, w, x) ((IntVector)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x)))
#endif
#undef WEIGHT_BIAS
#define WEIGHT_BIAS 128
typedef IntVector WeightBytes;
static inline WeightBytes prepare8(IntVector w) { return w ^ ((IntVector){0} + (int32_t)0x80808080); }
static inline IntVector add8(IntVector sum, WeightBytes w, IntVector x) { return DOT4(sum, w, x); }
static inline IntVector add_nibbles(IntVector sum, IntVector nibbles, IntVector x) { return DOT4(sum, nibbles, x); }
static inline IntVector finish_nibbles(IntVector sum) { return sum; }
#elif (defined(__AVX512BW__) && LANES == 16) || (defined(__AVX2__) && LANES == 8)
/* maddubs multiplies unsigned by signed bytes and adds pairs in 16 bits. These can't overflow: 2 · 127 · 119 < 2¹⁵ and,
 * for all 4-bit words of a block together, 16 · 127 · 15 < 2¹⁵. */
#define HAS_PANEL_GEMM
#if LANES == 16
#define MULTIPLY_PAIRS(w, x) _mm512_maddubs_epi16((__m512i)(w), (__m512i)(x))
#define SUM_PAIRS(pairs) ((IntVector)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
#define ADD_PAIRS(a, b) _mm512_add_epi16(a, b)
typedef __m512i Pairs;
typedef struct { __m512i magnitude; __mmask64 negative; } WeightBytes;
static inline WeightBytes prepare8(IntVector w) {
    return (WeightBytes){_mm512_abs_epi8((__m512i)w), _mm512_movepi8_mask((__m512i)w)};
}
static inline IntVector add8(IntVector sum, WeightBytes w, IntVector x) { /* |w| times x with the sign of w */
    __m512i with_sign = _mm512_mask_sub_epi8((__m512i)x, w.negative, _mm512_setzero_si512(), (__m512i)x);
    return sum + SUM_PAIRS(MULTIPLY_PAIRS(w.magnitude, with_sign));
}
#else
#define MULTIPLY_PAIRS(w, x) _mm256_maddubs_epi16((__m256i)(w), (__m256i)(x))
#define SUM_PAIRS(pairs) ((IntVector)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
#define ADD_PAIRS(a, b) _mm256_add_epi16(a, b)
typedef __m256i Pairs;
typedef struct { __m256i magnitude, w; } WeightBytes;
static inline WeightBytes prepare8(IntVector w) { return (WeightBytes){_mm256_abs_epi8((__m256i)w), (__m256i)w}; }
static inline IntVector add8(IntVector sum, WeightBytes w, IntVector x) { /* |w| times x with the sign of w */
    return sum + SUM_PAIRS(MULTIPLY_PAIRS(w.magnitude, _mm256_sign_epi8((__m256i)x, w.w)));
}
#endif
static inline IntVector add_nibbles(IntVector pairs, IntVector nibbles, IntVector x) {
    return (IntVector)ADD_PAIRS((Pairs)pairs, MULTIPLY_PAIRS(nibbles, x));
}
static inline IntVector finish_nibbles(IntVector pairs) { return SUM_PAIRS((Pairs)pairs); }
#else
#if defined(__SSE2__) && LANES == 4
static inline IntVector add8(IntVector sum, IntVector w, IntVector x) { /* odd bytes, then even ones, sign-extended */
    __m128i a = _mm_madd_epi16(_mm_srai_epi16((__m128i)w, 8), _mm_srai_epi16((__m128i)x, 8));
    __m128i c = _mm_slli_epi16((__m128i)w, 8), d = _mm_slli_epi16((__m128i)x, 8);
    return sum + (IntVector)a + (IntVector)_mm_madd_epi16(_mm_srai_epi16(c, 8), _mm_srai_epi16(d, 8));
}
#else
static inline IntVector add8(IntVector sum, IntVector w, IntVector x) { /* byte by byte, sign-extended */
    for (int shift = 24; shift >= 0; shift -= 8) sum += ((w << shift) >> 24) * ((x << shift) >> 24);
    return sum;
}
#endif
static inline IntVector add4(IntVector sum, IntVector w, IntVector low, IntVector high) {
    return add8(add8(sum, w & LOW_NIBBLES, low), (w >> 4) & LOW_NIBBLES, high);
}
#endif

/* ---- a panel times x */

#if defined(__ARM_FEATURE_DOTPROD)
/* One block of every row of a panel, added to t. Each lane of x is multiplied by all lanes of w, and the sums alternate
 * to hide the latency of the dot product. */
#define ADD8(j, x, lane)                                                                                               \
    for (int p = 0; p < PANEL_VECTORS; p++)                                                                            \
        t[p] = (IntVector)vdotq_laneq_s32(                                                                             \
            (int32x4_t)t[p], vld1q_s8((const int8_t *)(w + (j) * PANEL_ROWS + p * LANES)), x, lane);
#define ADD4(j)                                                                                                        \
    for (int p = 0; p < PANEL_VECTORS; p++) {                                                                          \
        uint8x16_t pairs = vld1q_u8((const uint8_t *)(w + (j) * PANEL_ROWS + p * LANES));                              \
        int8x16_t lower = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));                                        \
        t[p] = (IntVector)vdotq_laneq_s32((int32x4_t)t[p], lower, low, j);                                             \
        t[p] = (IntVector)vdotq_laneq_s32((int32x4_t)t[p], vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4)), high, j);        \
    }
static inline void add_block8(IntVector *t, const int32_t *w, const int8_t *x) {
    int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + BLOCK / 2);
    ADD8(0, low, 0) ADD8(1, low, 1) ADD8(2, low, 2) ADD8(3, low, 3)
    ADD8(4, high, 0) ADD8(5, high, 1) ADD8(6, high, 2) ADD8(7, high, 3)
}
static inline void add_block4(IntVector *t, const int32_t *w, const int8_t *x) {
    int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + BLOCK / 2);
    ADD4(0) ADD4(1) ADD4(2) ADD4(3)
}
#else
static inline IntVector broadcast4(const int8_t *x) { /* four bytes of x in each lane */
    int32_t word;
    memcpy(&word, x, 4);
    return (IntVector){0} + word;
}
#if !defined(HAS_PANEL_GEMM)
typedef IntVector WeightBytes;
static inline WeightBytes prepare8(IntVector w) { return w; }
#endif
static inline void add_block8(IntVector *t, const int32_t *w, const int8_t *x) {
    for (int j = 0; j < BLOCK_WORDS8; j++, w += PANEL_ROWS) {
        IntVector four = broadcast4(x + 4 * j);
        for (int p = 0; p < PANEL_VECTORS; p++) t[p] = add8(t[p], prepare8(LOAD_INT(w + p * LANES)), four);
    }
}
static inline void add_block4(IntVector *t, const int32_t *w, const int8_t *x) {
#if defined(HAS_PANEL_GEMM)
    IntVector sums[PANEL_VECTORS] = {0};
    for (int j = 0; j < BLOCK_WORDS4; j++, w += PANEL_ROWS) {
        IntVector low = broadcast4(x + 4 * j), high = broadcast4(x + 4 * j + BLOCK / 2);
        for (int p = 0; p < PANEL_VECTORS; p++) {
            IntVector both = LOAD_INT(w + p * LANES);
            sums[p] = add_nibbles(add_nibbles(sums[p], both & LOW_NIBBLES, low), (both >> 4) & LOW_NIBBLES, high);
        }
    }
    for (int p = 0; p < PANEL_VECTORS; p++) t[p] += finish_nibbles(sums[p]);
#else
    for (int j = 0; j < BLOCK_WORDS4; j++, w += PANEL_ROWS) {
        IntVector low = broadcast4(x + 4 * j), high = broadcast4(x + 4 * j + BLOCK / 2);
        for (int p = 0; p < PANEL_VECTORS; p++) t[p] = add4(t[p], LOAD_INT(w + p * LANES), low, high);
    }
#endif
}
#endif

/* y = an int8 panel times x; `scales` holds one scale per row. */
static void panel_gemv8(const int32_t *w, const float *scales, QuantisedRows x, int blocks, float *y) {
    Vector s[PANEL_VECTORS] = {0};
    for (int b = 0; b < blocks; b++, w += BLOCK_WORDS8 * PANEL_ROWS) {
        IntVector t[PANEL_VECTORS];
        prefetch(w, 4 * BLOCK_WORDS8 * PANEL_ROWS);
        int32_t start = wrapping_multiply_add(x.offsets[b], WEIGHT_BIAS / 8, SUM_START * (1 - WEIGHT_BIAS / 8));
        for (int p = 0; p < PANEL_VECTORS; p++) t[p] = (IntVector){0} + start;
        add_block8(t, w, x.values + b * BLOCK);
        for (int p = 0; p < PANEL_VECTORS; p++) s[p] += AS_FLOAT(t[p]) * x.scales[b];
    }
    for (int p = 0; p < PANEL_VECTORS; p++) STORE(y + p * LANES, s[p] * LOAD(scales + p * LANES));
}

/* y = an int4 panel times x; every block of a row has a scale and, unless `centres` is null, a centre. */
static void panel_gemv4(
    const int32_t *w, const uint16_t *scales, const float *centres, QuantisedRows x, int blocks, float *y) {
    Vector s[PANEL_VECTORS] = {0};
    for (int b = 0; b < blocks; b++, w += BLOCK_WORDS4 * PANEL_ROWS, scales += PANEL_ROWS) {
        IntVector t[PANEL_VECTORS];
        prefetch(w, 4 * BLOCK_WORDS4 * PANEL_ROWS);
        prefetch(scales, 1);
        for (int p = 0; p < PANEL_VECTORS; p++) t[p] = (IntVector){0} + x.offsets[b]; /* a nibble u stands for u − 8 */
        add_block4(t, w, x.values + b * BLOCK);
        for (int p = 0; p < PANEL_VECTORS; p++)
            s[p] += AS_FLOAT(t[p]) * (load_bf16(scales + p * LANES) * x.scales[b]);
        if (centres)
            for (int p = 0; p < PANEL_VECTORS; p++) s[p] += LOAD(centres + b * PANEL_ROWS + p * LANES) * x.sums[b];
    }
    for (int p = 0; p < PANEL_VECTORS; p++) STORE(y + p * LANES, s[p]);
}
