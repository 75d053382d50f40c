/* A decoder's step for one row of tokens, with the products that it is made of, on a CPU.
 *
 * A step of a small model is bound by how many operations there are and by how fast weights come from memory. Here a
 * step is one call: each thread computes its rows of every matrix, and threads meet four times a layer. Weights are
 * float32, bf16, or whole numbers of 8 or 4 bits with scales (`rounding.py`); with whole numbers, what they are
 * multiplied with is rounded to 8 bits too, in blocks of 32 with a scale each. Every row of a product is summed by one
 * thread, always in the same order: what comes out does not depend on the number of threads.
 *
 * `native.py` compiles this file and calls it.
 */
#include "products.h"
#include "threads.h"

#define TILE 16 /* rows of x that a row of weights is multiplied with while it is in the first cache */

enum { RELU, SILU, GELU, GELU_TANH };

typedef struct { /* RMSNorm, or LayerNorm where `centred`: x → (x − mean) / deviation · (gain + offset) + bias */
    const float *gain, *bias;
    float eps, offset;
    int32_t centred;
} Norm;

typedef struct {
    Norm attention_norm, feedforward_norm;
    Matrix qkv, out, up, down; /* up: of a gated layer, the gate's rows first */
    float *keys, *values;      /* (kv_heads, capacity, d_head) */
} Layer;

typedef struct {
    int32_t layers, d_model, heads, kv_heads, d_head, d_ff, gated, activation, capacity;
    float scale;
    const float *cos, *sin; /* (capacity, d_head / 2), or none: nothing is rotated */
    const Layer *layer;
    Norm norm;
    Matrix head; /* 0 rows: the features are the result */
} Model;

static inline int share(int count, int thread, int threads) { return (int)((int64_t)count * thread / threads); }

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

static inline Rounded of_row(Rounded all, int row, int columns) {
    int blocks = columns / BLOCK;
    Rounded one = {all.numbers + (int64_t)row * columns, all.scales + (int64_t)row * blocks,
                   all.offsets + (int64_t)row * blocks, all.sums + (int64_t)row * blocks};
    return one;
}

static void multiply(void *given, int thread, int threads) {
    Product *p = given;
    const Matrix *m = p->matrix;
    int n = m->columns, whole = m->kind >= INT8;
    if (whole)
        for (int r = share(p->rows, thread, threads); r < share(p->rows, thread + 1, threads); r++)
            round_blocks(p->x + (int64_t)r * n, n, of_row(p->rounded, r, n));
    meet(&pool.inside, threads);
    Range mine = own(m, m->rows, thread, threads);
    for (int tile = 0; tile < p->rows; tile += TILE)
        for (int row = mine.first, end; row < mine.last; row = end) {
            end = end_of(m, row, mine.last);
            for (int r = tile; r < p->rows && r < tile + TILE; r++)
                products(m, row, end, p->x + (int64_t)r * n, whole ? of_row(p->rounded, r, n) : p->rounded,
                         p->y + (int64_t)r * m->rows + row);
        }
}

static Rounded space(int64_t rows, int columns) {
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
        p.rounded = space(rows, matrix->columns);
        if (missing(p.rounded)) {
            give_back(p.rounded);
            return 1;
        }
    }
    together(multiply, &p, threads);
    give_back(p.rounded);
    return 0;
}

/* ---- a step */

