/* Rows of a matrix times a vector. The matrix is float32, bf16, or whole numbers of 8 or 4 bits with scales
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
static inline void sums_of(const Sum *s, float *sums) { totals((const Vector *)s, sums); }
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE /* two blocks at a time; the scales of sixteen are in one vector, of which `two` finds those of a pair */
typedef __m512 Sum;
static inline __m512i first_two(void) { return _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0); }
static inline Sum add_two(Sum s, __m512i products, __m512 scales, __m512i two) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_permutexvar_ps(two, scales), s);
}
static inline Sum add8(Sum s, __m512i w, __m512i x, __m512 scales, __m512i two) {
    /* unsigned times signed bytes: |x| times w with the sign of x */
    __m512i turned = _mm512_mask_sub_epi8(w, _mm512_movepi8_mask(x), _mm512_setzero_si512(), w);
    return add_two(s, _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_abs_epi8(x), turned), scales, two);
}
static inline Sum add4(Sum s, __m256i both, __m512i x, __m512 scales, __m512i two) {
    __m512i twice = _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), _mm512_castsi256_si512(both));
    __m512i halves = _mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
    __m512i w = _mm512_and_si512(halves, _mm512_set1_epi8(15));
    return add_two(s, _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x), scales, two);
}
static inline void sums_of(const Sum *s, float *sums) { totals((const Vector *)s, sums); }

static inline Sum dot8(const int8_t *w, Rounded x, int blocks) {
    Sum s = _mm512_setzero_ps();
    for (int b = 0; b < blocks; b += LANES) {
        int left = blocks - b < LANES ? blocks - b : LANES;
        __m512 scales = _mm512_maskz_loadu_ps((__mmask16)((1u << left) - 1), x.scales + b);
        fetch(w + b * BLOCK, left * BLOCK);
        __m512i two = first_two(), step = _mm512_set1_epi32(2);
        for (int i = 0; i < left; i += 2, two = _mm512_add_epi32(two, step)) {
            __mmask64 there = i + 1 < left ? ~0ull : 0xffffffffull;
            __m512i numbers = _mm512_maskz_loadu_epi8(there, w + (b + i) * BLOCK);
            s = add8(s, numbers, _mm512_maskz_loadu_epi8(there, x.numbers + (b + i) * BLOCK), scales, two);
        }
    }
    return s;
}

