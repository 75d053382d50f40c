/* A decoder's step on a CPU, for one or more tokens of each of several texts, and the matrix products it consists of.
 *
 * A step of a small model is bound by the number of operations and by how fast weights come from memory. Here it is one
 * call: each thread computes its rows of every matrix for all tokens while these rows are in cache, and threads meet at
 * a few barriers per layer. Weights are float32, bf16, or int8 or int4 with scales (`quantized_weights.py`). With
 * integer weights, activations are quantised to int8 in blocks of 32 with one scale each. Every row of a product is
 * summed by one thread in a fixed order: results depend neither on the number of threads nor on the other texts.
 *
 * Compiled and called by `native.py`. */
#include "experts.h"
#include "gemm.h"
#include "logsumexp.h"
#include "threads.h"

#define X_TILE 64     /* rows of x that are multiplied by a row of weights while it is in the L1 cache */
#define STEP_ROWS 128 /* tokens that go through all layers together, so that activations stay in the L2 cache */

enum { RELU, SILU, GELU, GELU_TANH, RELU2 };

typedef struct { int first, last; } Range; /* [first, last) */

/* A thread's share of `rows` rows of a matrix, in whole groups of rows that are multiplied together. */
static inline Range own_rows(const Matrix *m, int rows, int thread, int threads) {
    int size = group_rows(m), groups = (rows + size - 1) / size;
    int last = share_start(groups, thread + 1, threads) * size;
    Range range = {share_start(groups, thread, threads) * size, last < rows ? last : rows};
    return range;
}

/* ---- a single matrix product, summed as in a decoder's step */

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y;
    int rows;
    QuantisedRows quantised;
} Product;

static void multiply(void *argument, int thread, int threads) {
    Product *p = argument;
    const Matrix *m = p->matrix;
    int n = m->columns, integer = m->dtype >= INT8;
    if (integer)
        for (int r = share_start(p->rows, thread, threads); r < share_start(p->rows, thread + 1, threads); r++)
            quantise_row(p->x + (int64_t)r * n, n, from_row(p->quantised, r, n));
    barrier_wait(&pool.inside, threads);
    Range own = own_rows(m, m->rows, thread, threads);
    for (int tile = 0; tile < p->rows; tile += X_TILE) {
        int count = p->rows - tile < X_TILE ? p->rows - tile : X_TILE;
        QuantisedRows quantised = integer ? from_row(p->quantised, tile, n) : p->quantised;
        multiply_rows(m, own.first, own.last, p->x + (int64_t)tile * n, quantised, count,
                      p->y + (int64_t)tile * m->rows, m->rows);
    }
}

static QuantisedRows allocate_quantised(int64_t rows, int columns) {
    int64_t blocks = rows * (columns / BLOCK);
    size_t size = 4 * blocks + 4;
    QuantisedRows q = {malloc(rows * columns + 1), malloc(size), malloc(size), malloc(size)};
    return q;
}

static void free_quantised(QuantisedRows q) { free(q.values), free(q.scales), free(q.offsets), free(q.sums); }

static int allocation_failed(QuantisedRows q) { return !q.values || !q.scales || !q.offsets || !q.sums; }

/* y (rows, matrix rows) = x (rows, columns) times the matrix transposed, plus its bias. Returns non-zero if out of
 * memory. */
int weft_multiply(const Matrix *matrix, const float *x, float *y, int rows, int threads) {
    Product p = {matrix, x, y, rows, {0}};
    if (matrix->dtype >= INT8) {
        p.quantised = allocate_quantised(rows, matrix->columns);
        if (allocation_failed(p.quantised)) {
            free_quantised(p.quantised);
            return 1;
        }
    }
    run_parallel(multiply, &p, threads);
    free_quantised(p.quantised);
    return 0;
}

/* ---- GEMM in float32 */

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y, *packed;
    Vector *sums; /* of GEMM_TILES tiles for each thread */
    int rows, claim;
    atomic_int panel, ready, tile; /* next unclaimed panel, packed panels, next unclaimed tile */
} Gemm;