typedef struct {
    const Model *model;
    float *x, *qkv, *mixed, *hidden, *scores; /* scores (threads, capacity + 8) */
    float *normed;                            /* (threads, width of the widest input) */
    Rounded *rounded;                         /* one a thread */
    float *result;
    int place;
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

/* What a matrix is to be multiplied with, as it wants it; every thread prepares its own. */
static const float *prepared(Step *s, const Matrix *m, const Norm *norm, const float *x, int thread) {
    if (norm) {
        float *own = s->normed + (int64_t)thread * s->model->d_model;
        normalise(norm, x, m->columns, own);
        x = own;
    }
    if (m->kind >= INT8) round_blocks(x, m->columns, s->rounded[thread]);
    return x;
}

static inline float activated(float x, int kind) {
    switch (kind) {
    case RELU: return x > 0 || x != x ? x : 0;
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    default: return x;
    }
}

/* f(x) in place; those of them that are made of e^x, eight at a time. */
static void activate(float *x, int n, int kind) {
    int i = 0;
    if (kind == SILU || kind == GELU_TANH) {
        for (; i < n; i += LANES) {
            Vector v = {0}, z;
            int some = n - i < LANES ? n - i : LANES;
            memcpy(&v, x + i, 4 * some);
            /* x σ(z): 0.5 x (1 + tanh(z / 2)) is the same */
            z = kind == SILU ? v : 1.5957691216057308f * (v + 0.044715f * v * v * v);
            v = v / (1.0f + exponential(-z));
            memcpy(x + i, &v, 4 * some);
        }
        return;
    }
    for (; i < n; i++) x[i] = activated(x[i], kind);
}

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

/* One head: its query with all keys so far and its own, which the first head of a group stores. */
static void attend(Step *s, const Layer *layer, int head, int thread) {
    const Model *m = s->model;
    int d = m->d_head, groups = m->heads / m->kv_heads, kv = head / groups, place = s->place;
    float q[512], k[512];
    const float *v = s->qkv + (m->heads + m->kv_heads + kv) * d;
    rotate(m, s->qkv + head * d, place, q);
    rotate(m, s->qkv + (m->heads + kv) * d, place, k);
    float *keys = layer->keys + (int64_t)kv * m->capacity * d, *values = layer->values + (int64_t)kv * m->capacity * d;
    float *scores = s->scores + (int64_t)thread * (m->capacity + LANES);
    float most = -INFINITY;
    for (int i = 0; i <= place; i += ROWS) { /* the last ones are those of this place, again and again */
        const float *rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = i + r < place ? keys + (int64_t)(i + r) * d : k;
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
    float *out = s->mixed + head * d, inverse = 1.0f / total(sum);
    float weight = scores[place] * inverse;
    for (int j = 0; j < d; j++) out[j] = weight * v[j];
    for (int i = 0; i < place; i++) {
        const float *row = values + (int64_t)i * d;
        weight = scores[i] * inverse;
        for (int j = 0; j < d; j++) out[j] += weight * row[j];
    }
    if (head % groups == 0) {
        memcpy(keys + (int64_t)place * d, k, 4 * d);
        memcpy(values + (int64_t)place * d, v, 4 * d);
    }
}

/* A thread's rows times x → y. */
static void own_products(const Matrix *m, const float *x, Rounded rounded, float *y, int thread, int threads) {
    Range mine = own(m, m->rows, thread, threads);
    all_products(m, mine.first, mine.last, x, rounded, y + mine.first);
}

/* The same, added to y. */
static void add_products(const Matrix *m, const float *x, Rounded rounded, float *y, int thread, int threads) {
    Range mine = own(m, m->rows, thread, threads);
    float more[BAND];
    for (int row = mine.first, end; row < mine.last; row = end) {
        end = end_of(m, row, mine.last);
        products(m, row, end, x, rounded, more);
        for (int r = row; r < end; r++) y[r] += more[r - row];
    }
}

static void feed_forward(Step *s, const Layer *layer, int thread, int threads) {
    const Model *m = s->model;
    Rounded rounded = s->rounded[thread];
    const float *h = prepared(s, &layer->up, &layer->feedforward_norm, s->x, thread);
    Range mine = own(&layer->up, m->d_ff, thread, threads);
    all_products(&layer->up, mine.first, mine.last, h, rounded, s->hidden + mine.first);
    activate(s->hidden + mine.first, mine.last - mine.first, m->activation);
    float up[BAND];
    for (int row = m->d_ff + mine.first, end; m->gated && row < m->d_ff + mine.last; row = end) {
        end = end_of(&layer->up, row, m->d_ff + mine.last);
        products(&layer->up, row, end, h, rounded, up);
        for (int r = row; r < end; r++) s->hidden[r - m->d_ff] *= up[r - row];
    }
}

static void step(void *given, int thread, int threads) {
    Step *s = given;
    const Model *m = s->model;
    Rounded rounded = s->rounded[thread];
    for (int number = 0; number < m->layers; number++) {
        const Layer *layer = m->layer + number;
        const float *h = prepared(s, &layer->qkv, &layer->attention_norm, s->x, thread);
        own_products(&layer->qkv, h, rounded, s->qkv, thread, threads);
        meet(&pool.inside, threads);
        for (int head = share(m->heads, thread, threads); head < share(m->heads, thread + 1, threads); head++)
            attend(s, layer, head, thread);
        meet(&pool.inside, threads);
        h = prepared(s, &layer->out, 0, s->mixed, thread);
        add_products(&layer->out, h, rounded, s->x, thread, threads);
        meet(&pool.inside, threads);
        feed_forward(s, layer, thread, threads);
        meet(&pool.inside, threads);
        h = prepared(s, &layer->down, 0, s->hidden, thread);
        add_products(&layer->down, h, rounded, s->x, thread, threads);
        meet(&pool.inside, threads);
    }
    if (!m->head.rows) {
        if (thread == 0) normalise(&m->norm, s->x, m->d_model, s->result);
        return;
    }
    const float *h = prepared(s, &m->head, &m->norm, s->x, thread);
    own_products(&m->head, h, rounded, s->result, thread, threads);
}

/* x (d_model), the embedding of the token at `place`, through all layers → logits, or features where there is no head.
 * Its keys and values are stored. Not 0: there was no memory. */
int weft_step(const Model *model, const float *x, int place, float *result, int threads) {
    int width = model->heads * model->d_head, widest = model->d_model > model->d_ff ? model->d_model : model->d_ff;
    widest = (width > widest ? width : widest) + BLOCK;
    size_t floats = model->d_model * (size_t)(1 + threads) + (model->heads + 2 * model->kv_heads) * (size_t)model->d_head +
                    width + model->d_ff + (size_t)threads * (model->capacity + LANES);
    float *memory = malloc(4 * floats);
    Rounded *rounded = calloc(threads, sizeof *rounded);
    int failed = !memory || !rounded;
    for (int i = 0; rounded && i < threads; i++) {
        rounded[i] = space(1, widest);
        failed |= missing(rounded[i]);
    }
    if (!failed) {
        Step s = {.model = model, .rounded = rounded, .result = result, .place = place};
        float *next = memory;
        s.x = next, next += model->d_model;
        s.qkv = next, next += (model->heads + 2 * model->kv_heads) * model->d_head;
        s.mixed = next, next += width;
        s.hidden = next, next += model->d_ff;
        s.normed = next, next += (size_t)threads * model->d_model;
        s.scores = next;
        memcpy(s.x, x, 4 * (size_t)model->d_model);
        together(step, &s, threads);
    }
    for (int i = 0; rounded && i < threads; i++) give_back(rounded[i]);
    free(rounded), free(memory);
    return failed;
}
