/* Vectors as wide as the processor's, and sums of products over them. */
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
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4)));
#define LOAD(pointer) (*(const Vector *)(pointer))
#define WHOLE(pointer) (*(const Integers *)(pointer))
#define STORE(pointer, value) (*(Vector *)(pointer) = (value))
#define SUMS 4 /* at a time: a product is ready some cycles after it began */
#define ROWS 4 /* of a matrix that are summed up together */
#define EACH(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)

/* Before a function whose sums gcc would bring into another order, in which they wait for one another or for memory */
#if defined(__clang__)
#define IN_THIS_ORDER __attribute__((noinline))
#else
#define IN_THIS_ORDER __attribute__((noinline, optimize("no-schedule-insns")))
#endif

/* Ask for so many bytes some way ahead: processors do that by themselves, but not beyond the end of a page. */
#if defined(__aarch64__)
#define AHEAD 512
#else
#define AHEAD 2048
#endif
static inline void fetch(const void *from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + AHEAD + i);
}

/* The sums of ROWS vectors. Added up one by one they would take as long as a row's products. */
#if defined(__aarch64__)
static inline void totals(const Vector *v, float *sums) {
    float32x4_t first = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    vst1q_f32(sums, vpaddq_f32(first, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
}
#elif defined(__AVX__)
static inline void totals_of_8(const __m256 *v, float *sums) {
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
#if defined(__AVX512F__)
static inline __m256 halved(Vector v) {
    __m256d upper = _mm512_extractf64x4_pd((__m512d)v, 1);
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm256_castpd_ps(upper));
}
#else
static inline __m256 halved(Vector v) { return (__m256)v; }
#endif
static inline void totals(const Vector *v, float *sums) {
    __m256 halves[ROWS] = {halved(v[0]), halved(v[1]), halved(v[2]), halved(v[3])};
    totals_of_8(halves, sums);
}
#else
static inline void totals(const Vector *v, float *sums) {
    for (int r = 0; r < ROWS; r++) {
        sums[r] = 0;
        for (int i = 0; i < LANES; i++) sums[r] += v[r][i];
    }
}
#endif

static inline float total(Vector v) {
    Vector all[ROWS] = {v};
    float sums[ROWS];
    totals(all, sums);
    return sums[0];
}

static inline float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* bf16 to float32, and whole numbers to bytes: compilers take these apart */
#if defined(__aarch64__)
static inline Vector widen(const uint16_t *from) { return (Vector)vshll_n_u16(vld1_u16(from), 16); }
static inline void narrow(Integers q, int8_t *to) {
    int16x4_t half = vmovn_s32((int32x4_t)q);
    int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));
    memcpy(to, &bytes, 4);
}
#elif defined(__AVX512F__)
static inline Vector widen(const uint16_t *from) {
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}
static inline void narrow(Integers q, int8_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)q));
}
#elif defined(__AVX2__)
static inline Vector widen(const uint16_t *from) {
    return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
}
static inline void narrow(Integers q, int8_t *to) {
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)q), _mm256_extracti128_si256((__m256i)q, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(half, half));
}
#else
static inline Vector widen(const uint16_t *from) {
    Vector v;
    for (int i = 0; i < LANES; i++) v[i] = widened(from[i]);
    return v;
}
static inline void narrow(Integers q, int8_t *to) {
    for (int i = 0; i < LANES; i++) to[i] = (int8_t)q[i];
}
#endif

static inline Vector sum_of(const Vector *s) {
    return (s[0] + s[1]) + (s[2] + s[3]);
}

/* The products of two rows, of which those beyond the last whole vector are added to `rest`. */
static inline Vector dot(const float *a, const float *b, int n, float *rest) {
    Vector s[SUMS] = {0};
    int i = 0;
    for (; i + 2 * SUMS * LANES <= n; i += 2 * SUMS * LANES) {
        fetch(a + i, 8 * SUMS * LANES);
        for (int j = 0; j < 2 * SUMS; j++) s[j % SUMS] += LOAD(a + i + j * LANES) * LOAD(b + i + j * LANES);
    }
    for (; i + SUMS * LANES <= n; i += SUMS * LANES)
        for (int j = 0; j < SUMS; j++) s[j] += LOAD(a + i + j * LANES) * LOAD(b + i + j * LANES);
    for (; i + LANES <= n; i += LANES) s[0] += LOAD(a + i) * LOAD(b + i);
    for (; i < n; i++) *rest += a[i] * b[i];
    return sum_of(s);
}

