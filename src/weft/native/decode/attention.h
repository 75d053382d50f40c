/* Arguments of a decoder step, and its attention over a paged KV cache: of one token (decode), or of many tokens of one
 * text (prefill). */
#pragma once

#include "gemv.h"
#include "register_tile.h"

#define MAX_D_HEAD 512 /* bounds the buffers on the stack; `native.py` has the same constant */
#define VALUE_BLOCK 64 /* values summed from 0 before they are added to the output: longer sums round more */

enum { NO_QK_NORM, EACH_HEAD, ROTATED_HEADS, ALL_HEADS };

typedef struct { /* RMSNorm, or LayerNorm if `centred`: x → (x − mean) / deviation · (gain + offset) + bias, where gain
                    and bias may be null */
    const float *gain, *bias;
    float eps, offset;
    int32_t centred;
} Norm;

typedef struct { /* mixture of experts (`nn/experts.py`), whose gate_up and down have one matrix per expert */
    int32_t experts, chosen, score, renormalised, weighs_input, groups, kept_groups, best_two;
    float scale, limit, up_offset; /* limit: INFINITY if gates and up projections are not clamped */
    const float *choice_bias; /* (experts), or null */
    Matrix router, shared_gate; /* shared_gate has 0 rows if the shared experts are added as they are */
    const Matrix *gate_up, *down;
} Experts;

typedef struct {
    Norm attention_norm, feedforward_norm, q_norm, k_norm;
    Matrix qkv, out, up, down; /* `up` of a gated layer holds the gate's rows first; beside a mixture, up and down are
                                  those of the shared experts, with 0 rows if there are none */
    const Experts *experts;    /* null in a dense layer */
    float *keys, *values;      /* KV block 0 of each: (kv_heads, block_size, d_head); blocks are `stride` apart */
    const float *cos, *sin;    /* (positions, rotated / 2), or null without rotary positions */
    const float *sinks;        /* (heads), scores that belong to no key, or null */
    int32_t window;            /* tokens, the last of them its own, that a token sees; INT32_MAX: all */
    int32_t rotated, adjacent; /* first coordinates of a head, and whether pairs are adjacent or of the two halves */
} Layer;

typedef struct {
    int32_t layers, d_model, heads, kv_heads, d_head, activation, qk_norm, block_size;
    int32_t d_ff, max_experts, max_chosen, d_expert; /* widest of all layers; the last three are 0 without mixtures */
    int64_t stride;
    float scale, clip, beta, residual_scale; /* of scores; of queries, keys and values, or INFINITY; of SiLU, x · σ(βx);
                                                of each sublayer's output */
    const Layer *layer;
    Norm norm;
    Matrix head; /* 0 rows if there is none */
} Model;

typedef struct { /* consecutive tokens of one text, in consecutive rows */
    int row, count, position; /* row and position of the first token */
    int prefill;              /* whether the step reads more than one token of the text, here or in other spans */
    const int64_t *table;     /* the text's KV blocks */
} TokenSpan;

/* `out` may be x. */
static void normalise(const Norm *norm, const float *x, int n, float *out) {
    float mean = 0;
    if (norm->centred) {
        Vector sum = {0};
        int i = 0;
        for (; i + LANES <= n; i += LANES) sum += LOAD(x + i);
        mean = reduce(sum);
        for (; i < n; i++) mean += x[i];
        mean /= (float)n;
    }
    for (int i = 0; i < n; i++) out[i] = x[i] - mean;
    float tail = 0;
    Vector squares = dot(out, out, n, &tail);
    float factor = 1.0f / sqrtf((tail + reduce(squares)) / (float)n + norm->eps);
    for (int i = 0; i < n; i++) out[i] *= factor;
    for (int i = 0; norm->gain && i < n; i++) out[i] *= norm->gain[i] + norm->offset;
    if (norm->bias)
        for (int i = 0; i < n; i++) out[i] += norm->bias[i];
}

static void apply_rope(const Model *m, const Layer *layer, const float *from, int position, float *to) {
    int half = layer->rotated / 2;
    if (!layer->cos || layer->rotated < m->d_head) memcpy(to, from, 4 * m->d_head);
    if (!layer->cos) return;
    const float *cos = layer->cos + (int64_t)position * half, *sin = layer->sin + (int64_t)position * half;
    for (int i = 0; !layer->adjacent && i < half; i++) {
        to[i] = from[i] * cos[i] - from[i + half] * sin[i];
        to[i + half] = from[i + half] * cos[i] + from[i] * sin[i];
    }
    for (int i = 0; layer->adjacent && i < half; i++) {
        to[2 * i] = from[2 * i] * cos[i] - from[2 * i + 1] * sin[i];
        to[2 * i + 1] = from[2 * i + 1] * cos[i] + from[2 * i] * sin[i];
    }
}