/* Threads claim small pieces of work, so that one which loses its core delays the others little. */
static void multiply_gemm(void *argument, int thread, int threads) {
    Gemm *p = argument;
    const Matrix *m = p->matrix;
    int n = m->columns, full = packed_rows(p->rows), panels = (full + X_PANEL - 1) / X_PANEL;
    (void)threads;
    for (int i; (i = atomic_fetch_add(&p->panel, 1)) < panels; atomic_fetch_add(&p->ready, 1)) {
        int first = i * X_PANEL, width = full - first < X_PANEL ? full - first : X_PANEL, rows = p->rows - first;
        pack_panel(p->x + (int64_t)first * n, rows < width ? rows : width, n, width, p->packed + (int64_t)first * n);
    }
    for (int tries = 0; atomic_load(&p->ready) < panels; tries++) spin(tries);
    int tiles = (m->rows + GEMM_ROWS - 1) / GEMM_ROWS;
    Vector *sums = p->sums + (int64_t)thread * GEMM_TILES * tile_sums(p->rows);
    for (int i; (i = atomic_fetch_add(&p->tile, p->claim)) < tiles;)
        for (int end = i + p->claim < tiles ? i + p->claim : tiles, next; i < end; i = next) {
            next = i + GEMM_TILES < end ? i + GEMM_TILES : end;
            gemm_tiles(m, i, next, p->x, p->packed, p->rows, sums, p->y);
        }
}

/* `weft_multiply` of a float32 matrix that has at least GEMM_ROWS rows and a multiple of 16 columns: faster for many
 * rows of x, but how a row is summed depends on their number. Returns non-zero if out of memory. */
int weft_gemm(const Matrix *matrix, const float *x, float *y, int rows, int threads) {
    float *packed = aligned_alloc(64, 4 * ((int64_t)packed_rows(rows) + 1) * matrix->columns);
    Vector *sums = aligned_alloc(64, (int64_t)threads * GEMM_TILES * tile_sums(rows) * sizeof *sums);
    int failed = !packed || !sums;
    int half_share = matrix->rows / GEMM_ROWS / (2 * threads); /* tiles */
    int claim = half_share < 1 ? 1 : half_share < 64 / GEMM_ROWS ? half_share : 64 / GEMM_ROWS;
    Gemm p = {matrix, x, y, packed, sums, rows, claim, 0, 0, 0};
    if (!failed) run_parallel(multiply_gemm, &p, threads);
    free(packed), free(sums);
    return failed;
}

/* ---- a decoder's step */

#define MIN_SHARED_ROWS 4 /* from this many rows on, threads divide their preparation, at the cost of a barrier */

typedef struct { /* the next counts[i] tokens of text i, from positions[i] on, with the KV blocks tables[i] */
    int32_t texts, table_width;
    const int64_t *counts, *positions, *tables; /* (texts), (texts), (texts, table_width) */
} Batch;

typedef struct {
    const Model *model;
    int rows, spans;
    const TokenSpan *span;
    float *x, *qkv, *mixed, *hidden; /* (rows, …) */
    float *scores, *weights, *shared_weight;  /* of a mixture: (rows, 2 · experts), (rows, chosen), (rows) */
    int32_t *numbers;                         /* (rows, chosen) */
    float *gathered, *expert_hidden;          /* (rows · chosen, …), sorted by expert */
    QuantisedRows quantised_choices;          /* (rows · chosen, …) */
    float *scratch;                  /* (threads, scratch_size) */
    int64_t scratch_size;
    float *normalised;        /* (threads, rows, d_model) */
    QuantisedRows *quantised; /* (rows, …) for each thread */
    float *result;
    int logits;
} Step;

typedef struct { /* rows that a matrix is multiplied by: float32, and quantised if the matrix is integer */
    const float *x;
    QuantisedRows quantised;
} Activations;

static Activations prepare(Step *s, const Matrix *m, const Norm *norm, const float *x, int thread, int threads) {
    int shared = s->rows >= MIN_SHARED_ROWS, n = m->columns, buffer = shared ? 0 : thread;
    int first = shared ? share_start(s->rows, thread, threads) : 0;
    int last = shared ? share_start(s->rows, thread + 1, threads) : s->rows;
    if (norm) {
        float *out = s->normalised + (int64_t)buffer * s->rows * n;
        for (int r = first; r < last; r++) normalise(norm, x + (int64_t)r * n, n, out + (int64_t)r * n);
        x = out;
    }
    for (int r = first; m->dtype >= INT8 && r < last; r++)
        quantise_row(x + (int64_t)r * n, n, from_row(s->quantised[buffer], r, n));
    if (shared) barrier_wait(&pool.inside, threads);
    return (Activations){x, s->quantised[buffer]};
}

