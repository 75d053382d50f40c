/* Updates of word vectors: word2vec with negative sampling, and GloVe. Compiled and called by `models/word_kernels.py`,
 * and held to the readable versions in `models/word2vec.py` and `models/glove.py`.
 *
 * Threads update shared tables without locks (Hogwild!, Recht et al. 2011): updates of one row rarely collide, and one
 * that is lost does no harm. With one thread, results are the same on every run. */
#include <stdatomic.h>

#include "threads.h"
#include "vectors.h"

#define MAX_TARGETS 64 /* the predicted word and its negative samples */
#define MAX_WIDTH 2048 /* floats in a row of a table */
#define MAX_CHUNK 16384 /* tokens of a chunk */
#define CLIP 100.0f /* bound of a gradient in GloVe */
#define LINE 16 /* floats in a cache line */

typedef struct {
    const int32_t *tokens;                 /* word ids; -1 separates documents */
    const uint32_t *keep;                  /* keep a word if 32 random bits are at most this */
    const uint32_t *threshold;             /* alias method: keep the drawn word if 32 random bits are at most this … */
    const int32_t *alias;                  /* … and replace it by this one otherwise */
    float *embedding, *context;            /* (vocab_size, width); width is a multiple of 16 */
    double *loss;                          /* sum of the losses of measured predictions, and their number */
    int64_t count;                         /* tokens */
    uint64_t seed;                         /* of this epoch */
    int32_t vocab_size, width, window, negatives, cbow, chunk;
    float lr_start, lr_end;                /* learning rates at the first and after the last token of the epoch */
} Word2Vec;

typedef struct {
    const int32_t *first, *second;         /* words of a pair */
    const float *log_count, *weight;       /* log X and f(X) of a pair */
    float *words, *contexts;               /* (vocab_size, width); width is a multiple of 16 */
    float *word_squares, *context_squares; /* AdaGrad's sums of squares, laid out as the vectors are */
    float *word_biases, *context_biases;   /* (vocab_size, 2): bias, and its sum of squares */
    double *loss;                          /* sum of the losses, and number of pairs */
    int64_t count;                         /* pairs */
    int32_t width;
    float lr;
} GloVe;

const int32_t weft_struct_sizes[] = {sizeof(Word2Vec), sizeof(GloVe)};

/* xorshift64* (Vigna 2016), seeded by splitmix64 so that neighbouring chunks have unrelated streams. */
static inline uint64_t random_bits(uint64_t *state) {
    uint64_t x = *state;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    *state = x;
    return x * 0x2545F4914F6CDD1Dull;
}

