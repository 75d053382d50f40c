/* An int8 or int4 panel times several x: weights are unpacked once for all of them, LANES rows of the panel at a time.
 * Results equal those of quantised_gemv.h to the bit. */
#pragma once

#include "quantised_gemv.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define MAX_BATCH 8 /* x at a time */
#define X_BLOCK(r) (x.values + ((int64_t)(r) * blocks + b) * BLOCK)
#define ZERO(r) Vector s##r = {0};
#define BEGIN8(r) int32x4_t t##r = vdupq_n_s32(SUM_START);
#define BEGIN4(r) int32x4_t t##r = r < count ? vld1q_dup_s32(x.offsets + r * blocks + b) : vdupq_n_s32(0);
#define FIRST_HALF(r) int8x16_t x##r = r < count ? vld1q_s8(X_BLOCK(r)) : w0;
#define SECOND_HALF(r) if (r < count) x##r = vld1q_s8(X_BLOCK(r) + BLOCK / 2);
#define DOT(r, w, lane) if (r < count) t##r = vdotq_laneq_s32(t##r, w, x##r, lane);
#define DOTS(w, lane)                                                                                                  \
    DOT(0, w, lane) DOT(1, w, lane) DOT(2, w, lane) DOT(3, w, lane)                                                    \
    DOT(4, w, lane) DOT(5, w, lane) DOT(6, w, lane) DOT(7, w, lane)
#define BYTES(j) vld1q_s8((const int8_t *)(w + (j) * PANEL_ROWS))
#define NIBBLES(j) vld1q_u8((const uint8_t *)(w + (j) * PANEL_ROWS))
#define LOWER(j) vreinterpretq_s8_u8(vandq_u8(NIBBLES(j), vdupq_n_u8(15)))
#define UPPER(j) vreinterpretq_s8_u8(vshrq_n_u8(NIBBLES(j), 4))
#define DOT_ALL(i, lane, weights) { int8x16_t w##i = weights; DOTS(w##i, lane) }
#define SUM8(r) if (r < count) s##r += AS_FLOAT(t##r) * x.scales[r * blocks + b];
#define SUM4(r) if (r < count) s##r += AS_FLOAT(t##r) * (scale * x.scales[r * blocks + b]);
#define CENTRE(r) if (r < count) s##r += centre * x.sums[r * blocks + b];
#define STORE8(r) if (r < count) STORE(y + r * PANEL_ROWS, s##r * LOAD(scales));
#define STORE4(r) if (r < count) STORE(y + r * PANEL_ROWS, s##r);

/* LANES rows of an int8 panel times `count` consecutive x → y (count, PANEL_ROWS). Prefetches from `next`. */
static inline __attribute__((always_inline)) void lanes_gemm8(
    const int32_t *w, const float *scales, QuantisedRows x, int blocks, int count, const int32_t *next, float *y) {
    FOR_EACH_8(ZERO)
    for (int b = 0; b < blocks; b++, w += BLOCK_WORDS8 * PANEL_ROWS) {
        for (int i = 0; i < BLOCK_WORDS8 / PANEL_VECTORS; i++) __builtin_prefetch(next += PANEL_ROWS);
        int8x16_t w0 = BYTES(0);
        FOR_EACH_8(BEGIN8)
        FOR_EACH_8(FIRST_HALF)
        DOTS(w0, 0) DOT_ALL(1, 1, BYTES(1)) DOT_ALL(2, 2, BYTES(2)) DOT_ALL(3, 3, BYTES(3))
        FOR_EACH_8(SECOND_HALF)
        DOT_ALL(4, 0, BYTES(4)) DOT_ALL(5, 1, BYTES(5)) DOT_ALL(6, 2, BYTES(6)) DOT_ALL(7, 3, BYTES(7))
        FOR_EACH_8(SUM8)
    }
    FOR_EACH_8(STORE8)
}

static inline __attribute__((always_inline)) void lanes_gemm4(
    const int32_t *w, const uint16_t *scales, const float *centres, QuantisedRows x, int blocks, int count,
    const int32_t *next, float *y) {
    FOR_EACH_8(ZERO)
    for (int b = 0; b < blocks; b++, w += BLOCK_WORDS4 * PANEL_ROWS, scales += PANEL_ROWS) {
        __builtin_prefetch(next += PANEL_ROWS);
        int8x16_t w0 = LOWER(0);
        FOR_EACH_8(BEGIN4)
        FOR_EACH_8(FIRST_HALF)
        DOTS(w0, 0) DOT_ALL(1, 1, LOWER(1)) DOT_ALL(2, 2, LOWER(2)) DOT_ALL(3, 3, LOWER(3))
        FOR_EACH_8(SECOND_HALF)
        DOT_ALL(4, 0, UPPER(0)) DOT_ALL(5, 1, UPPER(1)) DOT_ALL(6, 2, UPPER(2)) DOT_ALL(7, 3, UPPER(3))
        Vector scale = load_bf16(scales);
        FOR_EACH_8(SUM4)
        if (centres) {
            Vector centre = LOAD(centres + b * PANEL_ROWS);
            FOR_EACH_8(CENTRE)
        }
    }
    FOR_EACH_8(STORE4)
}

