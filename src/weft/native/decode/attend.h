/* What a step is given, and its attention: of one token at the end of a text, or of many tokens of it at once. */
#pragma once

#include "products.h"
#include "register_tile.h"

#define KEYS 64 /* whose values are summed up by themselves first: sums that go on for longer round more */

typedef struct { /* RMSNorm, or LayerNorm where `centred`: x → (x − mean) / deviation · (gain + offset) + bias */
    const float *gain, *bias;
    float eps, offset;
    int32_t centred;
} Norm;

typedef struct {
    Norm attention_norm, feedforward_norm;
    Matrix qkv, out, up, down; /* up: of a gated layer, the gate's rows first */
    float *keys, *values;      /* a block of each: (kv_heads, block, d_head); the next is `stride` further on */
} Layer;

typedef struct {
    int32_t layers, d_model, heads, kv_heads, d_head, d_ff, gated, activation, block;
    int64_t stride;
    float scale;
    const float *cos, *sin; /* (places, d_head / 2), or none: nothing is rotated */
    const Layer *layer;
    Norm norm;
    Matrix head; /* 0 rows: there is none */
} Model;

typedef struct { /* tokens of a text, in rows that stand side by side; its keys and values are in the blocks of a table */
    int first, count, place; /* row and place of the first one */
    int many;                /* whether the text has more than one, in these rows or in others */
    const int64_t *table;
} Run;

static void rotate(const Model *m, const float *from, int place, float *to) {
    int half = m->d_head / 2;
    if (!m->cos) {
        memcpy(to, from, 4 * m->d_head);
        return;
    }
    const float *cos = m->cos + (int64_t)place * half, *sin = m->sin + (int64_t)place * half;
    for (int i = 0; i < half; i++) {
        to[i] = from[i] * cos[i] - from[i + half] * sin[i];
        to[i + half] = from[i + half] * cos[i] + from[i] * sin[i];
    }
}

/* Where the vector of a place is; `of` is the head's in the first block. */
static inline float *vector_at(const Model *m, float *of, const int64_t *table, int place) {
    return of + table[place / m->block] * m->stride + (int64_t)(place % m->block) * m->d_head;
}

/* One of the heads of a row, (heads + 2 kv_heads, d_head): queries are rotated, keys and values are stored. */
static void put(const Model *m, const Layer *layer, const int64_t *table, int place, int head, float *qkv) {
    int d = m->d_head, kv = head - m->heads;
    float *vector = qkv + head * d, rotated[512];
    if (kv >= m->kv_heads) {
        float *values = layer->values + (int64_t)(kv - m->kv_heads) * m->block * d;
        memcpy(vector_at(m, values, table, place), vector, 4 * d);
        return;
    }
    rotate(m, vector, place, rotated);
    memcpy(kv < 0 ? vector : vector_at(m, layer->keys + (int64_t)kv * m->block * d, table, place), rotated, 4 * d);
}

/* ---- one token */

typedef struct { /* the vectors of a text's head, from its first block on */
    float *first, *vector;
    const int64_t *table;
    int left;
} Vectors;

static inline float *next(Vectors *of, const Model *m) {
    if (!of->left) of->vector = of->first + *of->table++ * m->stride, of->left = m->block;
    float *found = of->vector;
    of->vector += m->d_head, of->left--;
    return found;
}

/* Add values (count, d), of which each has a weight, one after the other. */
static inline void mix(float *restrict out, const float *const *rows, const float *weights, float scale, int count, int d) {
    if (count < ROWS) {
        for (int j = 0; j < d; j++) out[j] += weights[0] * scale * rows[0][j];
        return;
    }
    const float *a = rows[0], *b = rows[1], *c = rows[2], *e = rows[3];
    float w = weights[0] * scale, x = weights[1] * scale, y = weights[2] * scale, z = weights[3] * scale;
    for (int j = 0; j < d; j++) out[j] = out[j] + w * a[j] + x * b[j] + y * c[j] + z * e[j];
}