static inline float activate_one(float x, int kind) {
    switch (kind) {
    case RELU: return x > 0 || x != x ? x : 0;
    case RELU2: return x > 0 || x != x ? x * x : 0;
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    default: return x;
    }
}

/* x σ(z): SiLU with β, and GELU's tanh approximation, since 0.5 (1 + tanh(z / 2)) = σ(z). */
static inline Vector times_sigmoid(Vector x, int kind, float beta) {
    Vector z = kind == SILU ? beta * x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_vector(-z));
}

/* Apply an activation in place. */
static void activate(float *x, int n, int kind, float beta) {
    int i = 0;
    if (kind == SILU || kind == GELU_TANH) {
        for (; i + LANES <= n; i += LANES) STORE(x + i, times_sigmoid(LOAD(x + i), kind, beta));
        Vector last = {0};
        memcpy(&last, x + i, 4 * (n - i));
        last = times_sigmoid(last, kind, beta);
        memcpy(x + i, &last, 4 * (n - i));
        return;
    }
    for (; i < n; i++) x[i] = activate_one(x[i], kind);
}

/* A thread's share of all heads: single heads of texts that decode one token, tiles of queries of the others. */
static void attend_all(Step *s, const Layer *layer, int thread, int threads) {
    const Model *m = s->model;
    int row_heads = m->heads + 2 * m->kv_heads, width = row_heads * m->d_head, heads = s->rows * row_heads, units = 0;
    float *scratch = s->scratch + thread * s->scratch_size;
    Range own = {share_start(heads, thread, threads), share_start(heads, thread + 1, threads)};
    if (m->qk_norm == ALL_HEADS) {
        int queries = m->heads * m->d_head, keys = m->kv_heads * m->d_head;
        for (int r = thread; r < s->rows; r += threads) {
            float *q = s->qkv + (int64_t)r * width, *k = q + queries;
            normalise(&layer->q_norm, q, queries, q), normalise(&layer->k_norm, k, keys, k);
        }
        barrier_wait(&pool.inside, threads);
    }
    for (int i = 0; i < s->spans; i++) {
        const TokenSpan *span = s->span + i;
        units += span->prefill ? m->kv_heads * query_tiles(m, span) : m->heads;
        for (int r = 0; r < span->count; r++) {
            int first = (span->row + r) * row_heads, end = first + row_heads, last = own.last < end ? own.last : end;
            float *qkv = s->qkv + (int64_t)(span->row + r) * width;
            for (int head = own.first > first ? own.first : first; head < last; head++)
                rotate_or_store(m, layer, span->table, span->position + r, head - first, qkv);
        }
    }
    barrier_wait(&pool.inside, threads);
    own = (Range){share_start(units, thread, threads), share_start(units, thread + 1, threads)};
    for (int i = 0, unit = 0; i < s->spans; i++) {
        const TokenSpan *span = s->span + i;
        const float *qkv = s->qkv + (int64_t)span->row * width;
        float *mixed = s->mixed + (int64_t)span->row * m->heads * m->d_head;
        int tiles = query_tiles(m, span), count = span->prefill ? m->kv_heads * tiles : m->heads;
        int first = own.first > unit ? own.first - unit : 0, last = own.last - unit < count ? own.last - unit : count;
        for (int at = first; at < last; at++)
            if (span->prefill)
                attend_prefill(m, layer, span, at / tiles, at % tiles, qkv, scratch, mixed);
            else
                attend_decode(m, layer, span, at, qkv + at * m->d_head, scratch, mixed + at * m->d_head);
        unit += count;
    }
}

/* y = x times a thread's share of the rows. */
static void multiply_own(Step *s, const Matrix *m, Activations x, float *y, int thread, int threads) {
    Range own = own_rows(m, m->rows, thread, threads);
    multiply_rows(m, own.first, own.last, x.x, x.quantised, s->rows, y, m->rows);
}

/* y += x and y *= x. The size of a full panel is known at compile time. */
static inline void add_to(float *restrict y, const float *restrict x, int n) {
    if (n == PANEL_ROWS)
        for (int i = 0; i < PANEL_ROWS; i++) y[i] += x[i];
    else
        for (int i = 0; i < n; i++) y[i] += x[i];
}

