/* Attention in float32 and its gradients, for training: softmax(q kᵀ · scale) v, causal or not.
 *
 * A thread computes whole heads of keys and values, with all heads of queries that share them: every number is summed by
 * one thread in one order, and what comes out does not depend on how many there are. Probabilities exist for a block of
 * queries and keys at a time, in the cache (Dao et al. 2022); the logarithm of each query's normaliser is kept, and the
 * backward pass computes them from it again.
 */
#pragma once

#include "register_tile.h"
#include "threads.h"

#define QUERIES 64 /* of a block; whole numbers of tiles, as d_head is and KEYS */
#define KEYS 64

typedef struct { /* of (batch, heads, time, d_head), whose last numbers lie side by side */
    float *at;
    int64_t row, head, place; /* how far apart two of them are */
} Heads;

typedef struct {
    Heads q, k, v, out, d_out, d_q, d_k, d_v;
    float *log_totals; /* (batch, heads, time) */
    float *scratch;    /* `space` numbers for each thread */
    int64_t space;
    int32_t batch, heads, kv_heads, time, source, d_head, causal;
    float scale;
} Attention;

static inline int up_to(int n, int step) { return (n + step - 1) / step * step; }
static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

/* A head's numbers side by side, times `factor`; zeros up to a whole number of tiles. */
static void gather(Heads from, int row, int head, int places, int d, float factor, float *to) {
    const float *at = from.at + row * from.row + head * from.head;
    for (int t = 0; t < places; t++)
        for (int i = 0; i < d; i += WIDTH) {
            __builtin_prefetch(at + (t + 16) * from.place + i);
            for (int j = i; j < i + WIDTH; j += LANES) STORE(to + (int64_t)t * d + j, LOAD(at + t * from.place + j) * factor);
        }
    memset(to + (int64_t)places * d, 0, sizeof(float) * d * (up_to(places, QUERIES) - places));
}

static void scatter(const float *from, int places, int d, float factor, Heads to, int row, int head) {
    float *at = to.at + row * to.row + head * to.head;
    for (int t = 0; t < places; t++)
        for (int i = 0; i < d; i++) at[t * to.place + i] = from[(int64_t)t * d + i] * factor;
}

/* (places, d) → panels of WIDTH places, each (d, WIDTH), as a product reads them: one after the other */
static void transpose(const float *from, int places, int d, float *to) {
    for (int t = 0; t < places; t += WIDTH, to += WIDTH * d)
        for (int i = 0; i < d; i += LANES)
            for (int u = 0; u < WIDTH; u++)
                for (int j = 0; j < LANES; j++) to[(i + j) * WIDTH + u] = from[(int64_t)(t + u) * d + i + j];
}

/* Scores of a query and `seen` keys, of `all` in the block, become e^(score − the largest so far); how much all that
 * was summed before shrinks is returned. */
static inline float exponentials(float *scores, int seen, int all, float *largest, float *sum) {
    for (int i = seen; i < up_to(seen, WIDTH); i++) scores[i] = -INFINITY;
    Vector highest[ACROSS], sums[ACROSS] = {0};
    for (int c = 0; c < ACROSS; c++) highest[c] = (Vector){0} - INFINITY;
    for (int i = 0; i < seen; i += WIDTH)
        for (int c = 0; c < ACROSS; c++) highest[c] = larger(LOAD(scores + i + c * LANES), highest[c]);
    for (int c = 1; c < ACROSS; c++) highest[0] = larger(highest[0], highest[c]);
    float now = *largest;
    for (int i = 0; i < LANES; i++) now = highest[0][i] > now ? highest[0][i] : now;
    for (int i = 0; i < seen; i += WIDTH)
        for (int c = 0; c < ACROSS; c++) {
            Vector e = falling(LOAD(scores + i + c * LANES) - now);
            STORE(scores + i + c * LANES, e), sums[c] += e;
        }
    memset(scores + seen, 0, sizeof(float) * (all - seen));
    for (int c = 1; c < ACROSS; c++) sums[0] += sums[c];
    float shrunk = *largest == now ? 1 : expf(*largest - now);
    *largest = now, *sum = *sum * shrunk + total(sums[0]);
    return shrunk;
}

/* How many of a block's keys a query sees. */
static inline int seen_by(const Attention *a, int query, int first_key, int keys) {
    return a->causal ? most(0, least(keys, query + 1 - first_key)) : keys;
}

