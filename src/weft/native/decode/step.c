/* A decoder's step for some tokens of each of some texts, with the products that it is made of, on a CPU.
 *
 * A step of a small model is bound by how many operations there are and by how fast weights come from memory. Here a
 * step is one call: each thread computes its rows of every matrix, for all tokens while it has them at hand, and threads
 * meet a few times a layer. Weights are float32, bf16, or whole numbers of 8 or 4 bits with scales (`rounding.py`); with
 * whole numbers, what they are multiplied with is rounded to 8 bits too, in blocks of 32 with a scale each. Every row of
 * a product is summed by one thread, always in the same order: what comes out does not depend on the number of threads,
 * nor a text on the others.
 *
 * `native.py` compiles this file and calls it.
 */
#include "attend.h"
#include "log_totals.h"
#include "threads.h"
#include "tiles.h"

#define TILE 64      /* rows of x that a row of weights is multiplied with while it is in the first cache */
#define TOGETHER 128 /* rows of a step that go through all layers together: what they leave stays in the second cache */

enum { RELU, SILU, GELU, GELU_TANH };

typedef struct { int first, last; } Range; /* of which the last is the first beyond it */

/* A thread's part of so many rows of a matrix: those that are multiplied together are one thread's. */
static inline Range own(const Matrix *m, int rows, int thread, int threads) {
    int some = at_once(m), all = (rows + some - 1) / some, last = share(all, thread + 1, threads) * some;
    Range range = {share(all, thread, threads) * some, last < rows ? last : rows};
    return range;
}

/* ---- a product by itself */

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y;
    int rows;
    Rounded rounded;
} Product;

static void multiply(void *given, int thread, int threads) {
    Product *p = given;
    const Matrix *m = p->matrix;
    int n = m->columns, whole = m->kind >= INT8;
    if (whole)
        for (int r = share(p->rows, thread, threads); r < share(p->rows, thread + 1, threads); r++)
            round_blocks(p->x + (int64_t)r * n, n, of_row(p->rounded, r, n));
    meet(&pool.inside, threads);
    Range mine = own(m, m->rows, thread, threads);
    for (int tile = 0; tile < p->rows; tile += TILE) {
        int some = p->rows - tile < TILE ? p->rows - tile : TILE;
        Rounded rounded = whole ? of_row(p->rounded, tile, n) : p->rounded;
        all_products(m, mine.first, mine.last, p->x + (int64_t)tile * n, rounded, some, p->y + (int64_t)tile * m->rows, m->rows);
    }
}

static Rounded space_for(int64_t rows, int columns) {
    int64_t blocks = rows * (columns / BLOCK);
    Rounded r = {malloc(rows * columns + 1), malloc(4 * blocks + 4), malloc(4 * blocks + 4), malloc(4 * blocks + 4)};
    return r;
}

static void give_back(Rounded r) { free(r.numbers), free(r.scales), free(r.offsets), free(r.sums); }

static int missing(Rounded r) { return !r.numbers || !r.scales || !r.offsets || !r.sums; }

/* x (rows, columns) times a matrix → y (rows, its rows). Not 0: there was no memory. */
int weft_product(const Matrix *matrix, const float *x, float *y, int rows, int threads) {
    Product p = {matrix, x, y, rows, {0}};
    if (matrix->kind >= INT8) {
        p.rounded = space_for(rows, matrix->columns);
        if (missing(p.rounded)) {
            give_back(p.rounded);
            return 1;
        }
    }
    together(multiply, &p, threads);
    give_back(p.rounded);
    return 0;
}

/* ---- many rows at once, in float32 */

typedef struct {
    const Matrix *matrix;
    const float *x;
    float *y, *turned;
    Vector *sums; /* of TILES tiles for each thread */
    int rows, claim;
    atomic_int panel, ready, tile; /* the next one that nobody has, panels that are turned, the next tile */
} Many;

/* Threads take what is left, a little at a time: one that has no processor just now keeps few of the others waiting. */
static void multiply_many(void *given, int thread, int threads) {
    Many *p = given;
    const Matrix *m = p->matrix;
    int n = m->columns, full = turned_of(p->rows), panels = (full + PANEL - 1) / PANEL;
    (void)threads;
    for (int i; (i = atomic_fetch_add(&p->panel, 1)) < panels; atomic_fetch_add(&p->ready, 1)) {
        int first = i * PANEL, width = full - first < PANEL ? full - first : PANEL, rows = p->rows - first;
        turn(p->x + (int64_t)first * n, rows < width ? rows : width, n, width, p->turned + (int64_t)first * n);
    }
    for (int tries = 0; atomic_load(&p->ready) < panels; tries++) rest(tries);
    int tiles = (m->rows + TALL - 1) / TALL;
    Vector *sums = p->sums + (int64_t)thread * TILES * sums_of(p->rows);
    for (int i; (i = atomic_fetch_add(&p->tile, p->claim)) < tiles;)
        for (int end = i + p->claim < tiles ? i + p->claim : tiles, next; i < end; i = next) {
            next = i + TILES < end ? i + TILES : end;
            tall_products(m, i, next, p->x, p->turned, p->rows, sums, p->y);
        }
}

