/* A band times several x: weights are unpacked once for all of them, as many rows of the band at a time as a vector has
 * lanes; sums are the same to the bit. */
#pragma once

#include "bands.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define MOST 8 /* x at a time; their sums take turns */
#define OF_X(r) (x.numbers + ((int64_t)(r) * blocks + b) * BLOCK)
#define ZERO(r) Vector s##r = {0};
#define BEGIN8(r) int32x4_t t##r = vdupq_n_s32(START);
#define BEGIN4(r) int32x4_t t##r = r < count ? vld1q_dup_s32(x.offsets + r * blocks + b) : vdupq_n_s32(0);
#define FIRST_HALF(r) int8x16_t x##r = r < count ? vld1q_s8(OF_X(r)) : w0;
#define SECOND_HALF(r) if (r < count) x##r = vld1q_s8(OF_X(r) + BLOCK / 2);
#define DOT(r, w, lane) if (r < count) t##r = vdotq_laneq_s32(t##r, w, x##r, lane);
#define DOTS(w, lane)                                                                                                  \
    DOT(0, w, lane) DOT(1, w, lane) DOT(2, w, lane) DOT(3, w, lane)                                                    \
    DOT(4, w, lane) DOT(5, w, lane) DOT(6, w, lane) DOT(7, w, lane)
#define BYTES(j) vld1q_s8((const int8_t *)(w + (j) * BAND))
#define PAIRS_OF(j) vld1q_u8((const uint8_t *)(w + (j) * BAND))
#define LOWER_OF(j) vreinterpretq_s8_u8(vandq_u8(PAIRS_OF(j), vdupq_n_u8(15)))
#define UPPER_OF(j) vreinterpretq_s8_u8(vshrq_n_u8(PAIRS_OF(j), 4))
#define WITH_ALL(i, lane, of) { int8x16_t w##i = of; DOTS(w##i, lane) }
#define SUM8(r) if (r < count) s##r += AS_FLOAT(t##r) * x.scales[r * blocks + b];
#define SUM4(r) if (r < count) s##r += AS_FLOAT(t##r) * (scale * x.scales[r * blocks + b]);
#define CENTRE(r) if (r < count) s##r += centre * x.sums[r * blocks + b];
#define KEEP8(r) if (r < count) STORE(y + r * BAND, s##r * LOAD(scales));
#define KEEP4(r) if (r < count) STORE(y + r * BAND, s##r);

/* Four rows of a band times `count` x, of which the next is `blocks` further on → y (count, BAND). */
static inline __attribute__((always_inline)) void part8(const int32_t *w, const float *scales, Rounded x, int blocks,
                                                        int count, const int32_t *ahead, float *y) {
    EACH(ZERO)
    for (int b = 0; b < blocks; b++, w += WORDS8 * BAND) {
        for (int i = 0; i < WORDS8 / PARTS; i++) __builtin_prefetch(ahead += BAND);
        int8x16_t w0 = BYTES(0);
        EACH(BEGIN8)
        EACH(FIRST_HALF)
        DOTS(w0, 0) WITH_ALL(1, 1, BYTES(1)) WITH_ALL(2, 2, BYTES(2)) WITH_ALL(3, 3, BYTES(3))
        EACH(SECOND_HALF)
        WITH_ALL(4, 0, BYTES(4)) WITH_ALL(5, 1, BYTES(5)) WITH_ALL(6, 2, BYTES(6)) WITH_ALL(7, 3, BYTES(7))
        EACH(SUM8)
    }
    EACH(KEEP8)
}

static inline __attribute__((always_inline)) void part4(const int32_t *w, const uint16_t *scales, const float *centres,
                                                        Rounded x, int blocks, int count, const int32_t *ahead,
                                                        float *y) {
    EACH(ZERO)
    for (int b = 0; b < blocks; b++, w += WORDS4 * BAND, scales += BAND) {
        __builtin_prefetch(ahead += BAND);
        int8x16_t w0 = LOWER_OF(0);
        EACH(BEGIN4)
        EACH(FIRST_HALF)
        DOTS(w0, 0) WITH_ALL(1, 1, LOWER_OF(1)) WITH_ALL(2, 2, LOWER_OF(2)) WITH_ALL(3, 3, LOWER_OF(3))
        EACH(SECOND_HALF)
        WITH_ALL(4, 0, UPPER_OF(0)) WITH_ALL(5, 1, UPPER_OF(1)) WITH_ALL(6, 2, UPPER_OF(2)) WITH_ALL(7, 3, UPPER_OF(3))
        Vector scale = widen(scales);
        EACH(SUM4)
        if (centres) {
            Vector centre = LOAD(centres + b * BAND);
            EACH(CENTRE)
        }
    }
    EACH(KEEP4)
}