/* The products of two rows with two others, x and the one n further on, as `dot` sums them up: what is loaded is used
 * twice. v[2 x + row], rest[2 x + row]. */
static inline void four_dots(const float *const *rows, const float *x, int n, Vector *v, float *rest) {
    Vector s[4][SUMS] = {0};
    const float *a = rows[0], *b = rows[1], *y = x + n;
    int i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES) {
        fetch(a + i, 4 * SUMS * LANES);
        fetch(b + i, 4 * SUMS * LANES);
        for (int j = 0; j < SUMS; j++) {
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
        rest[0] += a[i] * x[i], rest[1] += b[i] * x[i];
        rest[2] += a[i] * y[i], rest[3] += b[i] * y[i];
    }
    for (int k = 0; k < 4; k++) v[k] = sum_of(s[k]);
}

static inline Vector dot_bf16(const uint16_t *w, const float *x, int n, float *rest) {
    Vector s[SUMS] = {0};
    int i = 0;
    for (; i + 2 * SUMS * LANES <= n; i += 2 * SUMS * LANES) {
        fetch(w + i, 4 * SUMS * LANES);
#if defined(__aarch64__)
        for (int j = 0; j < 2 * SUMS; j += 2) { /* either half of a vector, with zeros below */
            uint16x8_t both = vld1q_u16(w + i + j * LANES), zeros = vdupq_n_u16(0);
            s[j % SUMS] += (Vector)vzip1q_u16(zeros, both) * LOAD(x + i + j * LANES);
            s[(j + 1) % SUMS] += (Vector)vzip2q_u16(zeros, both) * LOAD(x + i + (j + 1) * LANES);
        }
#else
        for (int j = 0; j < 2 * SUMS; j++) s[j % SUMS] += widen(w + i + j * LANES) * LOAD(x + i + j * LANES);
#endif
    }
    for (; i + SUMS * LANES <= n; i += SUMS * LANES)
        for (int j = 0; j < SUMS; j++) s[j] += widen(w + i + j * LANES) * LOAD(x + i + j * LANES);
    for (; i + LANES <= n; i += LANES) s[0] += widen(w + i) * LOAD(x + i);
    for (; i < n; i++) *rest += widened(w[i]) * x[i];
    return sum_of(s);
}

/* ROWS rows times x. */
static inline void dots(const float *const *rows, const float *x, int n, float *sums) {
    Vector v[ROWS];
    float rest[ROWS] = {0};
    for (int r = 0; r < ROWS; r++) v[r] = dot(rows[r], x, n, rest + r);
    totals(v, sums);
    for (int r = 0; r < ROWS; r++) sums[r] += rest[r];
}

/* e^x to about one unit in the last place (x = n ln 2 + r, a polynomial of r); NaN stays NaN. */
static inline Vector exponential(Vector x) {
    const Vector low = (Vector){0} - 87.0f, high = (Vector){0} + 88.0f;
    Integers small = x < low, large = x > high;
    Vector y = (Vector)((small & (Integers)low) | (large & (Integers)high) | (~(small | large) & (Integers)x));
    Vector scaled = y * 1.44269504088896341f;
    Integers down = scaled < 0.0f;
    Vector half = (Vector)(((Integers)((Vector){0} - 0.5f) & down) | ((Integers)((Vector){0} + 0.5f) & ~down));
    Integers n = __builtin_convertvector(scaled + half, Integers);
    Vector whole = __builtin_convertvector(n, Vector);
    Vector r = y - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
                1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Vector power = (Vector)((n + 127) << 23);
    return p * power;
}

/* e^x for x of at most 0, as `exponential` has it: a number with no room for fractions rounds by being added. */
static inline Vector falling(Vector x) {
    const Vector low = (Vector){0} - 87.0f;
    const float round = 12582912.0f;
    Integers small = x < low;
    x = (Vector)((small & (Integers)low) | (~small & (Integers)x));
    Vector shifted = x * 1.44269504088896341f + round, whole = shifted - round;
    Vector r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector square = r * r, first = 1.0f + r, second = 5.0000001201e-1f + 1.6666665459e-1f * r;
    Vector third = 4.1665795894e-2f + 8.3334519073e-3f * r, fourth = 1.3981999507e-3f + 1.9875691500e-4f * r;
    Vector p = first + square * (second + square * (third + square * fourth));
    return p * (Vector)(((Integers)shifted << 23) + (127 << 23));
}