/* x (rows, columns) times a matrix in float32, of at least TALL rows and of columns in sixteens → y (rows, its rows). How
 * a row of x is summed up depends on how many there are. Not 0: there was no memory. */
int weft_many(const Matrix *matrix, const float *x, float *y, int rows, int threads) {
    float *turned = aligned_alloc(64, 4 * ((int64_t)turned_of(rows) + 1) * matrix->columns);
    Vector *sums = aligned_alloc(64, (int64_t)threads * TILES * sums_of(rows) * sizeof *sums);
    int failed = !turned || !sums;
    int most = matrix->rows / TALL / (2 * threads), claim = most < 1 ? 1 : most < 64 / TALL ? most : 64 / TALL;
    Many p = {matrix, x, y, turned, sums, rows, claim, 0, 0, 0};
    if (!failed) together(multiply_many, &p, threads);
    free(turned), free(sums);
    return failed;
}

/* ---- a step */

#define MEETING 4 /* rows that are worth meeting once more for, instead of every thread preparing all of them */

typedef struct { /* of texts: so many tokens each, from a place on, with keys and values in the blocks of its table */
    int32_t texts, width;
    const int64_t *counts, *places, *tables; /* (texts), (texts), (texts, width) */
} Texts;

typedef struct {
    const Model *model;
    int rows, runs;
    const Run *run;
    float *x, *qkv, *mixed, *hidden; /* (rows, …) */
    float *scratch;                  /* (threads, space) */
    int64_t space;
    float *normed;    /* (threads, rows, d_model) */
    Rounded *rounded; /* (rows, …) a thread */
    float *result;
    int logits;
} Step;

static void normalise(const Norm *norm, const float *x, int n, float *out) {
    float mean = 0;
    if (norm->centred) {
        Vector sum = {0};
        int i = 0;
        for (; i + LANES <= n; i += LANES) sum += LOAD(x + i);
        mean = total(sum);
        for (; i < n; i++) mean += x[i];
        mean /= (float)n;
    }
    for (int i = 0; i < n; i++) out[i] = x[i] - mean;
    float squares = 0;
    squares += total(dot(out, out, n, &squares));
    float factor = 1.0f / sqrtf(squares / (float)n + norm->eps);
    for (int i = 0; i < n; i++) out[i] = out[i] * factor * (norm->gain[i] + norm->offset);
    if (norm->bias)
        for (int i = 0; i < n; i++) out[i] += norm->bias[i];
}

typedef struct { /* what a matrix is multiplied with, as it wants it */
    const float *x;
    Rounded rounded;
} Given;

static Given prepared(Step *s, const Matrix *m, const Norm *norm, const float *x, int thread, int threads) {
    int alone = s->rows < MEETING, first = alone ? 0 : share(s->rows, thread, threads), n = m->columns;
    int last = alone ? s->rows : share(s->rows, thread + 1, threads), mine = alone ? thread : 0;
    if (norm) {
        float *own = s->normed + (int64_t)mine * s->rows * n;
        for (int r = first; r < last; r++) normalise(norm, x + (int64_t)r * n, n, own + (int64_t)r * n);
        x = own;
    }
    for (int r = first; m->kind >= INT8 && r < last; r++)
        round_blocks(x + (int64_t)r * n, n, of_row(s->rounded[mine], r, n));
    if (!alone) meet(&pool.inside, threads);
    return (Given){x, s->rounded[mine]};
}

static inline float activated(float x, int kind) {
    switch (kind) {
    case RELU: return x > 0 || x != x ? x : 0;
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    default: return x;
    }
}

/* x σ(z): 0.5 x (1 + tanh(z / 2)) is the same. */
static inline Vector weighed(Vector x, int kind) {
    Vector z = kind == SILU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-z));
}

/* f(x) in place; those of them that are made of e^x, a vector at a time. */
static void activate(float *x, int n, int kind) {
    int i = 0;
    if (kind == SILU || kind == GELU_TANH) {
        for (; i + LANES <= n; i += LANES) STORE(x + i, weighed(LOAD(x + i), kind));
        Vector last = {0};
        memcpy(&last, x + i, 4 * (n - i));
        last = weighed(last, kind);
        memcpy(x + i, &last, 4 * (n - i));
        return;
    }
    for (; i < n; i++) x[i] = activated(x[i], kind);
}