static uint64_t seeded(uint64_t seed, uint64_t stream) {
    uint64_t z = seed + (stream + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return z ? z : 1;
}

/* Rows of the context table that one prediction updates: the word's, then those of its negative samples. */
typedef struct { int32_t count; float *rows[MAX_TARGETS + ROW_GROUP]; } Targets;

static inline void prefetch_row(const float *row, int width) {
    for (int i = 0; i < width; i += LINE) __builtin_prefetch(row + i, 1);
}

static inline void draw(const Word2Vec *call, int32_t word, uint64_t *state, Targets *targets) {
    targets->rows[0] = call->context + (int64_t)word * call->width;
    targets->count = 1;
    for (int n = 0; n < call->negatives; n++) {
        uint64_t bits = random_bits(state);
        int32_t id = (int32_t)((bits >> 32) * (uint64_t)call->vocab_size >> 32);
        if ((uint32_t)bits > call->threshold[id]) id = call->alias[id];
        if (id == word) continue;
        float *row = call->context + (int64_t)id * call->width;
        prefetch_row(row, call->width);
        targets->rows[targets->count++] = row;
    }
}

/* Update the rows of `targets` from `hidden`, and set `gradient` to what `hidden` has to change by. */
static inline void predict(
    const Targets *targets, const float *hidden, float *gradient, int width, float lr, double *loss) {
    float scores[MAX_TARGETS + LANES];
    int count = targets->count, n = 0;
    for (; n + ROW_GROUP <= count; n += ROW_GROUP)
        dot_rows((const float *const *)targets->rows + n, hidden, width, scores + n);
    for (; n < count; n++) {
        float tail = 0;
        scores[n] = reduce(dot(targets->rows[n], hidden, width, &tail));
    }
    if (loss) {
        for (n = 0; n < count; n++) loss[0] += log1p(exp(n ? scores[n] : -scores[n]));
        loss[1] += 1;
    }
    for (n = count; n % LANES; n++) scores[n] = 0;
    for (n = 0; n < count; n += LANES) {
        Vector sigmoid = 1.0f / (1.0f + exp_vector(-LOAD(scores + n)));
        STORE(scores + n, -lr * sigmoid);
    }
    scores[0] += lr; /* the label of the word itself is 1 */
    for (n = 0; n < count; n++) {
        float *row = targets->rows[n], scale = scores[n];
        for (int i = 0; i < width; i += LANES) {
            Vector before = LOAD(row + i), sum = scale * before;
            STORE(gradient + i, n ? LOAD(gradient + i) + sum : sum);
            STORE(row + i, before + scale * LOAD(hidden + i));
        }
    }
}

static inline void add(float *row, const float *gradient, int width) {
    for (int i = 0; i < width; i += LANES) STORE(row + i, LOAD(row + i) + LOAD(gradient + i));
}

/* Skip-gram: each word of the window predicts the word in its middle, as in the authors' code. */
static void skip_gram(
    const Word2Vec *call, const int32_t *words, int low, int high, int centre, uint64_t *state, float lr, double *loss) {
    float gradient[MAX_WIDTH];
    Targets targets[2];
    int turn = 0, width = call->width, first = low == centre ? low + 1 : low;
    if (first >= high) return;
    draw(call, words[centre], state, &targets[0]);
    for (int n = first; n < high;) {
        int next = n + 1 == centre ? n + 2 : n + 1;
        if (next < high) { /* rows of the next prediction arrive while this one is computed */
            draw(call, words[centre], state, &targets[!turn]);
            prefetch_row(call->embedding + (int64_t)words[next] * width, width);
        }
        float *input = call->embedding + (int64_t)words[n] * width;
        predict(&targets[turn], input, gradient, width, lr, loss);
        add(input, gradient, width);
        turn = !turn, n = next;
    }
}

/* CBOW: the mean of the window's vectors predicts the word in its middle; each of them gets the mean's whole gradient,
 * as in the authors' code. */
static void cbow(
    const Word2Vec *call, const int32_t *words, int low, int high, int centre, uint64_t *state, float lr, double *loss) {
    float hidden[MAX_WIDTH] = {0}, gradient[MAX_WIDTH];
    Targets targets;
    int width = call->width, count = high - low - 1;
    if (count < 1) return;
    draw(call, words[centre], state, &targets);
    for (int n = low; n < high; n++)
        if (n != centre) add(hidden, call->embedding + (int64_t)words[n] * width, width);
    for (int i = 0; i < width; i += LANES) STORE(hidden + i, LOAD(hidden + i) * (1.0f / (float)count));
    predict(&targets, hidden, gradient, width, lr, loss);
    for (int n = low; n < high; n++)
        if (n != centre) add(call->embedding + (int64_t)words[n] * width, gradient, width);
}

static void train_chunk(const Word2Vec *call, int64_t chunk, double *loss) {
    int32_t words[MAX_CHUNK];
    int64_t begin = chunk * call->chunk, end = begin + call->chunk < call->count ? begin + call->chunk : call->count;
    uint64_t state = seeded(call->seed, (uint64_t)chunk);
    int count = 0;
    for (int64_t at = begin; at < end; at++) {
        int32_t word = call->tokens[at];
        if (word < 0 || (random_bits(&state) >> 32) <= call->keep[word]) words[count++] = word;
    }
    float share = (float)((double)begin / (double)call->count);
    float lr = call->lr_start + (call->lr_end - call->lr_start) * share;
    for (int centre = 0; centre < count; centre++) {
        if (words[centre] < 0) continue;
        int reach = 1 + (int)((random_bits(&state) >> 32) % (uint64_t)call->window), low = centre, high = centre + 1;
        while (low > 0 && low > centre - reach && words[low - 1] >= 0) low--;
        while (high < count && high <= centre + reach && words[high] >= 0) high++;
        (call->cbow ? cbow : skip_gram)(call, words, low, high, centre, &state, lr, loss);
    }
}

/* ---- GloVe */

/* Square roots, lane by lane. */
#if defined(__aarch64__)
static inline Vector sqrt_lanes(Vector v) { return (Vector)vsqrtq_f32((float32x4_t)v); }
#elif defined(__AVX512F__)
static inline Vector sqrt_lanes(Vector v) { return (Vector)_mm512_sqrt_ps((__m512)v); }
#elif defined(__AVX__)
static inline Vector sqrt_lanes(Vector v) { return (Vector)_mm256_sqrt_ps((__m256)v); }
#else
static inline Vector sqrt_lanes(Vector v) {
    for (int i = 0; i < LANES; i++) v[i] = sqrtf(v[i]);
    return v;
}
#endif

static inline Vector clip(Vector v) {
    const Vector high = (Vector){0} + CLIP;
    return max_lanes(-high, -max_lanes(-high, -v));
}

static inline void step_bias(float *bias, float *squares, float step) {
    *bias -= step / sqrtf(*squares);
    *squares += step * step;
}

/* One AdaGrad step on f(X) (w · c + b + b' − log X)² / 2. The learning rate is part of the squared steps, and their
 * sums begin at 1, as in the authors' code. */
static inline double glove_step(const GloVe *call, int32_t word, int32_t context, float log_count, float weight) {
    int width = call->width;
    float *w = call->words + (int64_t)word * width, *c = call->contexts + (int64_t)context * width;
    float *ws = call->word_squares + (int64_t)word * width, *cs = call->context_squares + (int64_t)context * width;
    float *w_bias = call->word_biases + 2 * (int64_t)word, *c_bias = call->context_biases + 2 * (int64_t)context;
    float tail = 0, difference = reduce(dot(w, c, width, &tail)) + *w_bias + *c_bias - log_count;
    float scale = weight * difference, step = call->lr * (scale > CLIP ? CLIP : scale < -CLIP ? -CLIP : scale);
    for (int i = 0; i < width; i += LANES) {
        Vector old_w = LOAD(w + i), old_c = LOAD(c + i), w_squares = LOAD(ws + i), c_squares = LOAD(cs + i);
        Vector to_w = call->lr * clip(scale * old_c), to_c = call->lr * clip(scale * old_w);
        STORE(w + i, old_w - to_w / sqrt_lanes(w_squares)), STORE(c + i, old_c - to_c / sqrt_lanes(c_squares));
        STORE(ws + i, w_squares + to_w * to_w), STORE(cs + i, c_squares + to_c * to_c);
    }
    step_bias(w_bias, w_bias + 1, step), step_bias(c_bias, c_bias + 1, step);
    return 0.5 * (double)scale * (double)difference;
}

static void glove_chunk(const GloVe *call, int64_t chunk, int64_t size, double *loss) {
    int64_t end = (chunk + 1) * size < call->count ? (chunk + 1) * size : call->count;
    for (int64_t at = chunk * size; at < end; at++) {
        int32_t a = call->first[at], b = call->second[at];
        if (at + 2 < end) {
            int width = call->width;
            int64_t next = (int64_t)call->first[at + 2] * width, other = (int64_t)call->second[at + 2] * width;
            prefetch_row(call->words + next, width), prefetch_row(call->word_squares + next, width);
            prefetch_row(call->contexts + next, width), prefetch_row(call->context_squares + next, width);
            prefetch_row(call->words + other, width), prefetch_row(call->word_squares + other, width);
            prefetch_row(call->contexts + other, width), prefetch_row(call->context_squares + other, width);
        }
        loss[0] += glove_step(call, a, b, call->log_count[at], call->weight[at]), loss[1] += 1;
        if (a != b) loss[0] += glove_step(call, b, a, call->log_count[at], call->weight[at]), loss[1] += 1;
    }
}

/* ---- work sharing: threads take the next chunk until all of [first, last) are done */

#define MEASURED 16 /* one chunk of this many measures its loss */
#define PAIRS 8192  /* pairs of a chunk in GloVe */

typedef struct {
    const void *call;
    int64_t last;
    atomic_llong next;
    pthread_mutex_t lock;
    double *loss;
    int is_glove;
} Job;

static void work(void *argument, int thread, int threads) {
    Job *job = argument;
    double loss[2] = {0};
    (void)thread, (void)threads;
    for (;;) {
        int64_t chunk = atomic_fetch_add(&job->next, 1);
        if (chunk >= job->last) break;
        if (job->is_glove) glove_chunk(job->call, chunk, PAIRS, loss);
        else train_chunk(job->call, chunk, chunk % MEASURED ? 0 : loss);
    }
    pthread_mutex_lock(&job->lock);
    job->loss[0] += loss[0], job->loss[1] += loss[1];
    pthread_mutex_unlock(&job->lock);
}

static void run(const void *call, double *loss, int is_glove, int64_t first, int64_t last, int threads) {
    Job job = {.call = call, .last = last, .lock = PTHREAD_MUTEX_INITIALIZER, .loss = loss, .is_glove = is_glove};
    atomic_init(&job.next, first);
    run_parallel(work, &job, threads);
}

void weft_word2vec(const Word2Vec *call, int64_t first, int64_t last, int threads) {
    run(call, call->loss, 0, first, last, threads);
}

void weft_glove(const GloVe *call, int64_t first, int64_t last, int threads) {
    run(call, call->loss, 1, first, last, threads);
}
