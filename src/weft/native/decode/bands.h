/* Products with whole numbers of 8 or 4 bits, and what they are multiplied with, rounded to 8 bits in blocks of 32.
 *
 * Sixteen rows of the matrix lie interleaved, in a band (`native.py`): four bytes of its first row, the same four of its
 * second and so on, then the next four of each. So a vector holds a few columns of several rows, it is multiplied with
 * the same few numbers of x in every lane, and each row is summed up in a lane of its own: nothing is ever summed across
 * lanes, which would take as long as the products. Scales and centres lie interleaved as well. */
#pragma once

#include "vectors.h"

#define BLOCK 32              /* numbers with one scale */
#define BAND 16               /* rows that lie interleaved */
#define PARTS (BAND / LANES)  /* vectors with a number of each of them */
#define WORDS8 (BLOCK / 4)    /* words of four bytes that a row's block has, in 8 bits */
#define WORDS4 (BLOCK / 8)    /* and in 4: a byte's lower half is 16 columns before its upper */

/* 1.5 · 2²³ plus a number below 2²² has no room for fractions, and ends in that number's bits. On ARM converting takes four
 * times as long as adding or subtracting it: so that is what sums of whole numbers begin with there. */
#define ROUND 12582912.0f
#define ROUND_BITS 0x4b400000
#if defined(__ARM_FEATURE_DOTPROD)
#define START ROUND_BITS
#define AS_FLOAT(t) ((Vector)(t) - ROUND)
#else
#define START 0
#define AS_FLOAT(t) __builtin_convertvector(t, Vector)
#endif

typedef struct { /* x in blocks of 32: numbers, their scale, START − 8 · their sum, and the sum of x itself */
    int8_t *numbers;
    float *scales;
    int32_t *offsets;
    float *sums;
} Rounded;

#if defined(__aarch64__)
static inline float largest_of(Vector v) { return vmaxvq_f32((float32x4_t)v); }
static inline int sum_of_lanes(Integers v) { return vaddvq_s32((int32x4_t)v); }
#elif LANES == 16
static inline float largest_of(Vector v) { return _mm512_reduce_max_ps((__m512)v); }
static inline int sum_of_lanes(Integers v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
static inline float largest_of(Vector v) {
    float largest = 0;
    for (int i = 0; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}
static inline int sum_of_lanes(Integers v) {
    int sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}
#endif

static void round_blocks(const float *x, int n, Rounded out) {
    const Integers unsigned_ = (Integers){0} + INT32_MAX;
    for (int b = 0; b < n / BLOCK; b++) {
        const float *from = x + b * BLOCK;
        Vector most = {0}, sum = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            Vector v = LOAD(from + i), size = (Vector)((Integers)v & unsigned_);
            Integers larger = size > most;
            most = (Vector)((larger & (Integers)size) | (~larger & (Integers)most));
            sum += v;
        }
        float largest = largest_of(most), together = total(sum);
        float scale = together - together == 0 ? largest / 127.0f : NAN; /* infinity and NaN are passed on */
        float inverse = largest > 0 ? 127.0f / largest : 0;
        Integers count = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            Integers q = (Integers)(LOAD(from + i) * inverse + ROUND) - ROUND_BITS; /* rounds by being added */
            narrow(q, out.numbers + b * BLOCK + i);
            count += q;
        }
        out.scales[b] = scale;
        out.offsets[b] = START - 8 * sum_of_lanes(count);
        out.sums[b] = together;
    }
}

/* ---- four products a lane, added to a sum
 *
 * x: the same four bytes in every lane. `add8`: w are bytes from −119 to 119. `add4`: w are pairs of numbers from 0 to
 * 15, of which the lower ones meet `low` and the upper `high`. */

#define LOWER ((Integers){0} + 0x0f0f0f0f)
#define RAISED 0 /* what add8 adds to each w, and what it thereby adds to the sum has to be taken off */