static inline void multiply_by(float *restrict y, const float *restrict x, int n) {
    if (n == PANEL_ROWS)
        for (int i = 0; i < PANEL_ROWS; i++) y[i] *= x[i];
    else
        for (int i = 0; i < n; i++) y[i] *= x[i];
}

/* The residual stream += x times a thread's share of the rows. Row i of x belongs to the token to[i] and has the factor
 * weights[i]; without them, to token i, and 1. */
static void add_own(Step *s, const Matrix *m, Activations x, int rows, const int32_t *to, const float *weights,
                    int thread, int threads) {
    float scale = s->model->residual_scale;
    Range own = own_rows(m, m->rows, thread, threads);
    float sums[MAX_BATCH][PANEL_ROWS];
    for (int row = own.first, end; row < own.last; row = end) {
        end = group_end(m, row, own.last);
        for (int t = 0, count; t < rows; t += count) {
            count = multiply_group(m, row, end, x.x, x.quantised, t, rows, sums);
            for (int k = 0; k < count; k++) {
                float factor = weights ? scale * weights[t + k] : scale;
                for (int i = 0; factor != 1 && i < end - row; i++) sums[k][i] *= factor;
                add_to(s->x + (int64_t)(to ? to[t + k] : t + k) * m->rows + row, sums[k], end - row);
            }
        }
    }
}

/* A thread's share of the hidden values (rows, d_ff) of a feed-forward layer: f(x W_up), or f(x W_gate) · x W_up. In a
 * mixture, both products are clamped, and the second one is shifted; `e` is null in a dense layer. */
static void feed_forward(const Model *m, const Experts *e, const Matrix *up, int d_ff, Activations x, int rows,
                         float *hidden, int thread, int threads) {
    Range own = own_rows(up, d_ff, thread, threads);
    int bounded = e && (e->limit < INFINITY || e->up_offset != 0), width = own.last - own.first;
    multiply_rows(up, own.first, own.last, x.x, x.quantised, rows, hidden, d_ff);
    for (int t = 0; t < rows; t++) {
        float *gate = hidden + (int64_t)t * d_ff + own.first;
        for (int i = 0; bounded && i < width; i++) gate[i] = clamped(gate[i], -INFINITY, e->limit);
        activate(gate, width, m->activation, m->beta);
    }
    float sums[MAX_BATCH][PANEL_ROWS];
    for (int row = d_ff + own.first, end; up->rows > d_ff && row < d_ff + own.last; row = end) {
        end = group_end(up, row, d_ff + own.last);
        for (int t = 0, count; t < rows; t += count) {
            count = multiply_group(up, row, end, x.x, x.quantised, t, rows, sums);
            for (int k = 0; k < count; k++) {
                for (int i = 0; bounded && i < end - row; i++)
                    sums[k][i] = clamped(sums[k][i], -e->limit, e->limit) + e->up_offset;
                multiply_by(hidden + (int64_t)(t + k) * d_ff + row - d_ff, sums[k], end - row);
            }
        }
    }
}

static void dense(Step *s, const Layer *layer, int thread, int threads) {
    const Model *m = s->model;
    Activations h = prepare(s, &layer->up, &layer->feedforward_norm, s->x, thread, threads);
    feed_forward(m, 0, &layer->up, layer->down.columns, h, s->rows, s->hidden, thread, threads);
    barrier_wait(&pool.inside, threads);
    h = prepare(s, &layer->down, 0, s->hidden, thread, threads);
    add_own(s, &layer->down, h, s->rows, 0, 0, thread, threads);
}

/* A thread's share of the rows of x (rows, m->columns), quantised if the matrix is integer. */
static Activations prepare_choices(Step *s, const Matrix *m, const float *x, int rows, int thread, int threads) {
    int first = share_start(rows, thread, threads), last = share_start(rows, thread + 1, threads);
    for (int i = first; m->dtype >= INT8 && i < last; i++)
        quantise_row(x + (int64_t)i * m->columns, m->columns, from_row(s->quantised_choices, i, m->columns));
    barrier_wait(&pool.inside, threads);
    return (Activations){x, s->quantised_choices};
}

static inline Activations choices_from(Activations all, int row, int columns) {
    return (Activations){all.x + (int64_t)row * columns, from_row(all.quantised, row, columns)};
}

