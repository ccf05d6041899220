/* What one build of kernels.c and of choose.c offers; lrmoe_cpu.c holds one for each instruction set. */
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

/* Experts beside each other: how many, first row and rows of each. */
typedef struct {
    int64_t count;
    const int64_t *start, *rows;
} experts_t;

/* Fixed-point numbers: a probability of 1, an expert's largest score, a row of non-finite score, the least score over
 * the expert's mean. */
typedef struct {
    double unit, top, broken, floor;
} units_t;

typedef struct {
    void (*inclusion)(const float *score, int64_t rows, experts_t experts, const int64_t *quotas, units_t units,
                      double *size, double *chance, int threads);
    void (*keep)(const float *score, int64_t rows, experts_t experts, const int64_t *quotas, const int64_t *offsets,
                 units_t units, int bits, double *size, double *chance, float *weight, double *costs, int threads);
} choices_t;

#endif