/* What the blocks' offsets and centres add is left in `offset`. */
static inline Sum dot4(const uint8_t *w, const uint16_t *scales, const float *centres, Rounded x, int blocks,
                       Vector *offset, float *rest) {
    (void)rest;
    Sum s = _mm512_setzero_ps();
    __m512 off = _mm512_setzero_ps();
    for (int b = 0; b < blocks; b += LANES) {
        int left = blocks - b < LANES ? blocks - b : LANES;
        __mmask16 some = (__mmask16)((1u << left) - 1);
        fetch(w + b * (BLOCK / 2), left * (BLOCK / 2));
        fetch(scales + b, 1);
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, scales + b)), 16);
        __m512 scale = _mm512_castsi512_ps(wide), both = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(some, x.scales + b));
        off = _mm512_fmadd_ps(scale, _mm512_maskz_loadu_ps(some, x.offsets + b), off);
        if (centres)
            off = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, centres + b), _mm512_maskz_loadu_ps(some, x.sums + b), off);
        __m512i two = first_two(), step = _mm512_set1_epi32(2);
        for (int i = 0; i < left; i += 2, two = _mm512_add_epi32(two, step)) {
            int whole = i + 1 < left;
            __m256i packed = _mm256_maskz_loadu_epi8(whole ? ~0u : 0xffffu, w + (b + i) * (BLOCK / 2));
            __m512i numbers = _mm512_maskz_loadu_epi8(whole ? ~0ull : 0xffffffffull, x.numbers + (b + i) * BLOCK);
            s = add4(s, packed, numbers, both, two);
        }
    }
    *offset = (Vector)off;
    return s;
}
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 Sum;
#define NOTHING _mm256_setzero_ps()
/* unsigned times signed bytes, in fours; the smaller instructions can't overflow: 2 · 127 · 119 < 2¹⁵ */
static inline __m256i times(__m256i a, __m256i b) {
#if defined(__AVXVNNI__)
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
static inline void sums_of(const Sum *s, float *sums) { totals_of_8(s, sums); }
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
static inline void sums_of(const Sum *s, float *sums) { memcpy(sums, s, 4 * ROWS); }
#endif

#if !defined(WIDE)
static inline Sum dot8(const int8_t *w, Rounded x, int blocks) {
    Sum s0 = NOTHING, s1 = NOTHING;
    int b = 0;
    for (; b + 2 <= blocks; b += 2) {
        fetch(w + b * BLOCK, 2 * BLOCK);
        s0 = add8(s0, w + b * BLOCK, x.numbers + b * BLOCK, x.scales[b]);
        s1 = add8(s1, w + (b + 1) * BLOCK, x.numbers + (b + 1) * BLOCK, x.scales[b + 1]);
    }
    if (b < blocks) s0 = add8(s0, w + b * BLOCK, x.numbers + b * BLOCK, x.scales[b]);
    return s0 + s1;
}

/* What the blocks' offsets and centres add is left in `offset` and `rest`. */
static inline Sum dot4(const uint8_t *w, const uint16_t *scales, const float *centres, Rounded x, int blocks,
                       Vector *offset, float *rest) {
    Sum s0 = NOTHING, s1 = NOTHING;
    Vector off = {0};
    int b = 0;
    for (; b + LANES <= blocks; b += LANES) {
        fetch(w + b * (BLOCK / 2), LANES * (BLOCK / 2));
        Vector scale = widen(scales + b), both = scale * LOAD(x.scales + b);
        off += scale * LOAD(x.offsets + b);
        if (centres) off += LOAD(centres + b) * LOAD(x.sums + b);
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
        *rest += scale * x.offsets[b] + (centres ? centres[b] * x.sums[b] : 0.0f);
    }
    *offset = off;
    return s0 + s1;
}
#endif

/* Rows `row` up to `row + count`, ROWS at most, of a matrix times x → y; x is given rounded too where the weights are
 * whole numbers. Of fewer rows the last is multiplied again and again: so each is summed in one order always. */
static inline void products(const Matrix *m, int row, int count, const float *x, Rounded rounded, float *y) {
    int64_t n = m->columns, blocks = n / BLOCK, at[ROWS];
    float sums[ROWS], offsets[ROWS], rest[ROWS] = {0};
    for (int r = 0; r < ROWS; r++) at[r] = (row + (r < count ? r : count - 1)) * n;
    Sum s[ROWS];
    Vector v[ROWS];
    switch (m->kind) {
    case FLOAT32:
        for (int r = 0; r < ROWS; r++) v[r] = dot((const float *)m->weights + at[r], x, n, rest + r);
        totals(v, sums);
        break;
    case BFLOAT16:
        for (int r = 0; r < ROWS; r++) v[r] = dot_bf16((const uint16_t *)m->weights + at[r], x, n, rest + r);
        totals(v, sums);
        break;
    case INT8:
        for (int r = 0; r < ROWS; r++) s[r] = dot8((const int8_t *)m->weights + at[r], rounded, blocks);
        sums_of(s, sums);
        for (int r = 0; r < count; r++) sums[r] *= ((const float *)m->scales)[row + r];
        break;
    default:
        for (int r = 0; r < ROWS; r++)
            s[r] = dot4((const uint8_t *)m->weights + at[r] / 2, (const uint16_t *)m->scales + at[r] / BLOCK,
                        m->centres ? m->centres + at[r] / BLOCK : 0, rounded, blocks, v + r, rest + r);
        sums_of(s, sums);
        totals(v, offsets);
        for (int r = 0; r < ROWS; r++) rest[r] += offsets[r];
    }
    for (int r = 0; r < count; r++) y[r] = sums[r] + rest[r] + (m->bias ? m->bias[row + r] : 0.0f);
}

/* Rows from `first` to before `last` times x → y[0], y[1] and so on. */
static void all_products(const Matrix *m, int first, int last, const float *x, Rounded rounded, float *y) {
    for (int row = first; row < last; row += ROWS)
        products(m, row, last - row < ROWS ? last - row : ROWS, x, rounded, y + row - first);
}