/* The cached vector of a position; `head` is the head's first vector in KV block 0. */
static inline float *cached_vector(const Model *m, float *head, const int64_t *table, int position) {
    return head + table[position / m->block_size] * m->stride + (int64_t)(position % m->block_size) * m->d_head;
}

static inline float clamped(float x, float low, float high) { return x > high ? high : x < low ? low : x; }

/* One head of a row of qkv (heads + 2 kv_heads, d_head): normalise and rotate a query in place, or store a key or a
 * value. */
static void rotate_or_store(
    const Model *m, const Layer *layer, const int64_t *table, int position, int head, float *qkv) {
    int d = m->d_head, kv = head - m->heads;
    float *vector = qkv + head * d, rotated[MAX_D_HEAD];
    for (int i = 0; m->clip < INFINITY && i < d; i++) vector[i] = clamped(vector[i], -m->clip, m->clip);
    if (kv >= m->kv_heads) {
        float *values = layer->values + (int64_t)(kv - m->kv_heads) * m->block_size * d;
        memcpy(cached_vector(m, values, table, position), vector, 4 * d);
        return;
    }
    const Norm *norm = kv < 0 ? &layer->q_norm : &layer->k_norm;
    if (m->qk_norm == EACH_HEAD) normalise(norm, vector, d, vector);
    apply_rope(m, layer, vector, position, rotated);
    if (m->qk_norm == ROTATED_HEADS) normalise(norm, rotated, d, rotated);
    float *keys = layer->keys + (int64_t)kv * m->block_size * d;
    memcpy(kv < 0 ? vector : cached_vector(m, keys, table, position), rotated, 4 * d);
}

/* First position that the token at `position` sees. */
static inline int first_visible(const Layer *layer, int position) {
    return position < layer->window ? 0 : position + 1 - layer->window;
}

/* ---- decode */

typedef struct { /* walks over the cached vectors of one head */
    float *head, *vector;
    const int64_t *table;
    int left; /* vectors left in the current KV block */
} Cursor;

static inline Cursor cursor_at(const Model *m, float *head, const int64_t *table, int position) {
    Cursor cursor = {head, 0, table + position / m->block_size, 0};
    int skipped = position % m->block_size;
    if (skipped) {
        cursor.vector = cached_vector(m, head, table, position);
        cursor.left = m->block_size - skipped, cursor.table++;
    }
    return cursor;
}

static inline float *next_vector(Cursor *cursor, const Model *m) {
    if (!cursor->left) cursor->vector = cursor->head + *cursor->table++ * m->stride, cursor->left = m->block_size;
    float *vector = cursor->vector;
    cursor->vector += m->d_head, cursor->left--;
    return vector;
}

/* out += Σ weights[i] · scale · rows[i], for ROW_GROUP rows or one. */
static inline void accumulate(
    float *restrict out, const float *const *rows, const float *weights, float scale, int count, int d) {
    if (count < ROW_GROUP) {
        for (int j = 0; j < d; j++) out[j] += weights[0] * scale * rows[0][j];
        return;
    }
    const float *a = rows[0], *b = rows[1], *c = rows[2], *e = rows[3];
    float w = weights[0] * scale, x = weights[1] * scale, y = weights[2] * scale, z = weights[3] * scale;
    for (int j = 0; j < d; j++) out[j] = out[j] + w * a[j] + x * b[j] + y * c[j] + z * e[j];
}

/* Attention of the query at `span->position` to all keys that it sees → out (d_head). `scores` has LANES more elements
 * than there are keys. */
