/* Normalisers: log Σ eˣ. */
#pragma once

#include "threads.h"
#include "vectors.h"

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
