/* A decoder's step for one token of each of some texts, with the products that it is made of, on a CPU.
 *
 * A step of a small model is bound by how many operations there are and by how fast weights come from memory. Here a
 * step is one call: each thread computes its rows of every matrix, for all texts while it has them at hand, and threads
 * meet four times a layer. Weights are float32, bf16, or whole numbers of 8 or 4 bits with scales (`rounding.py`); with
 * whole numbers, what they are multiplied with is rounded to 8 bits too, in blocks of 32 with a scale each. Every row of
 * a product is summed by one thread, always in the same order: what comes out does not depend on the number of threads,
 * nor a text on the others.
 *
 * `native.py` compiles this file and calls it.
 */
#include "products.h"
#include "threads.h"
#include "tiles.h"

#define TILE 64 /* rows of x that a row of weights is multiplied with while it is in the first cache */

enum { RELU, SILU, GELU, GELU_TANH };

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

/* ---- normalisers */

#define PIECE 256 /* numbers whose exponentials are added up in float32; sums of those are, in float64 */

typedef struct {
    const float *x;
    float *y;
    int64_t rows, columns, apart;
} Totals;

static float log_total(const float *x, int64_t n) {
    Vector most = (Vector){0} - INFINITY;
    float largest = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        Integers larger = LOAD(x + i) > most;
        most = (Vector)((larger & WHOLE(x + i)) | (~larger & (Integers)most));
    }
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    for (int j = 0; j < LANES; j++) largest = most[j] > largest ? most[j] : largest;
    if (largest == -INFINITY) return largest;
    double sum = 0;
    for (i = 0; i < n;) {
        int64_t end = i + PIECE < n ? i + PIECE : n;
        Vector s[SUMS] = {0};
        for (; i + SUMS * LANES <= end; i += SUMS * LANES)
            for (int j = 0; j < SUMS; j++) s[j] += falling(LOAD(x + i + j * LANES) - largest);
        for (; i + LANES <= end; i += LANES) s[0] += falling(LOAD(x + i) - largest);
        sum += total(sum_of(s));
        for (; i < end; i++) sum += exp((double)x[i] - largest);
    }
    return largest + (float)log(sum);
}

static void add_up(void *given, int thread, int threads) {
    Totals *t = given;
    for (int row = share(t->rows, thread, threads); row < share(t->rows, thread + 1, threads); row++)
        t->y[row] = log_total(t->x + row * t->apart, t->columns);
}

/* log Σ eˣ of each row of x (rows, columns), of which the next is `apart` further on → y (rows). */
void weft_log_totals(const float *x, int64_t rows, int64_t columns, int64_t apart, float *y, int threads) {
    Totals t = {x, y, rows, columns, apart};
    together(add_up, &t, threads);
}

/* ---- a step */

typedef struct { /* texts: each one's token stands at its place, and its keys and values in the blocks of its table */
    int rows, width;
    const int64_t *places, *tables; /* (rows), (rows, width) */
} Texts;

typedef struct {
    const Model *model;
    Texts texts;
    float *x, *qkv, *mixed, *hidden; /* (rows, …) */
    float *scores;                   /* (threads, the longest text + LANES) */
    int64_t longest;
    float *normed;    /* (threads, rows, d_model) */
    Rounded *rounded; /* (rows, …) a thread */
    float *result;
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
        float *own = s->normed + (int64_t)thread * s->texts.rows * m->columns;
        for (int r = 0; r < s->texts.rows; r++)
            normalise(norm, x + (int64_t)r * m->columns, m->columns, own + (int64_t)r * m->columns);
        x = own;
    }
    for (int r = 0; m->kind >= INT8 && r < s->texts.rows; r++)
        round_blocks(x + (int64_t)r * m->columns, m->columns, of_row(s->rounded[thread], r, m->columns));
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

/* One head of a text: its query with all keys so far and its own, which the first head of a group stores. */
static void attend(Step *s, const Layer *layer, int row, int head, int thread) {
    const Model *m = s->model;
    int d = m->d_head, groups = m->heads / m->kv_heads, kv = head / groups, place = (int)s->texts.places[row];
    float q[512], k[512];
    const float *qkv = s->qkv + (int64_t)row * (m->heads + 2 * m->kv_heads) * d;
    const float *v = qkv + (m->heads + m->kv_heads + kv) * d;
    rotate(m, qkv + head * d, place, q);
    rotate(m, qkv + (m->heads + kv) * d, place, k);
    const int64_t *table = s->texts.tables + (int64_t)row * s->texts.width, inside = (int64_t)kv * m->block * d;
    Vectors keys = {layer->keys + inside, 0, table, 0}, values = {layer->values + inside, 0, table, 0};
    float *scores = s->scores + thread * (s->longest + LANES);
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
    float *out = s->mixed + ((int64_t)row * m->heads + head) * d, inverse = 1.0f / total(sum);
    float weight = scores[place] * inverse;
    for (int j = 0; j < d; j++) out[j] = weight * v[j];
    for (int i = 0, count; i < place; i += count) { /* a few values at a time: `out` is read and written once for them */
        const float *rows[ROWS];
        count = place - i < ROWS ? 1 : ROWS;
        for (int r = 0; r < count; r++) rows[r] = next(&values, m);
        mix(out, rows, scores + i, inverse, count, d);
    }
    if (head % groups == 0) {
        memcpy(next(&keys, m), k, 4 * d);
        memcpy(next(&values, m), v, 4 * d);
    }
}