static void attend_block(const Attention *a, const float *q, const float *kt, const float *v, int first, float *scores,
                         float *out, float *largest, float *sums) {
    int d = a->d_head;
    for (int i = 0; i < QUERIES; i++) largest[i] = -INFINITY, sums[i] = 0;
    int end = a->causal ? least(a->source, first + QUERIES) : a->source;
    for (int key = 0; key < end; key += KEYS) {
        int keys = least(KEYS, end - key), all = up_to(keys, WIDTH);
        for (int j = 0; j < all; j += WIDTH)
            for (int i = 0; i < QUERIES; i += HIGH) {
                if (a->causal && key + j > first + i + HIGH - 1) continue;
                Tile t = {0};
                multiply_add(&t, d, q + (first + i) * d, d, 1, kt + (key + j) * d, WIDTH);
                write_tile(&t, scores + i * KEYS + j, KEYS);
            }
        for (int i = 0; i < QUERIES; i++) {
            float shrunk = exponentials(scores + i * KEYS, seen_by(a, first + i, key, keys), all, largest + i, sums + i);
            if (key && shrunk != 1)
                for (int j = 0; j < d; j += LANES) STORE(out + i * d + j, LOAD(out + i * d + j) * shrunk);
        }
        for (int j = 0; j < d; j += WIDTH)
            for (int i = 0; i < QUERIES; i += HIGH) {
                Tile t = {0};
                multiply_add(&t, seen_by(a, first + i + HIGH - 1, key, keys), scores + i * KEYS, KEYS, 1, v + key * d + j, d);
                key ? add_tile(&t, out + i * d + j, d) : write_tile(&t, out + i * d + j, d);
            }
    }
}

/* A thread's scratch: a head's numbers, and those of a block. */
typedef struct { float *p, *d_s, *q, *d_out, *d_q, *k, *v, *kt, *vt, *d_k, *d_v, *logs, *inner; } Parts;

static int64_t laid_out(Parts *s, int time, int source, int d, float *from) {
    int64_t n = up_to(time, QUERIES), wide = up_to(source, QUERIES) * (int64_t)d, block = QUERIES * KEYS;
    float **parts[] = {&s->p, &s->d_s, &s->q, &s->d_out, &s->d_q, &s->k, &s->v, &s->kt, &s->vt, &s->d_k, &s->d_v, &s->logs, &s->inner};
    int64_t sizes[] = {block, block, n * d, n * d, n * d, wide, wide, wide, wide, wide, wide, n, n}, used = 0;
    for (int i = 0; i < 13; i++) *parts[i] = from + used, used += sizes[i];
    return used;
}

static void attend(void *given, int thread, int threads) {
    const Attention *a = given;
    int d = a->d_head, group = a->heads / a->kv_heads, units = a->batch * a->kv_heads;
    Parts s;
    laid_out(&s, a->time, a->source, d, a->scratch + thread * a->space);
    for (int unit = share(units, thread, threads); unit < share(units, thread + 1, threads); unit++) {
        int row = unit / a->kv_heads, shared = unit % a->kv_heads;
        gather(a->k, row, shared, a->source, d, 1, s.k);
        gather(a->v, row, shared, a->source, d, 1, s.v);
        transpose(s.k, up_to(a->source, QUERIES), d, s.kt);
        for (int head = shared * group; head < (shared + 1) * group; head++) {
            gather(a->q, row, head, a->time, d, a->scale, s.q);
            float *out = s.d_out, *logs = a->log_totals + ((int64_t)row * a->heads + head) * a->time;
            for (int first = 0; first < a->time; first += QUERIES) {
                float largest[QUERIES], sums[QUERIES];
                attend_block(a, s.q, s.kt, s.v, first, s.p, out, largest, sums);
                for (int i = 0; i < least(QUERIES, a->time - first); i++) {
                    float *to = a->out.at + row * a->out.row + head * a->out.head + (first + i) * a->out.place;
                    for (int j = 0; j < d; j += LANES) STORE(to + j, LOAD(out + i * d + j) / sums[i]);
                    logs[first + i] = largest[i] + logf(sums[i]);
                }
            }
        }
    }
}

static inline float inner(const float *a, const float *b, int n) {
    Vector s = {0};
    for (int i = 0; i < n; i += LANES) s += LOAD(a + i) * LOAD(b + i);
    return total(s);
}