/* Router, shared experts, and the chosen experts, each of which multiplies its tokens together. */
static void mixture(Step *s, const Layer *layer, int thread, int threads) {
    const Model *m = s->model;
    const Experts *e = layer->experts;
    int shared = layer->up.rows > 0, d = m->d_model, chosen = s->rows * e->chosen, d_ff = e->down->columns;
    Activations h = prepare(s, shared ? &layer->up : &e->router, &layer->feedforward_norm, s->x, thread, threads);
    Range own = own_rows(&e->router, e->experts, thread, threads);
    multiply_rows(&e->router, own.first, own.last, h.x, h.quantised, s->rows, s->scores, e->experts);
    if (shared)
        feed_forward(m, 0, &layer->up, layer->down.columns, h, s->rows, s->hidden, thread, threads);
    barrier_wait(&pool.inside, threads);
    float *ranked = s->scores + (int64_t)s->rows * e->experts;
    for (int r = thread; r < s->rows; r += threads) {
        choose(e, s->scores + (int64_t)r * e->experts, ranked + (int64_t)r * e->experts, s->numbers + r * e->chosen,
               s->weights + r * e->chosen);
        if (e->shared_gate.rows) {
            float gate[MAX_BATCH][PANEL_ROWS];
            multiply_group(&e->shared_gate, 0, 1, h.x, h.quantised, r, r + 1, gate);
            s->shared_weight[r] = 1.0f / (1.0f + expf(-gate[0][0]));
        }
    }
    barrier_wait(&pool.inside, threads);
    Assignment a = sort_by_expert(e, s->numbers, s->weights, s->rows, s->scratch + thread * s->scratch_size);
    for (int i = share_start(chosen, thread, threads); i < share_start(chosen, thread + 1, threads); i++) {
        float *row = s->gathered + (int64_t)i * d;
        memcpy(row, h.x + (int64_t)a.row[i] * d, 4 * (size_t)d);
        for (int k = 0; e->weighs_input && k < d; k++) row[k] *= a.weight[i];
    }
    h = prepare_choices(s, e->gate_up, s->gathered, chosen, thread, threads);
    for (int n = 0, at; n < e->experts; n++)
        if ((at = a.begin[n]) < a.begin[n + 1])
            feed_forward(m, e, e->gate_up + n, d_ff, choices_from(h, at, d), a.begin[n + 1] - at,
                         s->expert_hidden + (int64_t)at * d_ff, thread, threads);
    barrier_wait(&pool.inside, threads);
    if (shared) {
        h = prepare(s, &layer->down, 0, s->hidden, thread, threads);
        add_own(s, &layer->down, h, s->rows, 0, e->shared_gate.rows ? s->shared_weight : 0, thread, threads);
    }
    h = prepare_choices(s, e->down, s->expert_hidden, chosen, thread, threads);
    for (int n = 0, at; n < e->experts; n++)
        if ((at = a.begin[n]) < a.begin[n + 1])
            add_own(s, e->down + n, choices_from(h, at, d_ff), a.begin[n + 1] - at, a.row + at,
                    e->weighs_input ? 0 : a.weight + at, thread, threads);
}

static void step(void *argument, int thread, int threads) {
    Step *s = argument;
    const Model *m = s->model;
    for (int number = 0; number < m->layers; number++) {
        const Layer *layer = m->layer + number;
        Activations h = prepare(s, &layer->qkv, &layer->attention_norm, s->x, thread, threads);
        multiply_own(s, &layer->qkv, h, s->qkv, thread, threads);
        barrier_wait(&pool.inside, threads);
        attend_all(s, layer, thread, threads);
        barrier_wait(&pool.inside, threads);
        h = prepare(s, &layer->out, 0, s->mixed, thread, threads);
        add_own(s, &layer->out, h, s->rows, 0, 0, thread, threads);
        barrier_wait(&pool.inside, threads);
        (layer->experts ? mixture : dense)(s, layer, thread, threads);
        barrier_wait(&pool.inside, threads);
    }
    if (s->logits) {
        Activations h = prepare(s, &m->head, &m->norm, s->x, thread, threads);
        multiply_own(s, &m->head, h, s->result, thread, threads);
        return;
    }
    for (int64_t row = thread; row < s->rows; row += threads)
        normalise(&m->norm, s->x + row * m->d_model, m->d_model, s->result + row * m->d_model);
}

/* Take the next rows of a batch, at most `max_rows`, as spans. `text` and the number of its tokens `taken` so far
 * advance. Returns the number of rows. */