#if defined(__ARM_FEATURE_DOTPROD)
#define SEVERAL /* x can be multiplied at a time; `block8` and `block4` below do without add8 and add4 */
#elif defined(__aarch64__)
static inline Integers add8(Integers sum, Integers w, Integers x) {
    int16x8_t first = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)x));
    int16x8_t second = vmull_high_s8((int8x16_t)w, (int8x16_t)x);
    return sum + (Integers)vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second));
}
static inline Integers add4(Integers sum, Integers w, Integers low, Integers high) {
    int8x16_t a = (int8x16_t)(w & LOWER), b = (int8x16_t)vshrq_n_u8((uint8x16_t)w, 4);
    int16x8_t first = vmull_s8(vget_low_s8(a), vget_low_s8((int8x16_t)low));
    int16x8_t second = vmull_high_s8(a, (int8x16_t)low);
    first = vmlal_s8(first, vget_low_s8(b), vget_low_s8((int8x16_t)high));
    second = vmlal_high_s8(second, b, (int8x16_t)high);
    return sum + (Integers)vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second));
}
#elif (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
/* unsigned times signed bytes */
#define SEVERAL
#if LANES == 16
#define TIMES(sum, w, x) ((Integers)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x)))
#else
#define TIMES(sum, w, x) ((Integers)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x)))
#endif
#undef RAISED
#define RAISED 128
typedef Integers Bytes;
static inline Bytes bytes_of(Integers w) { return w ^ ((Integers){0} + (int32_t)0x80808080); }
static inline Integers add8(Integers sum, Bytes w, Integers x) { return TIMES(sum, w, x); }
static inline Integers add_half(Integers sum, Integers half, Integers x) { return TIMES(sum, half, x); }
static inline Integers halves_of(Integers sum) { return sum; }
#elif (defined(__AVX512BW__) && LANES == 16) || (defined(__AVX2__) && LANES == 8)
/* unsigned times signed bytes, in pairs of 16 bits: those can't overflow, for 2 · 127 · 119 and, with all of a block's
 * words of 4 bits, 16 · 127 · 15 < 2¹⁵ */
#define SEVERAL
#if LANES == 16
#define PAIRS(w, x) _mm512_maddubs_epi16((__m512i)(w), (__m512i)(x))
#define ADDED(pairs) ((Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
#define BOTH(a, b) _mm512_add_epi16(a, b)
typedef __m512i Pairs;
typedef struct { __m512i sizes; __mmask64 negative; } Bytes;
static inline Bytes bytes_of(Integers w) {
    return (Bytes){_mm512_abs_epi8((__m512i)w), _mm512_movepi8_mask((__m512i)w)};
}
static inline Integers add8(Integers sum, Bytes w, Integers x) { /* |w| times x with the sign of w */
    __m512i turned = _mm512_mask_sub_epi8((__m512i)x, w.negative, _mm512_setzero_si512(), (__m512i)x);
    return sum + ADDED(PAIRS(w.sizes, turned));
}
#else
#define PAIRS(w, x) _mm256_maddubs_epi16((__m256i)(w), (__m256i)(x))
#define ADDED(pairs) ((Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
#define BOTH(a, b) _mm256_add_epi16(a, b)
typedef __m256i Pairs;
typedef struct { __m256i sizes, w; } Bytes;
static inline Bytes bytes_of(Integers w) { return (Bytes){_mm256_abs_epi8((__m256i)w), (__m256i)w}; }
static inline Integers add8(Integers sum, Bytes w, Integers x) { /* |w| times x with the sign of w */
    return sum + ADDED(PAIRS(w.sizes, _mm256_sign_epi8((__m256i)x, w.w)));
}
#endif
static inline Integers add_half(Integers pairs, Integers half, Integers x) {
    return (Integers)BOTH((Pairs)pairs, PAIRS(half, x));
}
static inline Integers halves_of(Integers pairs) { return ADDED((Pairs)pairs); }
#else
#if defined(__SSE2__) && LANES == 4
static inline Integers add8(Integers sum, Integers w, Integers x) { /* every other byte, each with its sign */
    __m128i a = _mm_madd_epi16(_mm_srai_epi16((__m128i)w, 8), _mm_srai_epi16((__m128i)x, 8));
    __m128i c = _mm_slli_epi16((__m128i)w, 8), d = _mm_slli_epi16((__m128i)x, 8);
    return sum + (Integers)a + (Integers)_mm_madd_epi16(_mm_srai_epi16(c, 8), _mm_srai_epi16(d, 8));
}
#else
static inline Integers add8(Integers sum, Integers w, Integers x) { /* byte by byte, each with its sign */
    for (int shift = 24; shift >= 0; shift -= 8) sum += ((w << shift) >> 24) * ((x << shift) >> 24);
    return sum;
}
#endif
static inline Integers add4(Integers sum, Integers w, Integers low, Integers high) {
    return add8(add8(sum, w & LOWER, low), (w >> 4) & LOWER, high);
}
#endif

/* ---- a band times x */

#if defined(__ARM_FEATURE_DOTPROD)
/* A block of each row, added to sums. A lane of x is multiplied with all lanes of w as it lies, and the sums take turns:
 * each is ready some cycles after it began. */
#define ADD8(j, x, lane)                                                                                               \
    for (int p = 0; p < PARTS; p++)                                                                                    \
        t[p] = (Integers)vdotq_laneq_s32((int32x4_t)t[p], vld1q_s8((const int8_t *)(w + (j) * BAND + p * LANES)), x, lane);
