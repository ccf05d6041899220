/* What sums.c offers. */
#ifndef LRMOE_SUMS_H
#define LRMOE_SUMS_H

#include "variant.h"

/* Sums over the scores of each expert, 3 + 2 * bins each, of one row in so many that `most` or fewer are read. Where past
 * sums are given, decay * past + these for experts that have any, and the past for the others. */
void score_sums(const float *score, int64_t rows, experts_t experts, int64_t most, int64_t bins, int64_t lowest,
                const double *past, double decay, double *sums, int threads);

/* Rows of each token in slot order; `place` has room for a number a slot. Returns 0, or 1 where a pair is out of range or
 * comes twice. */
int token_entries(const int64_t *pair, int64_t rows, int64_t tokens, int64_t slots, int32_t *place, int64_t *row,
                  int64_t *sorted, int64_t *ends);

#endif