static int take_rows(const Batch *batch, int *text, int64_t *taken, int max_rows, TokenSpan *spans, int *count) {
    int rows = 0;
    for (*count = 0; *text < batch->texts && rows < max_rows;) {
        int64_t tokens = batch->counts[*text];
        int64_t length = tokens - *taken < max_rows - rows ? tokens - *taken : max_rows - rows;
        const int64_t *table = batch->tables + (int64_t)*text * batch->table_width;
        if (length)
            spans[(*count)++] = (TokenSpan){rows, length, batch->positions[*text] + *taken, tokens > 1, table};
        rows += length, *taken += length;
        if (*taken == tokens) ++*text, *taken = 0;
    }
    return rows;
}

static inline size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Run the embedded tokens x (rows, d_model) of a batch through all layers, up to STEP_ROWS at a time, and store their
 * keys and values → features (rows, d_model), or with `logits` (rows, head rows). Returns non-zero if out of memory. */
int weft_step(const Model *model, const float *x, const Batch *batch, int logits, float *result, int threads) {
    size_t d_model = model->d_model, width = model->heads * model->d_head, d_ff = model->d_ff;
    size_t widest = larger(larger(d_model, d_ff), width) + BLOCK;
    size_t tokens = 0, qkv = (model->heads + 2 * model->kv_heads) * (size_t)model->d_head, longest = 0, prefill = 0;
    for (int text = 0; text < batch->texts; text++) {
        size_t end = batch->positions[text] + batch->counts[text];
        longest = end > longest ? end : longest, tokens += batch->counts[text], prefill |= batch->counts[text] > 1;
    }
    size_t rows = tokens < STEP_ROWS ? tokens : STEP_ROWS, experts = model->max_experts, chosen = model->max_chosen;
    size_t scratch_size = prefill ? (size_t)prefill_scratch(model, longest) : longest + LANES;
    if (experts) scratch_size = larger(scratch_size, experts + 1 + 2 * rows * chosen);
    size_t choice_floats = chosen * (d_model + model->d_expert + 2) + 2 * experts + 1;
    size_t row_floats = d_model * (size_t)(1 + threads) + qkv + width + d_ff + (experts ? choice_floats : 0);
    float *memory = malloc(4 * (rows * row_floats + threads * scratch_size));
    QuantisedRows *quantised = calloc(threads + 1, sizeof *quantised);
    int failed = !memory || !quantised;
    for (int i = 0; quantised && i <= threads; i++) {
        quantised[i] = i < threads ? allocate_quantised(rows, widest)
                                   : allocate_quantised(rows * chosen, larger(d_model, model->d_expert) + BLOCK);
        failed |= allocation_failed(quantised[i]);
    }
    TokenSpan spans[STEP_ROWS];
    int64_t taken = 0;
    for (int text = 0; !failed && text < batch->texts;) {
        Step s = {.model = model, .span = spans, .quantised = quantised, .logits = logits};
        s.rows = take_rows(batch, &text, &taken, STEP_ROWS, spans, &s.spans);
        float *next = memory;
        s.x = next, next += rows * d_model;
        s.qkv = next, next += rows * qkv;
        s.mixed = next, next += rows * width;
        s.hidden = next, next += rows * d_ff;
        s.normalised = next, next += rows * threads * d_model;
        if (experts) {
            s.gathered = next, next += rows * chosen * d_model;
            s.expert_hidden = next, next += rows * chosen * model->d_expert;
            s.numbers = (int32_t *)next, next += rows * chosen;
            s.weights = next, next += rows * chosen;
            s.scores = next, next += rows * 2 * experts;
            s.shared_weight = next, next += rows;
        }
        s.quantised_choices = quantised[threads];
        s.scratch = next, s.scratch_size = scratch_size, s.result = result;
        memcpy(s.x, x, 4 * (size_t)s.rows * d_model);
        run_parallel(step, &s, threads);
        x += (size_t)s.rows * d_model, result += (size_t)s.rows * (logits ? (size_t)model->head.rows : d_model);
    }
    for (int i = 0; quantised && i <= threads; i++) free_quantised(quantised[i]);
    free(quantised), free(memory);
    return failed;
}

/* Sizes of the structs that `native.py` declares as well, in its order. */
const int32_t weft_struct_sizes[] = {sizeof(Matrix), sizeof(Norm),  sizeof(Experts),
                                      sizeof(Layer),  sizeof(Model), sizeof(Batch)};