static void attend_decode(const Model *m, const Layer *layer, const TokenSpan *span, int head, const float *q,
                          float *scores, float *out) {
    int d = m->d_head, first = first_visible(layer, span->position), before = span->position - first;
    const int64_t at = (int64_t)(head / (m->heads / m->kv_heads)) * m->block_size * d;
    Cursor keys = cursor_at(m, layer->keys + at, span->table, first);
    Cursor values = cursor_at(m, layer->values + at, span->table, first);
    const float *k = cached_vector(m, keys.head, span->table, span->position);
    const float *v = cached_vector(m, values.head, span->table, span->position);
    float max = layer->sinks ? layer->sinks[head] : -INFINITY;
    for (int i = 0; i <= before; i += ROW_GROUP) { /* the last key is repeated to fill the group */
        const float *rows[ROW_GROUP];
        for (int r = 0; r < ROW_GROUP; r++) rows[r] = i + r < before ? next_vector(&keys, m) : k;
        dot_rows(rows, q, d, scores + i);
        for (int r = 0; r < ROW_GROUP; r++) {
            float score = scores[i + r] *= m->scale;
            max = score > max || score != score ? score : max;
        }
    }
    for (int i = before + 1; i < before + 1 + LANES; i++) scores[i] = -INFINITY; /* fills the last vector */
    Vector sum = {0};
    for (int i = 0; i <= before; i += LANES) {
        Vector e = exp_vector(LOAD(scores + i) - max);
        STORE(scores + i, e);
        for (int j = 0; i + j > before - LANES && j < LANES; j++)
            if (i + j > before) e[j] = 0;
        sum += e;
    }
    float total = reduce(sum) + (layer->sinks ? expf(layer->sinks[head] - max) : 0);
    float inverse = 1.0f / total, weight = scores[before] * inverse;
    for (int j = 0; j < d; j++) out[j] = weight * v[j];
    for (int i = 0, count; i < before; i += count) { /* in groups: `out` is read and written once for each */
        const float *rows[ROW_GROUP];
        count = before - i < ROW_GROUP ? 1 : ROW_GROUP;
        for (int r = 0; r < count; r++) rows[r] = next_vector(&values, m);
        accumulate(out, rows, scores + i, inverse, count, d);
    }
}

/* ---- prefill
 *
 * Lanes hold the queries that share keys, of several tokens and heads. Nothing is reduced across lanes, so a query's
 * result does not depend on the other queries. */

/* Tiles of TILE_COLUMNS queries in a span, for each KV head. */
static inline int query_tiles(const Model *m, const TokenSpan *span) {
    return (span->count * (m->heads / m->kv_heads) + TILE_COLUMNS - 1) / TILE_COLUMNS;
}

/* Floats of scratch memory that `attend_prefill` needs for texts of up to `length` tokens. */
static inline int64_t prefill_scratch(const Model *m, int64_t length) {
    return (length + 2 * (int64_t)m->d_head + TILE_ROWS) * TILE_COLUMNS;
}

/* TILE_ROWS consecutive keys: in place, or copied where they span KV blocks or reach beyond `end`. */
static inline const float *gather_keys(const Model *m, float *head, const int64_t *table, int position, int end,
                                       float *copy) {
    if (m->block_size - position % m->block_size >= TILE_ROWS && position + TILE_ROWS <= end)
        return cached_vector(m, head, table, position);
    for (int r = 0; r < TILE_ROWS; r++) {
        int key = position + r < end ? position + r : end - 1;
        memcpy(copy + r * m->d_head, cached_vector(m, head, table, key), 4 * m->d_head);
    }
    return copy;
}

typedef struct { /* the queries of a tile, one in each lane */
    IntVector position[TILE_VECTORS], before[TILE_VECTORS]; /* its own, and the last one that it does not see, or −1 */
    Vector sink[TILE_VECTORS];                              /* −INFINITY without sinks */
} TileQueries;

/* Replace scores (keys from `begin` to `end`, TILE_COLUMNS) by e^(score − max) and sum them, of the keys that a query
 * sees. */
static void exponentiate(float *scores, int begin, int end, const TileQueries *queries, int sinks, Vector *sums) {
    Vector max[TILE_VECTORS];
    for (int c = 0; c < TILE_VECTORS; c++) max[c] = queries->sink[c], sums[c] = (Vector){0};
    for (int key = begin; key < end; key++)
        for (int c = 0; c < TILE_VECTORS; c++) {
            Vector score = LOAD(scores + (key - begin) * TILE_COLUMNS + c * LANES);
            IntVector seen = (queries->position[c] >= key) & (queries->before[c] < key);
            max[c] = max_lanes(select_lanes(seen, score, max[c]), max[c]);
        }
    for (int key = begin; key < end;) {
        Vector block[TILE_VECTORS] = {0};
        for (int last = key + VALUE_BLOCK < end ? key + VALUE_BLOCK : end; key < last; key++)
            for (int c = 0; c < TILE_VECTORS; c++) {
                float *at = scores + (key - begin) * TILE_COLUMNS + c * LANES;
                Vector e = exp_nonpositive(LOAD(at) - max[c]);
                IntVector seen = (queries->position[c] >= key) & (queries->before[c] < key);
                e = (Vector)(seen & (IntVector)e);
                STORE(at, e);
                block[c] += e;
            }
        for (int c = 0; c < TILE_VECTORS; c++) sums[c] += block[c];
    }
    for (int c = 0; sinks && c < TILE_VECTORS; c++) sums[c] += exp_nonpositive(queries->sink[c] - max[c]);
}

typedef struct { const float *values; int count; } ValueRun; /* contiguous cached values */

