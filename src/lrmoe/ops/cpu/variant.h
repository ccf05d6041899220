/* What one build of kernels.c offers; lrmoe_cpu.c holds one for each instruction set. */
#ifndef LRMOE_VARIANT_H
#define LRMOE_VARIANT_H

#include <stdint.h>

enum { SILU = 0, GELU = 1, GELU_TANH = 2 };

/* Rows of a matrix: address, distance of rows in bytes. */
typedef struct {
    char *data;
    int64_t stride;
} rows_t;

typedef struct {
    void (*gate)(int kind, int format, rows_t h, rows_t phi, float *norms, int64_t rows, int64_t width, int threads);
    void (*gate_backward)(int kind, int format, rows_t dphi, rows_t h, const int64_t *index, const float *scale,
                          rows_t dh, float *dot, int64_t rows, int64_t width, int threads);
    void (*combine)(int format, rows_t rows, const int64_t *index, const int64_t *ends, const float *weight,
                    rows_t out, int64_t tokens, int64_t width, int threads);
    void (*norms)(int format, rows_t rows, float *norms, int64_t count, int64_t width, int threads);
} variant_t;

#endif