/* A thread's rows times each text's x → its y. */
static void own_products(Step *s, const Matrix *m, const float *x, float *y, int thread, int threads) {
    Range mine = own(m, m->rows, thread, threads);
    all_products(m, mine.first, mine.last, x, s->rounded[thread], s->texts.rows, y, m->rows);
}

/* The same, added to y. */
static void add_products(Step *s, const Matrix *m, const float *x, float *y, int thread, int threads) {
    Range mine = own(m, m->rows, thread, threads);
    float more[MOST][BAND];
    for (int row = mine.first, end; row < mine.last; row = end) {
        end = end_of(m, row, mine.last);
        for (int t = 0, count; t < s->texts.rows; t += count) {
            count = products(m, row, end, x, s->rounded[thread], t, s->texts.rows, more);
            for (int k = 0; k < count; k++)
                for (int r = row; r < end; r++) y[(int64_t)(t + k) * m->rows + r] += more[k][r - row];
        }
    }
}

static void feed_forward(Step *s, const Layer *layer, int thread, int threads) {
    const Model *m = s->model;
    const Matrix *both = &layer->up;
    int some = s->texts.rows;
    const float *h = prepared(s, both, &layer->feedforward_norm, s->x, thread);
    Range mine = own(both, m->d_ff, thread, threads);
    all_products(both, mine.first, mine.last, h, s->rounded[thread], some, s->hidden, m->d_ff);
    for (int t = 0; t < some; t++)
        activate(s->hidden + (int64_t)t * m->d_ff + mine.first, mine.last - mine.first, m->activation);
    float up[MOST][BAND];
    for (int row = m->d_ff + mine.first, end; m->gated && row < m->d_ff + mine.last; row = end) {
        end = end_of(both, row, m->d_ff + mine.last);
        for (int t = 0, count; t < some; t += count) {
            count = products(both, row, end, h, s->rounded[thread], t, some, up);
            for (int k = 0; k < count; k++)
                for (int r = row; r < end; r++) s->hidden[(int64_t)(t + k) * m->d_ff + r - m->d_ff] *= up[k][r - row];
        }
    }
}

static void step(void *given, int thread, int threads) {
    Step *s = given;
    const Model *m = s->model;
    int heads = s->texts.rows * m->heads;
    for (int number = 0; number < m->layers; number++) {
        const Layer *layer = m->layer + number;
        const float *h = prepared(s, &layer->qkv, &layer->attention_norm, s->x, thread);
        own_products(s, &layer->qkv, h, s->qkv, thread, threads);
        meet(&pool.inside, threads);
        for (int head = share(heads, thread, threads); head < share(heads, thread + 1, threads); head++)
            attend(s, layer, head / m->heads, head % m->heads, thread);
        meet(&pool.inside, threads);
        h = prepared(s, &layer->out, 0, s->mixed, thread);
        add_products(s, &layer->out, h, s->x, thread, threads);
        meet(&pool.inside, threads);
        feed_forward(s, layer, thread, threads);
        meet(&pool.inside, threads);
        h = prepared(s, &layer->down, 0, s->hidden, thread);
        add_products(s, &layer->down, h, s->x, thread, threads);
        meet(&pool.inside, threads);
    }
    if (m->head.rows) {
        const float *h = prepared(s, &m->head, &m->norm, s->x, thread);
        own_products(s, &m->head, h, s->result, thread, threads);
        return;
    }
    for (int64_t row = thread; row < s->texts.rows; row += threads)
        normalise(&m->norm, s->x + row * m->d_model, m->d_model, s->result + row * m->d_model);
}

/* x (rows, d_model), the embeddings of a token of each text, through all layers → logits, or features where there is no
 * head. Their keys and values are stored. Not 0: there was no memory. */
int weft_step(const Model *model, const float *x, const Texts *texts, float *result, int threads) {
    int width = model->heads * model->d_head, widest = model->d_model > model->d_ff ? model->d_model : model->d_ff;
    widest = (width > widest ? width : widest) + BLOCK;
    size_t rows = texts->rows, qkv = (model->heads + 2 * model->kv_heads) * (size_t)model->d_head, longest = 0;
    for (size_t row = 0; row < rows; row++)
        if ((size_t)texts->places[row] >= longest) longest = texts->places[row] + 1;
    size_t floats = rows * (model->d_model * (size_t)(1 + threads) + qkv + width + model->d_ff) + threads * (longest + LANES);
    float *memory = malloc(4 * floats);
    Rounded *rounded = calloc(threads, sizeof *rounded);
    int failed = !memory || !rounded;
    for (int i = 0; rounded && i < threads; i++) {
        rounded[i] = space(rows, widest);
        failed |= missing(rounded[i]);
    }
    if (!failed) {
        Step s = {.model = model, .texts = *texts, .rounded = rounded, .result = result, .longest = longest};
        float *next = memory;
        s.x = next, next += rows * model->d_model;
        s.qkv = next, next += rows * qkv;
        s.mixed = next, next += rows * width;
        s.hidden = next, next += rows * model->d_ff;
        s.normed = next, next += rows * threads * model->d_model;
        s.scores = next;
        memcpy(s.x, x, 4 * rows * model->d_model);
        together(step, &s, threads);
    }
    for (int i = 0; rounded && i < threads; i++) give_back(rounded[i]);
    free(rounded), free(memory);
    return failed;
}