/* A thread's part of all heads: of a text with one token more, one after the other; of others, tiles of their queries. */
static void attend_all(Step *s, const Layer *layer, int thread, int threads) {
    const Model *m = s->model;
    int width = (m->heads + 2 * m->kv_heads) * m->d_head, heads = s->rows * (m->heads + 2 * m->kv_heads), units = 0;
    float *scratch = s->scratch + thread * s->space;
    Range mine = {share(heads, thread, threads), share(heads, thread + 1, threads)};
    for (int i = 0; i < s->runs; i++) {
        const Run *run = s->run + i;
        units += run->many ? m->kv_heads * tiles_of(m, run) : m->heads;
        for (int r = 0; r < run->count; r++) {
            int at = (run->first + r) * (m->heads + 2 * m->kv_heads), end = at + m->heads + 2 * m->kv_heads;
            int last = mine.last < end ? mine.last : end;
            for (int head = mine.first > at ? mine.first : at; head < last; head++)
                put(m, layer, run->table, run->place + r, head - at, s->qkv + (int64_t)(run->first + r) * width);
        }
    }
    meet(&pool.inside, threads);
    mine = (Range){share(units, thread, threads), share(units, thread + 1, threads)};
    for (int i = 0, unit = 0; i < s->runs; i++) {
        const Run *run = s->run + i;
        const float *qkv = s->qkv + (int64_t)run->first * width;
        float *mixed = s->mixed + (int64_t)run->first * m->heads * m->d_head;
        int tiles = tiles_of(m, run), all = run->many ? m->kv_heads * tiles : m->heads;
        int first = mine.first > unit ? mine.first - unit : 0, last = mine.last - unit < all ? mine.last - unit : all;
        for (int at = first; at < last; at++)
            if (run->many)
                attend_together(m, layer, run, at / tiles, at % tiles, qkv, scratch, mixed);
            else
                attend(m, layer, run, at, qkv + at * m->d_head, scratch, mixed + at * m->d_head);
        unit += all;
    }
}

/* A thread's rows times each x → its y. */
static void own_products(Step *s, const Matrix *m, Given x, float *y, int thread, int threads) {
    Range mine = own(m, m->rows, thread, threads);
    all_products(m, mine.first, mine.last, x.x, x.rounded, s->rows, y, m->rows);
}

/* y += x, y *= x; a whole band is of a size that the compiler knows. */
static inline void add_to(float *restrict y, const float *restrict x, int n) {
    if (n == BAND)
        for (int i = 0; i < BAND; i++) y[i] += x[i];
    else
        for (int i = 0; i < n; i++) y[i] += x[i];
}

static inline void times_to(float *restrict y, const float *restrict x, int n) {
    if (n == BAND)
        for (int i = 0; i < BAND; i++) y[i] *= x[i];
    else
        for (int i = 0; i < n; i++) y[i] *= x[i];
}

/* The same, added to y. */
static void add_products(Step *s, const Matrix *m, Given x, float *y, int thread, int threads) {
    Range mine = own(m, m->rows, thread, threads);
    float more[MOST][BAND];
    for (int row = mine.first, end; row < mine.last; row = end) {
        end = end_of(m, row, mine.last);
        for (int t = 0, count; t < s->rows; t += count) {
            count = products(m, row, end, x.x, x.rounded, t, s->rows, more);
            for (int k = 0; k < count; k++) add_to(y + (int64_t)(t + k) * m->rows + row, more[k], end - row);
        }
    }
}

static void feed_forward(Step *s, const Layer *layer, int thread, int threads) {
    const Model *m = s->model;
    const Matrix *both = &layer->up;
    Given h = prepared(s, both, &layer->feedforward_norm, s->x, thread, threads);
    Range mine = own(both, m->d_ff, thread, threads);
    all_products(both, mine.first, mine.last, h.x, h.rounded, s->rows, s->hidden, m->d_ff);
    for (int t = 0; t < s->rows; t++)
        activate(s->hidden + (int64_t)t * m->d_ff + mine.first, mine.last - mine.first, m->activation);
    float up[MOST][BAND];
    for (int row = m->d_ff + mine.first, end; m->gated && row < m->d_ff + mine.last; row = end) {
        end = end_of(both, row, m->d_ff + mine.last);
        for (int t = 0, count; t < s->rows; t += count) {
            count = products(both, row, end, h.x, h.rounded, t, s->rows, up);
            for (int k = 0; k < count; k++) times_to(s->hidden + (int64_t)(t + k) * m->d_ff + row - m->d_ff, up[k], end - row);
        }
    }
}

