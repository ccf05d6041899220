/* What Python calls: the passes of kernels.c in the widest form that this processor has. */
#include "variant.h"

#include <stddef.h>

extern const variant_t variant_plain;
#ifdef LRMOE_X86
extern const variant_t variant_avx2, variant_avx512;
#endif

#define PUBLIC __attribute__((visibility("default")))
#define STRING(text) STRING_OF(text)
#define STRING_OF(text) #text

static const variant_t *chosen = &variant_plain;

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
    chosen = all[level];
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