#define ADD4(j)                                                                                                        \
    for (int p = 0; p < PARTS; p++) {                                                                                  \
        uint8x16_t pairs = vld1q_u8((const uint8_t *)(w + (j) * BAND + p * LANES));                                    \
        int8x16_t lower = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));                                        \
        t[p] = (Integers)vdotq_laneq_s32((int32x4_t)t[p], lower, low, j);                                              \
        t[p] = (Integers)vdotq_laneq_s32((int32x4_t)t[p], vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4)), high, j);         \
    }
static inline void block8(Integers *t, const int32_t *w, const int8_t *x) {
    int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + BLOCK / 2);
    ADD8(0, low, 0) ADD8(1, low, 1) ADD8(2, low, 2) ADD8(3, low, 3)
    ADD8(4, high, 0) ADD8(5, high, 1) ADD8(6, high, 2) ADD8(7, high, 3)
}
static inline void block4(Integers *t, const int32_t *w, const int8_t *x) {
    int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + BLOCK / 2);
    ADD4(0) ADD4(1) ADD4(2) ADD4(3)
}
#else
static inline Integers everywhere(const int8_t *x) { /* four bytes of x in each lane */
    int32_t word;
    memcpy(&word, x, 4);
    return (Integers){0} + word;
}
#if !defined(SEVERAL)
typedef Integers Bytes;
static inline Bytes bytes_of(Integers w) { return w; }
#endif
static inline void block8(Integers *t, const int32_t *w, const int8_t *x) {
    for (int j = 0; j < WORDS8; j++, w += BAND) {
        Integers four = everywhere(x + 4 * j);
        for (int p = 0; p < PARTS; p++) t[p] = add8(t[p], bytes_of(WHOLE(w + p * LANES)), four);
    }
}
static inline void block4(Integers *t, const int32_t *w, const int8_t *x) {
#if defined(SEVERAL)
    Integers sums[PARTS] = {0};
    for (int j = 0; j < WORDS4; j++, w += BAND) {
        Integers low = everywhere(x + 4 * j), high = everywhere(x + 4 * j + BLOCK / 2);
        for (int p = 0; p < PARTS; p++) {
            Integers both = WHOLE(w + p * LANES);
            sums[p] = add_half(add_half(sums[p], both & LOWER, low), (both >> 4) & LOWER, high);
        }
    }
    for (int p = 0; p < PARTS; p++) t[p] += halves_of(sums[p]);
#else
    for (int j = 0; j < WORDS4; j++, w += BAND) {
        Integers low = everywhere(x + 4 * j), high = everywhere(x + 4 * j + BLOCK / 2);
        for (int p = 0; p < PARTS; p++) t[p] = add4(t[p], WHOLE(w + p * LANES), low, high);
    }
#endif
}
#endif

/* The sixteen rows that begin at w, in 8 bits → y; their scales, one a row, at `scales`. */
static void band8(const int32_t *w, const float *scales, Rounded x, int blocks, float *y) {
    Vector s[PARTS] = {0};
    for (int b = 0; b < blocks; b++, w += WORDS8 * BAND) {
        Integers t[PARTS];
        fetch(w, 4 * WORDS8 * BAND);
        for (int p = 0; p < PARTS; p++) t[p] = (Integers){0} + (START + (x.offsets[b] - START) * (RAISED / 8));
        block8(t, w, x.numbers + b * BLOCK);
        for (int p = 0; p < PARTS; p++) s[p] += AS_FLOAT(t[p]) * x.scales[b];
    }
    for (int p = 0; p < PARTS; p++) STORE(y + p * LANES, s[p] * LOAD(scales + p * LANES));
}

/* The same in 4 bits, with scales and, where there are any, centres of each block. */
static void band4(const int32_t *w, const uint16_t *scales, const float *centres, Rounded x, int blocks, float *y) {
    Vector s[PARTS] = {0};
    for (int b = 0; b < blocks; b++, w += WORDS4 * BAND, scales += BAND) {
        Integers t[PARTS];
        fetch(w, 4 * WORDS4 * BAND);
        fetch(scales, 1);
        for (int p = 0; p < PARTS; p++) t[p] = (Integers){0} + x.offsets[b]; /* w counts from −8 up */
        block4(t, w, x.numbers + b * BLOCK);
        for (int p = 0; p < PARTS; p++)
            s[p] += AS_FLOAT(t[p]) * (widen(scales + p * LANES) * x.scales[b]);
        if (centres)
            for (int p = 0; p < PARTS; p++) s[p] += LOAD(centres + b * BAND + p * LANES) * x.sums[b];
    }
    for (int p = 0; p < PARTS; p++) STORE(y + p * LANES, s[p]);
}
