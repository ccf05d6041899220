/* What a call's scores teach, and the rows of each token: sums and lists in the order of the rows, whoever computes them.
 * Integers and sums one after the other, which no wider instructions would help. */
#include "sums.h"

#include <stddef.h>

#define WORTH_A_TEAM 8192 /* rows from which on more than one thread pays */

static inline int finite(float value) { return value - value == 0.0f; }

/* The bin of a score over the mean, as frexp's exponent says; the ends take what lies beyond, the first one zeros. */
static inline int64_t bin_of(double relative, int64_t bins, int64_t lowest) {
    int64_t bits;
    __builtin_memcpy(&bits, &relative, sizeof bits);
    int64_t octave = ((bits >> 52) & 0x7ff) - 1022 - (1 + lowest);
    octave = octave < bins - 1 ? octave : bins - 1;
    return relative > 0.0 && octave > 0 ? octave : 0;
}

/* Of every `step`-th row: pairs, scores, squared scores, then pairs by bin and scores over the mean by bin. */
static void of_expert(const float *score, int64_t rows, int64_t step, int64_t bins, int64_t lowest, double *sums) {
    double pairs = 0.0, scores = 0.0, squares = 0.0;
    for (int64_t i = 0; i < 3 + 2 * bins; i++) sums[i] = 0.0;
    for (int64_t i = 0; i < rows; i += step) {
        double known = finite(score[i]) ? score[i] : 0.0;
        pairs += finite(score[i]) ? 1.0 : 0.0;
        scores += known;
        squares += known * known;
    }
    double mean = scores / (pairs > 1.0 ? pairs : 1.0), over = mean > 0.0 ? mean : 1.0;
    for (int64_t i = 0; i < rows; i += step) {
        double relative = (finite(score[i]) ? score[i] : 0.0) / over;
        int64_t bin = 3 + bin_of(relative, bins, lowest);
        sums[bin] += finite(score[i]) ? 1.0 : 0.0;
        sums[bin + bins] += relative;
    }
    sums[0] = pairs, sums[1] = scores, sums[2] = squares;
    for (int64_t i = 0; i < 3 + 2 * bins; i++) sums[i] *= (double)step;
}

void score_sums(const float *score, int64_t rows, experts_t experts, int64_t most, int64_t bins, int64_t lowest,
                const double *past, double decay, double *sums, int threads) {
    int64_t columns = 3 + 2 * bins;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows >= WORTH_A_TEAM && threads > 1)
    for (int64_t e = 0; e < experts.count; e++) {
        int64_t n = experts.rows[e], step = n > most ? (n + most - 1) / most : 1;
        double *found = sums + e * columns;
        of_expert(score + experts.start[e], n, step, bins, lowest, found);
        if (past == NULL) continue;
        int seen = found[0] > 0.0 && found[1] > 0.0;
        for (int64_t i = 0; i < columns; i++) {
            double old = past[e * columns + i];
            found[i] = seen ? decay * old + found[i] : old;
        }
    }
}

int token_entries(const int64_t *pair, int64_t rows, int64_t tokens, int64_t slots, int32_t *place, int64_t *row,
                  int64_t *sorted, int64_t *ends) {
    for (int64_t i = 0; i < tokens * slots; i++) place[i] = -1;
    for (int64_t i = 0; i < rows; i++) {
        if (pair[i] < 0 || pair[i] >= tokens * slots || place[pair[i]] >= 0) return 1;
        place[pair[i]] = (int32_t)i;
    }
    int64_t found = 0;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t at = t * slots; at < (t + 1) * slots; at++) {
            if (found == rows) break;
            row[found] = place[at];
            sorted[found] = at;
            found += place[at] >= 0;
        }
        ends[t] = found;
    }
    return 0;
}
