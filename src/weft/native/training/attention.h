/* Attention in float32 and its gradients, for training: softmax(q kᵀ · scale) v, causal or not.
 *
 * A thread computes whole KV heads with all query heads that share them, so every element is summed by one thread in a
 * fixed order and results do not depend on the number of threads. Probabilities exist for one block of queries and keys
 * at a time, in cache (Dao et al. 2022, "FlashAttention"). The logarithm of each query's normaliser is kept, and the
 * backward pass recomputes the probabilities from it. */
#pragma once

#include "register_tile.h"
#include "threads.h"

#define QUERIES 64 /* queries of a block; QUERIES, KEYS and d_head are multiples of the register tile's sides */
#define KEYS 64    /* keys of a block */

typedef struct { /* (batch, heads, time, d_head), contiguous in its last dimension */
    float *data;
    int64_t batch_stride, head_stride, time_stride;
} Heads;

typedef struct {
    Heads q, k, v, out, d_out, d_q, d_k, d_v;
    float *logsumexp; /* (batch, heads, time) */
    float *scratch;   /* `scratch_size` floats for each thread */
    int64_t scratch_size;
    int32_t batch, heads, kv_heads, time, source, d_head, causal;
    float scale;
} Attention;

static inline int round_up(int n, int step) { return (n + step - 1) / step * step; }
static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }

/* Copy one head to `to` (time, d), times `factor`, padded with zeros to whole blocks. */
static void gather(Heads from, int row, int head, int time, int d, float factor, float *to) {
    const float *at = from.data + row * from.batch_stride + head * from.head_stride;
    for (int t = 0; t < time; t++)
        for (int i = 0; i < d; i += TILE_COLUMNS) {
            __builtin_prefetch(at + (t + 16) * from.time_stride + i);
            for (int j = i; j < i + TILE_COLUMNS; j += LANES)
                STORE(to + (int64_t)t * d + j, LOAD(at + t * from.time_stride + j) * factor);
        }
    memset(to + (int64_t)time * d, 0, sizeof(float) * d * (round_up(time, QUERIES) - time));
}

/* Copy `from` (time, d), times `factor`, to one head. */
static void scatter(const float *from, int time, int d, float factor, Heads to, int row, int head) {
    float *at = to.data + row * to.batch_stride + head * to.head_stride;
    for (int t = 0; t < time; t++)
        for (int i = 0; i < d; i++) at[t * to.time_stride + i] = from[(int64_t)t * d + i] * factor;
}

/* (time, d) → panels (d, TILE_COLUMNS) of TILE_COLUMNS tokens each, in the order in which a product reads them. */
static void transpose(const float *from, int time, int d, float *to) {
    for (int t = 0; t < time; t += TILE_COLUMNS, to += TILE_COLUMNS * d)
        for (int i = 0; i < d; i += LANES)
            for (int u = 0; u < TILE_COLUMNS; u++)
                for (int j = 0; j < LANES; j++) to[(i + j) * TILE_COLUMNS + u] = from[(int64_t)(t + u) * d + i + j];
}

/* Replace a query's scores by e^(score − running maximum): the first `seen` of a block's `keys` are visible, the others
 * become 0. Updates the running maximum and sum, and returns the factor by which earlier sums shrink. */