/* Probabilities and gradients of scores of a block. */
static void differentiate(const Attention *a, const Parts *s, int first, int key, int keys) {
    int d = a->d_head;
    for (int j = 0; j < up_to(keys, WIDTH); j += WIDTH)
        for (int i = 0; i < QUERIES; i += HIGH) {
            if (a->causal && key + j > first + i + HIGH - 1) continue;
            Tile p = {0}, d_p = {0};
            multiply_add(&p, d, s->q + (first + i) * d, d, 1, s->kt + (key + j) * d, WIDTH);
            multiply_add(&d_p, d, s->d_out + (first + i) * d, d, 1, s->vt + (key + j) * d, WIDTH);
            for (int r = 0; r < HIGH; r++)
                for (int c = 0; c < ACROSS; c++) {
                    p.sums[r][c] = falling(p.sums[r][c] - s->logs[first + i + r]);
                    d_p.sums[r][c] = p.sums[r][c] * (d_p.sums[r][c] - s->inner[first + i + r]);
                }
            write_tile(&p, s->p + i * KEYS + j, KEYS);
            write_tile(&d_p, s->d_s + i * KEYS + j, KEYS);
            for (int r = 0; r < HIGH; r++) {
                int seen = most(0, seen_by(a, first + i + r, key, keys) - j);
                if (first + i + r >= a->time) seen = 0;
                if (seen < WIDTH) {
                    memset(s->p + (i + r) * KEYS + j + seen, 0, sizeof(float) * (WIDTH - seen));
                    memset(s->d_s + (i + r) * KEYS + j + seen, 0, sizeof(float) * (WIDTH - seen));
                }
            }
        }
}

static void return_block(const Attention *a, const Parts *s, int first, int key, int keys) {
    int d = a->d_head;
    differentiate(a, s, first, key, keys);
    for (int j = 0; j < d; j += WIDTH) {
        for (int i = 0; i < up_to(keys, HIGH); i += HIGH) {
            /* queries before the tile's first key see none of it */
            int from = a->causal ? most(0, key + i - first) / HIGH * HIGH : 0;
            if (from >= QUERIES) break;
            Tile t = {0};
            multiply_add(&t, QUERIES - from, s->p + from * KEYS + i, 1, KEYS, s->d_out + (first + from) * d + j, d);
            add_tile(&t, s->d_v + (key + i) * d + j, d);
            t = (Tile){0};
            multiply_add(&t, QUERIES - from, s->d_s + from * KEYS + i, 1, KEYS, s->q + (first + from) * d + j, d);
            add_tile(&t, s->d_k + (key + i) * d + j, d);
        }
        for (int i = 0; i < QUERIES; i += HIGH) {
            Tile t = {0};
            int seen = seen_by(a, first + i + HIGH - 1, key, keys);
            multiply_add(&t, seen, s->d_s + i * KEYS, KEYS, 1, s->k + key * d + j, d);
            add_tile(&t, s->d_q + (first + i) * d + j, d);
        }
    }
}

static void go_back(void *given, int thread, int threads) {
    const Attention *a = given;
    int d = a->d_head, group = a->heads / a->kv_heads, units = a->batch * a->kv_heads;
    int64_t wide = up_to(a->source, QUERIES) * (int64_t)d, high = up_to(a->time, QUERIES) * (int64_t)d;
    Parts s;
    laid_out(&s, a->time, a->source, d, a->scratch + thread * a->space);
    for (int unit = share(units, thread, threads); unit < share(units, thread + 1, threads); unit++) {
        int row = unit / a->kv_heads, shared = unit % a->kv_heads;
        gather(a->k, row, shared, a->source, d, 1, s.k);
        gather(a->v, row, shared, a->source, d, 1, s.v);
        transpose(s.k, wide / d, d, s.kt);
        transpose(s.v, wide / d, d, s.vt);
        memset(s.d_k, 0, sizeof(float) * wide);
        memset(s.d_v, 0, sizeof(float) * wide);
        for (int head = shared * group; head < (shared + 1) * group; head++) {
            gather(a->q, row, head, a->time, d, a->scale, s.q);
            gather(a->d_out, row, head, a->time, d, 1, s.d_out);
            memset(s.d_q, 0, sizeof(float) * high);
            memcpy(s.logs, a->log_totals + ((int64_t)row * a->heads + head) * a->time, sizeof(float) * a->time);
            const float *out = a->out.at + row * a->out.row + head * a->out.head;
            for (int t = 0; t < high / d; t++)
                s.inner[t] = t < a->time ? inner(s.d_out + (int64_t)t * d, out + t * a->out.place, d) : (s.logs[t] = 0);
            for (int key = 0; key < a->source; key += KEYS)
                for (int first = a->causal ? key / QUERIES * QUERIES : 0; first < a->time; first += QUERIES) {
                    int end = a->causal ? least(a->source, first + QUERIES) : a->source;
                    return_block(a, &s, first, key, least(KEYS, end - key));
                }
            scatter(s.d_q, a->time, d, a->scale, a->d_q, row, head);
        }
        scatter(s.d_k, a->source, d, 1, a->d_k, row, shared);
        scatter(s.d_v, a->source, d, 1, a->d_v, row, shared);
    }
}

/* Numbers of scratch that each thread needs. */
int64_t weft_attention_space(int time, int source, int d_head) {
    Parts s;
    return laid_out(&s, time, source, d_head, 0);
}

void weft_attend(Attention *a, int back, int threads) { together(back ? go_back : attend, a, threads); }