/* A query with all keys up to its place → out (d_head). scores: LANES more than there are keys. */
static void attend(const Model *m, const Layer *layer, const Run *run, int head, const float *q, float *scores, float *out) {
    int d = m->d_head, place = run->place;
    const int64_t inside = (int64_t)(head / (m->heads / m->kv_heads)) * m->block * d;
    Vectors keys = {layer->keys + inside, 0, run->table, 0}, values = {layer->values + inside, 0, run->table, 0};
    const float *k = vector_at(m, keys.first, run->table, place), *v = vector_at(m, values.first, run->table, place);
    float most = -INFINITY;
    for (int i = 0; i <= place; i += ROWS) { /* the last ones are those of this place, again and again */
        const float *rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = i + r < place ? next(&keys, m) : k;
        dots(rows, q, d, scores + i);
        for (int r = 0; r < ROWS; r++) {
            float score = scores[i + r] *= m->scale;
            most = score > most || score != score ? score : most;
        }
    }
    for (int i = place + 1; i < place + 1 + LANES; i++) scores[i] = -INFINITY; /* the last vector is not full */
    Vector sum = {0};
    for (int i = 0; i <= place; i += LANES) {
        Vector e = exponential(LOAD(scores + i) - most);
        STORE(scores + i, e);
        for (int j = 0; i + j > place - LANES && j < LANES; j++)
            if (i + j > place) e[j] = 0;
        sum += e;
    }
    float inverse = 1.0f / total(sum), weight = scores[place] * inverse;
    for (int j = 0; j < d; j++) out[j] = weight * v[j];
    for (int i = 0, count; i < place; i += count) { /* a few values at a time: `out` is read and written once for them */
        const float *rows[ROWS];
        count = place - i < ROWS ? 1 : ROWS;
        for (int r = 0; r < count; r++) rows[r] = next(&values, m);
        mix(out, rows, scores + i, inverse, count, d);
    }
}

/* ---- many
 *
 * The queries that look at the same keys, of several tokens and heads, stand in lanes: nothing is summed across them, and
 * what a query gets does not depend on the others. */

static inline int tiles_of(const Model *m, const Run *run) {
    return (run->count * (m->heads / m->kv_heads) + WIDTH - 1) / WIDTH;
}

/* Numbers of scratch for texts of up to so many tokens. */
static inline int64_t scratch_of(const Model *m, int64_t longest) {
    return (longest + 2 * (int64_t)m->d_head + HIGH) * WIDTH;
}

/* HIGH keys from a place on; where they don't lie side by side, or end before, together in `copied`. */
static inline const float *some_keys(const Model *m, float *of, const int64_t *table, int place, int last, float *copied) {
    if (m->block - place % m->block >= HIGH && place + HIGH <= last) return vector_at(m, of, table, place);
    for (int r = 0; r < HIGH; r++)
        memcpy(copied + r * m->d_head, vector_at(m, of, table, place + r < last ? place + r : last - 1), 4 * m->d_head);
    return copied;
}

/* Scores (last, WIDTH) become probabilities but for their sums. A query sees the keys up to its own place. */
static void exponentials(float *scores, int last, const Integers *places, Vector *sums) {
    Vector most[ACROSS];
    for (int c = 0; c < ACROSS; c++) most[c] = (Vector){0} - INFINITY, sums[c] = (Vector){0};
    for (int key = 0; key < last; key++)
        for (int c = 0; c < ACROSS; c++) {
            Integers seen = places[c] >= key;
            Vector score = LOAD(scores + key * WIDTH + c * LANES);
            most[c] = larger((Vector)((seen & (Integers)score) | (~seen & (Integers)most[c])), most[c]);
        }
    for (int key = 0; key < last;) {
        Vector some[ACROSS] = {0};
        for (int end = key + KEYS < last ? key + KEYS : last; key < end; key++)
            for (int c = 0; c < ACROSS; c++) {
                Vector e = falling(LOAD(scores + key * WIDTH + c * LANES) - most[c]);
                e = (Vector)((places[c] >= key) & (Integers)e);
                STORE(scores + key * WIDTH + c * LANES, e);
                some[c] += e;
            }
        for (int c = 0; c < ACROSS; c++) sums[c] += some[c];
    }
}