static inline float exponentiate(float *scores, int seen, int keys, float *max, float *sum) {
    for (int i = seen; i < round_up(seen, TILE_COLUMNS); i++) scores[i] = -INFINITY;
    Vector maxima[TILE_VECTORS], sums[TILE_VECTORS] = {0};
    for (int c = 0; c < TILE_VECTORS; c++) maxima[c] = (Vector){0} - INFINITY;
    for (int i = 0; i < seen; i += TILE_COLUMNS)
        for (int c = 0; c < TILE_VECTORS; c++) maxima[c] = max_lanes(LOAD(scores + i + c * LANES), maxima[c]);
    for (int c = 1; c < TILE_VECTORS; c++) maxima[0] = max_lanes(maxima[0], maxima[c]);
    float new_max = *max;
    for (int i = 0; i < LANES; i++) new_max = maxima[0][i] > new_max ? maxima[0][i] : new_max;
    for (int i = 0; i < seen; i += TILE_COLUMNS)
        for (int c = 0; c < TILE_VECTORS; c++) {
            Vector e = exp_nonpositive(LOAD(scores + i + c * LANES) - new_max);
            STORE(scores + i + c * LANES, e), sums[c] += e;
        }
    memset(scores + seen, 0, sizeof(float) * (keys - seen));
    for (int c = 1; c < TILE_VECTORS; c++) sums[0] += sums[c];
    float shrink = *max == new_max ? 1 : expf(*max - new_max);
    *max = new_max, *sum = *sum * shrink + reduce(sums[0]);
    return shrink;
}

/* Number of a block's keys that a query sees. */
static inline int visible_keys(const Attention *a, int query, int first_key, int keys) {
    return a->causal ? max_int(0, min_int(keys, query + 1 - first_key)) : keys;
}

/* Forward pass of the QUERIES queries from `first` on → out, unnormalised, with their maxima and sums. */
static void attend_block(const Attention *a, const float *q, const float *kt, const float *v, int first, float *scores,
                         float *out, float *max, float *sums) {
    int d = a->d_head;
    for (int i = 0; i < QUERIES; i++) max[i] = -INFINITY, sums[i] = 0;
    int end = a->causal ? min_int(a->source, first + QUERIES) : a->source;
    for (int key = 0; key < end; key += KEYS) {
        int keys = min_int(KEYS, end - key), padded = round_up(keys, TILE_COLUMNS);
        for (int j = 0; j < padded; j += TILE_COLUMNS)
            for (int i = 0; i < QUERIES; i += TILE_ROWS) {
                if (a->causal && key + j > first + i + TILE_ROWS - 1) continue;
                Tile t = {0};
                multiply_add(&t, d, q + (first + i) * d, d, 1, kt + (key + j) * d, TILE_COLUMNS);
                store_tile(&t, scores + i * KEYS + j, KEYS);
            }
        for (int i = 0; i < QUERIES; i++) {
            float shrink = exponentiate(
                scores + i * KEYS, visible_keys(a, first + i, key, keys), padded, max + i, sums + i);
            if (key && shrink != 1)
                for (int j = 0; j < d; j += LANES) STORE(out + i * d + j, LOAD(out + i * d + j) * shrink);
        }
        for (int j = 0; j < d; j += TILE_COLUMNS)
            for (int i = 0; i < QUERIES; i += TILE_ROWS) {
                Tile t = {0};
                multiply_add(&t, visible_keys(a, first + i + TILE_ROWS - 1, key, keys), scores + i * KEYS, KEYS, 1,
                             v + key * d + j, d);
                key ? add_tile(&t, out + i * d + j, d) : store_tile(&t, out + i * d + j, d);
            }
    }
}

/* A thread's scratch memory: one block of scores and gradients, and one head's tensors. */
typedef struct { float *p, *d_s, *q, *d_out, *d_q, *k, *v, *kt, *vt, *d_k, *d_v, *logsumexp, *inner; } Scratch;

/* Lay out the scratch memory from `memory` on. Returns its size in floats. */
static int64_t lay_out(Scratch *s, int time, int source, int d, float *memory) {
    int64_t n = round_up(time, QUERIES), kv = round_up(source, QUERIES) * (int64_t)d, block = QUERIES * KEYS;
    float **parts[] = {&s->p,  &s->d_s, &s->q,   &s->d_out, &s->d_q,       &s->k,    &s->v,
                       &s->kt, &s->vt,  &s->d_k, &s->d_v,   &s->logsumexp, &s->inner};
    int64_t sizes[] = {block, block, n * d, n * d, n * d, kv, kv, kv, kv, kv, kv, n, n}, used = 0;
    for (int i = 0; i < 13; i++) *parts[i] = memory + used, used += sizes[i];
    return used;
}