static void step(void *given, int thread, int threads) {
    Step *s = given;
    const Model *m = s->model;
    for (int number = 0; number < m->layers; number++) {
        const Layer *layer = m->layer + number;
        Given h = prepared(s, &layer->qkv, &layer->attention_norm, s->x, thread, threads);
        own_products(s, &layer->qkv, h, s->qkv, thread, threads);
        meet(&pool.inside, threads);
        attend_all(s, layer, thread, threads);
        meet(&pool.inside, threads);
        h = prepared(s, &layer->out, 0, s->mixed, thread, threads);
        add_products(s, &layer->out, h, s->x, thread, threads);
        meet(&pool.inside, threads);
        feed_forward(s, layer, thread, threads);
        meet(&pool.inside, threads);
        h = prepared(s, &layer->down, 0, s->hidden, thread, threads);
        add_products(s, &layer->down, h, s->x, thread, threads);
        meet(&pool.inside, threads);
    }
    if (s->logits) {
        Given h = prepared(s, &m->head, &m->norm, s->x, thread, threads);
        own_products(s, &m->head, h, s->result, thread, threads);
        return;
    }
    for (int64_t row = thread; row < s->rows; row += threads)
        normalise(&m->norm, s->x + row * m->d_model, m->d_model, s->result + row * m->d_model);
}

/* The next rows, at most `most`: those of which texts they are; `text` and its `read` tokens move on. */
static int take(const Texts *texts, int *text, int64_t *read, int most, Run *runs, int *count) {
    int rows = 0;
    for (*count = 0; *text < texts->texts && rows < most;) {
        int64_t tokens = texts->counts[*text], some = tokens - *read < most - rows ? tokens - *read : most - rows;
        const int64_t *table = texts->tables + (int64_t)*text * texts->width;
        if (some) runs[(*count)++] = (Run){rows, some, texts->places[*text] + *read, tokens > 1, table};
        rows += some, *read += some;
        if (*read == tokens) ++*text, *read = 0;
    }
    return rows;
}

/* x (rows, d_model), the embeddings of some tokens of each text, through all layers, some rows at a time → features
 * (rows, d_model), or with `logits` (rows, the head's). Keys and values are stored. Not 0: there was no memory. */
int weft_step(const Model *model, const float *x, const Texts *texts, int logits, float *result, int threads) {
    int width = model->heads * model->d_head, widest = model->d_model > model->d_ff ? model->d_model : model->d_ff;
    widest = (width > widest ? width : widest) + BLOCK;
    size_t all = 0, qkv = (model->heads + 2 * model->kv_heads) * (size_t)model->d_head, longest = 0, many = 0;
    for (int text = 0; text < texts->texts; text++) {
        size_t end = texts->places[text] + texts->counts[text];
        longest = end > longest ? end : longest, all += texts->counts[text], many |= texts->counts[text] > 1;
    }
    size_t rows = all < TOGETHER ? all : TOGETHER, space = many ? (size_t)scratch_of(model, longest) : longest + LANES;
    size_t floats = rows * (model->d_model * (size_t)(1 + threads) + qkv + width + model->d_ff) + threads * space;
    float *memory = malloc(4 * floats);
    Rounded *rounded = calloc(threads, sizeof *rounded);
    int failed = !memory || !rounded;
    for (int i = 0; rounded && i < threads; i++) {
        rounded[i] = space_for(rows, widest);
        failed |= missing(rounded[i]);
    }
    Run runs[TOGETHER];
    int64_t read = 0;
    for (int text = 0; !failed && text < texts->texts;) {
        Step s = {.model = model, .run = runs, .rounded = rounded, .space = space, .logits = logits};
        s.rows = take(texts, &text, &read, TOGETHER, runs, &s.runs);
        float *next = memory;
        s.x = next, next += rows * model->d_model;
        s.qkv = next, next += rows * qkv;
        s.mixed = next, next += rows * width;
        s.hidden = next, next += rows * model->d_ff;
        s.normed = next, next += rows * threads * model->d_model;
        s.scratch = next, s.result = result;
        memcpy(s.x, x, 4 * (size_t)s.rows * model->d_model);
        together(step, &s, threads);
        x += (size_t)s.rows * model->d_model, result += (size_t)s.rows * (logits ? model->head.rows : model->d_model);
    }
    for (int i = 0; rounded && i < threads; i++) give_back(rounded[i]);
    free(rounded), free(memory);
    return failed;
}
