/* log Σ eˣ of each row of a matrix. */
#pragma once

#include "threads.h"
#include "vectors.h"

#define EXP_BLOCK 256 /* exponentials summed in float32; sums of blocks are added in float64 */

typedef struct {
    const float *x;
    float *y;
    int64_t rows, columns, stride;
} LogSumExp;

static float logsumexp(const float *x, int64_t n) {
    Vector maxima = (Vector){0} - INFINITY;
    float max = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) maxima = max_lanes(LOAD(x + i), maxima);
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int j = 0; j < LANES; j++) max = maxima[j] > max ? maxima[j] : max;
    if (max == -INFINITY) return max;
    double sum = 0;
    for (i = 0; i < n;) {
        int64_t end = i + EXP_BLOCK < n ? i + EXP_BLOCK : n;
        Vector s[ACCUMULATORS] = {0};
        for (; i + ACCUMULATORS * LANES <= end; i += ACCUMULATORS * LANES)
            for (int j = 0; j < ACCUMULATORS; j++) s[j] += exp_nonpositive(LOAD(x + i + j * LANES) - max);
        for (; i + LANES <= end; i += LANES) s[0] += exp_nonpositive(LOAD(x + i) - max);
        sum += reduce(sum_accumulators(s));
        for (; i < end; i++) sum += exp((double)x[i] - max);
    }
    return max + (float)log(sum);
}

static void logsumexp_rows(void *argument, int thread, int threads) {
    LogSumExp *l = argument;
    for (int row = share_start(l->rows, thread, threads); row < share_start(l->rows, thread + 1, threads); row++)
        l->y[row] = logsumexp(l->x + row * l->stride, l->columns);
}

/* log Σ eˣ of each row of x (rows, columns), whose rows are `stride` apart → y (rows). */
void weft_logsumexp(const float *x, int64_t rows, int64_t columns, int64_t stride, float *y, int threads) {
    LogSumExp l = {x, y, rows, columns, stride};
    run_parallel(logsumexp_rows, &l, threads);
}