/* A whole int8 panel times `count` x, MAX_BATCH or 4, while the next panel is prefetched. */
KEEP_ORDER static void panel_gemm8(
    const int32_t *w, const float *scales, QuantisedRows x, int blocks, int count, float *y) {
    const int32_t *next = w + blocks * BLOCK_WORDS8 * PANEL_ROWS;
    for (int p = 0; p < PANEL_ROWS; p += LANES, next += blocks * BLOCK_WORDS8 * LANES)
        if (count == MAX_BATCH)
            lanes_gemm8(w + p, scales + p, x, blocks, MAX_BATCH, next, y + p);
        else
            lanes_gemm8(w + p, scales + p, x, blocks, 4, next, y + p);
}

KEEP_ORDER static void panel_gemm4(
    const int32_t *w, const uint16_t *scales, const float *centres, QuantisedRows x, int blocks, int count, float *y) {
    const int32_t *next = w + blocks * BLOCK_WORDS4 * PANEL_ROWS;
    for (int p = 0; p < PANEL_ROWS; p += LANES, next += blocks * BLOCK_WORDS4 * LANES, centres += centres ? LANES : 0)
        if (count == MAX_BATCH)
            lanes_gemm4(w + p, scales + p, centres, x, blocks, MAX_BATCH, next, y + p);
        else
            lanes_gemm4(w + p, scales + p, centres, x, blocks, 4, next, y + p);
}
#elif defined(HAS_PANEL_GEMM)
#if LANES == 16
#define MAX_BATCH 8 /* x at a time */
#else
#define MAX_BATCH 4
#endif
#define X_WORD(r, column) broadcast4(x.values + ((int64_t)(r) * blocks + b) * BLOCK + (column))

/* LANES rows of an int8 panel times `count` consecutive x → y (count, PANEL_ROWS). */
static inline __attribute__((always_inline)) void lanes_gemm8(
    const int32_t *w, const float *scales, QuantisedRows x, int blocks, int count, float *y) {
    Vector s[MAX_BATCH] = {0};
    for (int b = 0; b < blocks; b++, w += BLOCK_WORDS8 * PANEL_ROWS) {
        IntVector t[MAX_BATCH];
        prefetch(w, 4 * BLOCK_WORDS8 * PANEL_ROWS);
        for (int r = 0; r < count; r++)
            t[r] = (IntVector){0} + wrapping_multiply_add(x.offsets[r * blocks + b], WEIGHT_BIAS / 8, 0);
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK_WORDS8; j++) {
            WeightBytes four = prepare8(LOAD_INT(w + j * PANEL_ROWS));
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) t[r] = add8(t[r], four, X_WORD(r, 4 * j));
        }
        for (int r = 0; r < count; r++) s[r] += AS_FLOAT(t[r]) * x.scales[r * blocks + b];
    }
    for (int r = 0; r < count; r++) STORE(y + r * PANEL_ROWS, s[r] * LOAD(scales));
}

static inline __attribute__((always_inline)) void lanes_gemm4(
    const int32_t *w, const uint16_t *scales, const float *centres, QuantisedRows x, int blocks, int count, float *y) {
    Vector s[MAX_BATCH] = {0};
    for (int b = 0; b < blocks; b++, w += BLOCK_WORDS4 * PANEL_ROWS, scales += PANEL_ROWS) {
        IntVector t[MAX_BATCH] = {0};
        prefetch(w, 4 * BLOCK_WORDS4 * PANEL_ROWS);
#pragma GCC unroll 4
        for (int j = 0; j < BLOCK_WORDS4; j++) {
            IntVector both = LOAD_INT(w + j * PANEL_ROWS), lower = both & LOW_NIBBLES;
            IntVector upper = (both >> 4) & LOW_NIBBLES;
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) t[r] = add_nibbles(t[r], lower, X_WORD(r, 4 * j));
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) t[r] = add_nibbles(t[r], upper, X_WORD(r, 4 * j + BLOCK / 2));
        }
        Vector scale = load_bf16(scales);
        for (int r = 0; r < count; r++)
            s[r] += AS_FLOAT(finish_nibbles(t[r]) + x.offsets[r * blocks + b]) * (scale * x.scales[r * blocks + b]);
        for (int r = 0; centres && r < count; r++) s[r] += LOAD(centres + b * PANEL_ROWS) * x.sums[r * blocks + b];
    }
    for (int r = 0; r < count; r++) STORE(y + r * PANEL_ROWS, s[r]);
}

/* A whole int8 panel times `count` x, MAX_BATCH or 4. */
static void panel_gemm8(const int32_t *w, const float *scales, QuantisedRows x, int blocks, int count, float *y) {
    for (int p = 0; p < PANEL_ROWS; p += LANES)
        if (count == MAX_BATCH)
            lanes_gemm8(w + p, scales + p, x, blocks, MAX_BATCH, y + p);
        else
            lanes_gemm8(w + p, scales + p, x, blocks, 4, y + p);
}

static void panel_gemm4(
    const int32_t *w, const uint16_t *scales, const float *centres, QuantisedRows x, int blocks, int count, float *y) {
    for (int p = 0; p < PANEL_ROWS; p += LANES, centres += centres ? LANES : 0)
        if (count == MAX_BATCH)
            lanes_gemm4(w + p, scales + p, centres, x, blocks, MAX_BATCH, y + p);
        else
            lanes_gemm4(w + p, scales + p, centres, x, blocks, 4, y + p);
}
#else
#define MAX_BATCH 2 /* float32 rows come in pairs (gemv.h); quantised panels are multiplied by one x at a time */
#endif