typedef struct { const float *values; int count; } Part;

/* Values of the keys from `key` to before `end`, at most KEYS, times their probabilities, added to out (WIDTH, d_head). */
static void add_values(const Model *m, float *of, const int64_t *table, int key, int end, const float *scores, float *out) {
    Part parts[KEYS];
    int d = m->d_head, count = 0, whole = d / WIDTH * WIDTH;
    for (int at = key, some; at < end; at += some) {
        some = m->block - at % m->block < end - at ? m->block - at % m->block : end - at;
        parts[count++] = (Part){vector_at(m, of, table, at), some};
    }
    for (int j = 0; j < whole; j += WIDTH)
        for (int i = 0; i < WIDTH; i += HIGH) {
            Tile t = {0};
            const float *weights = scores + i;
            for (int p = 0; p < count; weights += parts[p++].count * WIDTH)
                multiply_add(&t, parts[p].count, weights, 1, WIDTH, parts[p].values + j, d);
            add_tile(&t, out + i * d + j, d);
        }
    for (int p = 0; whole < d && p < count; p++)
        for (int k = 0; k < parts[p].count; k++, scores += WIDTH)
            for (int i = 0; i < WIDTH; i++)
                for (int j = whole; j < d; j++) out[i * d + j] += scores[i] * parts[p].values[k * d + j];
}

/* A tile of the queries of rows (run->count, heads / kv_heads) of qkv, which is a run's first row, that share a head of
 * keys → mixed, likewise. */
static void attend_together(const Model *m, const Layer *layer, const Run *run, int kv, int tile, const float *qkv,
                            float *scratch, float *mixed) {
    int d = m->d_head, groups = m->heads / m->kv_heads, first = tile * WIDTH, queries = run->count * groups - first;
    int width = (m->heads + 2 * m->kv_heads) * d;
    float *turned = scratch, *out = turned + d * WIDTH, *scores = out + d * WIDTH, copied[HIGH * 512];
    float *keys = layer->keys + (int64_t)kv * m->block * d, *values = layer->values + (int64_t)kv * m->block * d;
    Integers places[ACROSS];
    Vector sums[ACROSS];
    queries = queries < WIDTH ? queries : WIDTH;
    for (int i = 0; i < WIDTH; i++) { /* the last one again and again, where there are too few */
        int query = first + (i < queries ? i : queries - 1);
        const float *q = qkv + (int64_t)(query / groups) * width + (kv * groups + query % groups) * d;
        for (int j = 0; j < d; j++) turned[j * WIDTH + i] = q[j] * m->scale;
        places[i / LANES][i % LANES] = run->place + query / groups;
    }
    int last = run->place + (first + queries - 1) / groups + 1;
    for (int key = 0; key < last; key += HIGH) {
        Tile t = {0};
        multiply_add(&t, d, some_keys(m, keys, run->table, key, last, copied), d, 1, turned, WIDTH);
        write_tile(&t, scores + (int64_t)key * WIDTH, WIDTH);
    }
    exponentials(scores, last, places, sums);
    memset(out, 0, sizeof(float) * d * WIDTH);
    for (int key = 0; key < last; key += KEYS)
        add_values(m, values, run->table, key, key + KEYS < last ? key + KEYS : last, scores + (int64_t)key * WIDTH, out);
    for (int i = 0; i < queries; i++) {
        int query = first + i;
        float *to = mixed + ((int64_t)(query / groups) * m->heads + kv * groups + query % groups) * d;
        float inverse = 1.0f / sums[i / LANES][i % LANES];
        for (int j = 0; j < d; j++) to[j] = out[i * d + j] * inverse;
    }
}