/* out (TILE_COLUMNS, d_head) += values of the keys [key, end), at most VALUE_BLOCK, weighted by `weights`. */
static void add_values(const Model *m, float *head, const int64_t *table, int key, int end, const float *weights,
                       float *out) {
    ValueRun runs[VALUE_BLOCK];
    int d = m->d_head, count = 0, tiled = d / TILE_COLUMNS * TILE_COLUMNS;
    for (int at = key, length; at < end; at += length) {
        length = m->block_size - at % m->block_size < end - at ? m->block_size - at % m->block_size : end - at;
        runs[count++] = (ValueRun){cached_vector(m, head, table, at), length};
    }
    for (int j = 0; j < tiled; j += TILE_COLUMNS)
        for (int i = 0; i < TILE_COLUMNS; i += TILE_ROWS) {
            Tile t = {0};
            const float *from = weights + i;
            for (int p = 0; p < count; from += runs[p++].count * TILE_COLUMNS)
                multiply_add(&t, runs[p].count, from, 1, TILE_COLUMNS, runs[p].values + j, d);
            add_tile(&t, out + i * d + j, d);
        }
    for (int p = 0; tiled < d && p < count; p++)
        for (int k = 0; k < runs[p].count; k++, weights += TILE_COLUMNS)
            for (int i = 0; i < TILE_COLUMNS; i++)
                for (int j = tiled; j < d; j++) out[i * d + j] += weights[i] * runs[p].values[k * d + j];
}

/* Attention of one tile of the queries (span->count, heads / kv_heads) that share a KV head. `qkv` and `mixed` begin at
 * the span's first row. */
static void attend_prefill(const Model *m, const Layer *layer, const TokenSpan *span, int kv, int tile,
                           const float *qkv, float *scratch, float *mixed) {
    int d = m->d_head, groups = m->heads / m->kv_heads, first = tile * TILE_COLUMNS;
    int queries = span->count * groups - first, width = (m->heads + 2 * m->kv_heads) * d;
    float *transposed = scratch, *out = transposed + d * TILE_COLUMNS, *scores = out + d * TILE_COLUMNS;
    float copy[TILE_ROWS * MAX_D_HEAD], *keys = layer->keys + (int64_t)kv * m->block_size * d;
    float *values = layer->values + (int64_t)kv * m->block_size * d;
    TileQueries lanes;
    Vector sums[TILE_VECTORS];
    queries = queries < TILE_COLUMNS ? queries : TILE_COLUMNS;
    for (int i = 0; i < TILE_COLUMNS; i++) { /* the last query is repeated to fill the tile */
        int query = first + (i < queries ? i : queries - 1);
        const float *q = qkv + (int64_t)(query / groups) * width + (kv * groups + query % groups) * d;
        for (int j = 0; j < d; j++) transposed[j * TILE_COLUMNS + i] = q[j] * m->scale;
        int position = span->position + query / groups, head = kv * groups + query % groups;
        lanes.position[i / LANES][i % LANES] = position;
        lanes.before[i / LANES][i % LANES] = first_visible(layer, position) - 1;
        lanes.sink[i / LANES][i % LANES] = layer->sinks ? layer->sinks[head] : -INFINITY;
    }
    int end = span->position + (first + queries - 1) / groups + 1;
    /* a multiple of VALUE_BLOCK: values are summed in the same blocks, whichever queries share a tile */
    int begin = first_visible(layer, span->position + first / groups) / VALUE_BLOCK * VALUE_BLOCK;
    for (int key = begin; key < end; key += TILE_ROWS) {
        Tile t = {0};
        multiply_add(&t, d, gather_keys(m, keys, span->table, key, end, copy), d, 1, transposed, TILE_COLUMNS);
        store_tile(&t, scores + (int64_t)(key - begin) * TILE_COLUMNS, TILE_COLUMNS);
    }
    exponentiate(scores, begin, end, &lanes, layer->sinks != 0, sums);
    memset(out, 0, sizeof(float) * d * TILE_COLUMNS);
    for (int key = begin; key < end; key += VALUE_BLOCK) {
        int block_end = key + VALUE_BLOCK < end ? key + VALUE_BLOCK : end;
        const float *weights = scores + (int64_t)(key - begin) * TILE_COLUMNS;
        add_values(m, values, span->table, key, block_end, weights, out);
    }
    for (int i = 0; i < queries; i++) {
        int query = first + i;
        float *to = mixed + ((int64_t)(query / groups) * m->heads + kv * groups + query % groups) * d;
        float inverse = 1.0f / sums[i / LANES][i % LANES];
        for (int j = 0; j < d; j++) to[j] = out[i * d + j] * inverse;
    }
}
