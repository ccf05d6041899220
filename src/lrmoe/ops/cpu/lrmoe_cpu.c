/* What Python calls: the passes of kernels.c and choose.c in the widest form that this processor has. */
#include "sums.h"
#include "variant.h"

#include <stddef.h>

extern const variant_t variant_plain;
extern const choices_t choices_plain;
#ifdef LRMOE_X86
extern const variant_t variant_avx2, variant_avx512;
extern const choices_t choices_avx2, choices_avx512;
#endif

#define PUBLIC __attribute__((visibility("default")))
#define STRING(text) STRING_OF(text)
#define STRING_OF(text) #text

static const variant_t *chosen = &variant_plain;
static const choices_t *choices = &choices_plain;

/* The checksum of the sources that this was built from. */
PUBLIC const char *lrmoe_sources(void) { return STRING(LRMOE_SOURCES); }

/* Take the widest instruction set up to `most` (0 plain, 1 AVX2, 2 AVX-512) that the processor has; returns it. */
PUBLIC int lrmoe_choose(int most) {
    int level = 0;
#ifdef LRMOE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) level = 1;
    if (level == 1 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        level = 2;
    level = most < level ? most : level;
    const variant_t *all[] = {&variant_plain, &variant_avx2, &variant_avx512};
    const choices_t *all_choices[] = {&choices_plain, &choices_avx2, &choices_avx512};
    chosen = all[level];
    choices = all_choices[level];
#endif
    return level;
}

PUBLIC void lrmoe_gate(int kind, int format, char *h, int64_t h_stride, char *phi, int64_t phi_stride, float *norms,
                       int64_t rows, int64_t width, int threads) {
    chosen->gate(kind, format, (rows_t){h, h_stride}, (rows_t){phi, phi_stride}, norms, rows, width, threads);
}


PUBLIC void lrmoe_norms(int format, char *data, int64_t stride, float *norms, int64_t rows, int64_t width,
                        int threads) {
    chosen->norms(format, (rows_t){data, stride}, norms, rows, width, threads);
}

static int outside(const int64_t *index, int64_t count, int64_t limit) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found |= index[i] < 0 || index[i] >= limit;
    return found;
}

/* Returns 0, or 1 (nothing written) where an index names none of the `count` rows of h. */
PUBLIC int lrmoe_gate_backward(int kind, int format, char *dphi, int64_t dphi_stride, char *h, int64_t h_stride,
                               int64_t count, const int64_t *index, const float *scale, char *dh, int64_t dh_stride,
                               float *dot, int64_t rows, int64_t width, int threads) {
    if (index != NULL && outside(index, rows, count)) return 1;
    chosen->gate_backward(kind, format, (rows_t){dphi, dphi_stride}, (rows_t){h, h_stride}, index, scale,
                          (rows_t){dh, dh_stride}, dot, rows, width, threads);
    return 0;
}

/* Returns 0, or 1 (nothing written) where an index names no row or an end no entry. */
PUBLIC int lrmoe_combine(int format, char *rows, int64_t stride, int64_t count, const int64_t *index, int64_t entries,
                         const int64_t *ends, const float *weight, char *out, int64_t out_stride, int64_t tokens,
                         int64_t width, int threads) {
    if (outside(index, entries, count) || outside(ends, tokens, entries + 1)) return 1;
    chosen->combine(format, (rows_t){rows, stride}, index, ends, weight, (rows_t){out, out_stride}, tokens, width,
                    threads);
    return 0;
}

/* First row of each expert; returns 0, or 1 where counts are negative or not of `rows` in all. */
static int starts(const int64_t *counts, int64_t experts, int64_t rows, int64_t *start) {
    int64_t end = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (counts[e] < 0 || counts[e] > rows - end) return 1;
        start[e] = end;
        end += counts[e];
    }
    return end != rows;
}

/* Inclusion probabilities of `rows` rows, expert after expert. start, size: room for as many numbers as there are experts
 * and rows. Returns 0, or 1 (nothing computed) where counts do not fit. */
PUBLIC int lrmoe_inclusion(const float *score, int64_t rows, const int64_t *counts, const int64_t *quotas,
                           int64_t experts, double unit, double top, double broken, double floor, int64_t *start,
                           double *size, double *chance, int threads) {
    if (starts(counts, experts, rows, start)) return 1;
    choices->inclusion(score, rows, (experts_t){experts, start, counts}, quotas, (units_t){unit, top, broken, floor},
                       size, chance, threads);
    return 0;
}

/* The systematic sample: 1/pi where a row is kept, else 0, and four costs of every expert: energy, what is left out of
 * it, added variance, rows of non-finite score. Room and result as above; `bits` of a unit. */
PUBLIC int lrmoe_keep(const float *score, int64_t rows, const int64_t *counts, const int64_t *quotas, int64_t experts,
                      double unit, double top, double broken, double floor, int64_t *start, double *size,
                      double *chance, const int64_t *offsets, int bits, float *weight, double *costs, int threads) {
    if (starts(counts, experts, rows, start)) return 1;
    choices->keep(score, rows, (experts_t){experts, start, counts}, quotas, offsets,
                  (units_t){unit, top, broken, floor}, bits, size, chance, weight, costs, threads);
    return 0;
}

/* See score_sums; start as above. Returns 0, or 1 (nothing computed) where counts do not fit. */
PUBLIC int lrmoe_score_sums(const float *score, int64_t rows, const int64_t *counts, int64_t experts, int64_t most,
                            int64_t bins, int64_t lowest, const double *past, double decay, int64_t *start,
                            double *sums, int threads) {
    if (starts(counts, experts, rows, start)) return 1;
    score_sums(score, rows, (experts_t){experts, start, counts}, most, bins, lowest, past, decay, sums, threads);
    return 0;
}

/* See token_entries. */
PUBLIC int lrmoe_token_entries(const int64_t *pair, int64_t rows, int64_t tokens, int64_t slots, int32_t *place,
                               int64_t *row, int64_t *sorted, int64_t *ends) {
    return token_entries(pair, rows, tokens, slots, place, row, sorted, ends);
}