static void attend_forward(void *argument, int thread, int threads) {
    const Attention *a = argument;
    int d = a->d_head, group = a->heads / a->kv_heads, units = a->batch * a->kv_heads;
    Scratch s;
    lay_out(&s, a->time, a->source, d, a->scratch + thread * a->scratch_size);
    for (int unit = share_start(units, thread, threads); unit < share_start(units, thread + 1, threads); unit++) {
        int row = unit / a->kv_heads, kv = unit % a->kv_heads;
        gather(a->k, row, kv, a->source, d, 1, s.k);
        gather(a->v, row, kv, a->source, d, 1, s.v);
        transpose(s.k, round_up(a->source, QUERIES), d, s.kt);
        for (int head = kv * group; head < (kv + 1) * group; head++) {
            gather(a->q, row, head, a->time, d, a->scale, s.q);
            float *out = s.d_out, *logsumexp = a->logsumexp + ((int64_t)row * a->heads + head) * a->time;
            for (int first = 0; first < a->time; first += QUERIES) {
                float max[QUERIES], sums[QUERIES];
                attend_block(a, s.q, s.kt, s.v, first, s.p, out, max, sums);
                for (int i = 0; i < min_int(QUERIES, a->time - first); i++) {
                    float *to = a->out.data + row * a->out.batch_stride + head * a->out.head_stride +
                                (first + i) * a->out.time_stride;
                    for (int j = 0; j < d; j += LANES) STORE(to + j, LOAD(out + i * d + j) / sums[i]);
                    logsumexp[first + i] = max[i] + logf(sums[i]);
                }
            }
        }
    }
}

static inline float inner_product(const float *a, const float *b, int n) {
    Vector s = {0};
    for (int i = 0; i < n; i += LANES) s += LOAD(a + i) * LOAD(b + i);
    return reduce(s);
}

/* Probabilities and gradients of the scores of one block. */
static void differentiate_scores(const Attention *a, const Scratch *s, int first, int key, int keys) {
    int d = a->d_head;
    for (int j = 0; j < round_up(keys, TILE_COLUMNS); j += TILE_COLUMNS)
        for (int i = 0; i < QUERIES; i += TILE_ROWS) {
            if (a->causal && key + j > first + i + TILE_ROWS - 1) continue;
            Tile p = {0}, d_p = {0};
            multiply_add(&p, d, s->q + (first + i) * d, d, 1, s->kt + (key + j) * d, TILE_COLUMNS);
            multiply_add(&d_p, d, s->d_out + (first + i) * d, d, 1, s->vt + (key + j) * d, TILE_COLUMNS);
            for (int r = 0; r < TILE_ROWS; r++)
                for (int c = 0; c < TILE_VECTORS; c++) {
                    p.sums[r][c] = exp_nonpositive(p.sums[r][c] - s->logsumexp[first + i + r]);
                    d_p.sums[r][c] = p.sums[r][c] * (d_p.sums[r][c] - s->inner[first + i + r]);
                }
            store_tile(&p, s->p + i * KEYS + j, KEYS);
            store_tile(&d_p, s->d_s + i * KEYS + j, KEYS);
            for (int r = 0; r < TILE_ROWS; r++) {
                int seen = max_int(0, visible_keys(a, first + i + r, key, keys) - j);
                if (first + i + r >= a->time) seen = 0;
                if (seen < TILE_COLUMNS) {
                    memset(s->p + (i + r) * KEYS + j + seen, 0, sizeof(float) * (TILE_COLUMNS - seen));
                    memset(s->d_s + (i + r) * KEYS + j + seen, 0, sizeof(float) * (TILE_COLUMNS - seen));
                }
            }
        }
}

