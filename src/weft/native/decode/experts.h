/* The router of a mixture of experts: which experts read a token, and with what weights (`nn/experts.py`). */
#pragma once

#include "attention.h"

enum { SOFTMAX, SOFTMAX_CHOSEN, SIGMOID };

static void softmax(float *x, int n) {
    float max = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int i = 0; i < n; i++) sum += x[i] = expf(x[i] - max);
    for (int i = 0; i < n; i++) x[i] /= sum;
}

/* Index of the largest of x. It is valid even if all are NaN. */
static inline int largest(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best] || (x[best] != x[best] && x[i] == x[i])) best = i;
    return best;
}

/* Exclude the experts outside the best groups from `ranked`. */
static void keep_groups(const Experts *e, float *ranked) {
    int size = e->experts / e->groups;
    float score[e->groups];
    for (int g = 0; g < e->groups; g++) {
        const float *group = ranked + g * size;
        int best = largest(group, size);
        score[g] = group[best];
        float second = -INFINITY;
        for (int i = 0; i < size; i++) second = i != best && group[i] > second ? group[i] : second;
        if (e->best_two) score[g] += second;
    }
    char kept[e->groups];
    memset(kept, 0, e->groups);
    for (int k = 0; k < e->kept_groups; k++) {
        int best = largest(score, e->groups);
        kept[best] = 1, score[best] = NAN;
    }
    for (int i = 0; i < e->experts; i++)
        if (!kept[i / size]) ranked[i] = NAN;
}

/* Choose experts by a token's logits, which are overwritten → their numbers and weights. `ranked` holds as many. */
static void choose(const Experts *e, float *logits, float *ranked, int32_t *numbers, float *weights) {
    int n = e->experts;
    if (e->score == SOFTMAX) softmax(logits, n);
    for (int i = 0; e->score == SIGMOID && i < n; i++) logits[i] = 1.0f / (1.0f + expf(-logits[i]));
    for (int i = 0; i < n; i++) ranked[i] = logits[i] + (e->choice_bias ? e->choice_bias[i] : 0);
    if (e->kept_groups < e->groups) keep_groups(e, ranked);
    float sum = 0;
    for (int k = 0; k < e->chosen; k++) {
        int best = largest(ranked, n);
        numbers[k] = best, weights[k] = logits[best], ranked[best] = NAN;
        sum += weights[k];
    }
    if (e->score == SOFTMAX_CHOSEN) softmax(weights, e->chosen);
    float factor = e->scale / (e->score != SOFTMAX_CHOSEN && e->renormalised ? sum + 1e-20f : 1.0f);
    for (int k = 0; k < e->chosen; k++) weights[k] *= factor;
}

/* The choices of all rows sorted by expert: those of expert e are [begin[e], begin[e + 1]). */
typedef struct {
    int32_t *begin, *row; /* (experts + 1), (rows · chosen): the row that each choice belongs to */
    float *weight;        /* (rows · chosen) */
} Assignment;

static Assignment sort_by_expert(const Experts *e, const int32_t *numbers, const float *weights, int rows, void *to) {
    int count = rows * e->chosen;
    Assignment a = {to, (int32_t *)to + e->experts + 1, (float *)to + e->experts + 1 + count};
    memset(a.begin, 0, 4 * (size_t)(e->experts + 1));
    for (int i = 0; i < count; i++) a.begin[numbers[i] + 1]++;
    for (int n = 0; n < e->experts; n++) a.begin[n + 1] += a.begin[n];
    for (int i = 0; i < count; i++) {
        int at = a.begin[numbers[i]]++;
        a.row[at] = i / e->chosen, a.weight[at] = weights[i];
    }
    for (int n = e->experts; n > 0; n--) a.begin[n] = a.begin[n - 1];
    a.begin[0] = 0;
    return a;
}