/* The same with the whole band; the next one is asked for meanwhile. */
IN_THIS_ORDER static void bands8(const int32_t *w, const float *scales, Rounded x, int blocks, int count, float *y) {
    const int32_t *ahead = w + blocks * WORDS8 * BAND;
    for (int p = 0; p < BAND; p += LANES, ahead += blocks * WORDS8 * LANES)
        if (count == MOST)
            part8(w + p, scales + p, x, blocks, MOST, ahead, y + p);
        else
            part8(w + p, scales + p, x, blocks, 4, ahead, y + p);
}

IN_THIS_ORDER static void bands4(const int32_t *w, const uint16_t *scales, const float *centres, Rounded x, int blocks,
                                 int count, float *y) {
    const int32_t *ahead = w + blocks * WORDS4 * BAND;
    for (int p = 0; p < BAND; p += LANES, ahead += blocks * WORDS4 * LANES, centres += centres ? LANES : 0)
        if (count == MOST)
            part4(w + p, scales + p, centres, x, blocks, MOST, ahead, y + p);
        else
            part4(w + p, scales + p, centres, x, blocks, 4, ahead, y + p);
}
#elif defined(SEVERAL)
#if LANES == 16
#define MOST 8 /* x at a time */
#else
#define MOST 4
#endif
#define OF_X(r, column) everywhere(x.numbers + ((int64_t)(r) * blocks + b) * BLOCK + (column))

/* Rows of a band, as many as a vector has lanes, times `count` x, of which the next is `blocks` further on → y (count,
 * BAND). */
static inline __attribute__((always_inline)) void part8(const int32_t *w, const float *scales, Rounded x, int blocks,
                                                        int count, float *y) {
    Vector s[MOST] = {0};
    for (int b = 0; b < blocks; b++, w += WORDS8 * BAND) {
        Integers t[MOST];
        fetch(w, 4 * WORDS8 * BAND);
        for (int r = 0; r < count; r++) t[r] = (Integers){0} + x.offsets[r * blocks + b] * (RAISED / 8);
#pragma GCC unroll 8
        for (int j = 0; j < WORDS8; j++) {
            Bytes four = bytes_of(WHOLE(w + j * BAND));
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) t[r] = add8(t[r], four, OF_X(r, 4 * j));
        }
        for (int r = 0; r < count; r++) s[r] += AS_FLOAT(t[r]) * x.scales[r * blocks + b];
    }
    for (int r = 0; r < count; r++) STORE(y + r * BAND, s[r] * LOAD(scales));
}

static inline __attribute__((always_inline)) void part4(const int32_t *w, const uint16_t *scales, const float *centres,
                                                        Rounded x, int blocks, int count, float *y) {
    Vector s[MOST] = {0};
    for (int b = 0; b < blocks; b++, w += WORDS4 * BAND, scales += BAND) {
        Integers t[MOST] = {0};
        fetch(w, 4 * WORDS4 * BAND);
#pragma GCC unroll 4
        for (int j = 0; j < WORDS4; j++) {
            Integers both = WHOLE(w + j * BAND), lower = both & LOWER, upper = (both >> 4) & LOWER;
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) t[r] = add_half(t[r], lower, OF_X(r, 4 * j));
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) t[r] = add_half(t[r], upper, OF_X(r, 4 * j + BLOCK / 2));
        }
        Vector scale = widen(scales);
        for (int r = 0; r < count; r++)
            s[r] += AS_FLOAT(halves_of(t[r]) + x.offsets[r * blocks + b]) * (scale * x.scales[r * blocks + b]);
        for (int r = 0; centres && r < count; r++) s[r] += LOAD(centres + b * BAND) * x.sums[r * blocks + b];
    }
    for (int r = 0; r < count; r++) STORE(y + r * BAND, s[r]);
}

/* The same with the whole band. */
static void bands8(const int32_t *w, const float *scales, Rounded x, int blocks, int count, float *y) {
    for (int p = 0; p < BAND; p += LANES)
        if (count == MOST)
            part8(w + p, scales + p, x, blocks, MOST, y + p);
        else
            part8(w + p, scales + p, x, blocks, 4, y + p);
}

static void bands4(const int32_t *w, const uint16_t *scales, const float *centres, Rounded x, int blocks, int count,
                   float *y) {
    for (int p = 0; p < BAND; p += LANES, centres += centres ? LANES : 0)
        if (count == MOST)
            part4(w + p, scales + p, centres, x, blocks, MOST, y + p);
        else
            part4(w + p, scales + p, centres, x, blocks, 4, y + p);
}
#else
#define MOST 2 /* as many as `products` has room for; whole numbers are multiplied with one x at a time */
#endif