/* Backward pass of one block: adds to d_q, d_k and d_v. */
static void backward_block(const Attention *a, const Scratch *s, int first, int key, int keys) {
    int d = a->d_head;
    differentiate_scores(a, s, first, key, keys);
    for (int j = 0; j < d; j += TILE_COLUMNS) {
        for (int i = 0; i < round_up(keys, TILE_ROWS); i += TILE_ROWS) {
            /* queries before the tile's first key see none of its keys */
            int from = a->causal ? max_int(0, key + i - first) / TILE_ROWS * TILE_ROWS : 0;
            if (from >= QUERIES) break;
            Tile t = {0};
            multiply_add(&t, QUERIES - from, s->p + from * KEYS + i, 1, KEYS, s->d_out + (first + from) * d + j, d);
            add_tile(&t, s->d_v + (key + i) * d + j, d);
            t = (Tile){0};
            multiply_add(&t, QUERIES - from, s->d_s + from * KEYS + i, 1, KEYS, s->q + (first + from) * d + j, d);
            add_tile(&t, s->d_k + (key + i) * d + j, d);
        }
        for (int i = 0; i < QUERIES; i += TILE_ROWS) {
            Tile t = {0};
            int seen = visible_keys(a, first + i + TILE_ROWS - 1, key, keys);
            multiply_add(&t, seen, s->d_s + i * KEYS, KEYS, 1, s->k + key * d + j, d);
            add_tile(&t, s->d_q + (first + i) * d + j, d);
        }
    }
}

static void attend_backward(void *argument, int thread, int threads) {
    const Attention *a = argument;
    int d = a->d_head, group = a->heads / a->kv_heads, units = a->batch * a->kv_heads;
    int64_t kv_size = round_up(a->source, QUERIES) * (int64_t)d, q_size = round_up(a->time, QUERIES) * (int64_t)d;
    Scratch s;
    lay_out(&s, a->time, a->source, d, a->scratch + thread * a->scratch_size);
    for (int unit = share_start(units, thread, threads); unit < share_start(units, thread + 1, threads); unit++) {
        int row = unit / a->kv_heads, kv = unit % a->kv_heads;
        gather(a->k, row, kv, a->source, d, 1, s.k);
        gather(a->v, row, kv, a->source, d, 1, s.v);
        transpose(s.k, kv_size / d, d, s.kt);
        transpose(s.v, kv_size / d, d, s.vt);
        memset(s.d_k, 0, sizeof(float) * kv_size);
        memset(s.d_v, 0, sizeof(float) * kv_size);
        for (int head = kv * group; head < (kv + 1) * group; head++) {
            gather(a->q, row, head, a->time, d, a->scale, s.q);
            gather(a->d_out, row, head, a->time, d, 1, s.d_out);
            memset(s.d_q, 0, sizeof(float) * q_size);
            const float *logsumexp = a->logsumexp + ((int64_t)row * a->heads + head) * a->time;
            memcpy(s.logsumexp, logsumexp, sizeof(float) * a->time);
            const float *out = a->out.data + row * a->out.batch_stride + head * a->out.head_stride;
            for (int t = 0; t < q_size / d; t++)
                s.inner[t] = t < a->time ? inner_product(s.d_out + (int64_t)t * d, out + t * a->out.time_stride, d)
                                         : (s.logsumexp[t] = 0);
            for (int key = 0; key < a->source; key += KEYS)
                for (int first = a->causal ? key / QUERIES * QUERIES : 0; first < a->time; first += QUERIES) {
                    int end = a->causal ? min_int(a->source, first + QUERIES) : a->source;
                    backward_block(a, &s, first, key, min_int(KEYS, end - key));
                }
            scatter(s.d_q, a->time, d, a->scale, a->d_q, row, head);
        }
        scatter(s.d_k, a->source, d, 1, a->d_k, row, kv);
        scatter(s.d_v, a->source, d, 1, a->d_v, row, kv);
    }
}

/* Floats of scratch memory that each thread needs. */
int64_t weft_attention_scratch(int time, int source, int d_head) {
    Scratch s;
    return lay_out(&s, time, source, d_head, 0);
}

void weft_attend(Attention *a, int backward, int threads) {
    run_parallel(backward ? attend_backward : attend_forward, a, threads);
}
