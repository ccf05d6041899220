/* Tiles of 64 numbers in fp32: loads and stores of every row format, and the elementary functions.
 *
 * All loops over a tile have a constant length and independent steps, so that the compiler turns them into vector
 * instructions of whatever width it is asked for. No sum is ever reordered by the compiler: what depends on the order
 * (sums over a row) is written out, so a row's result depends on nothing but the row.
 */
#ifndef LRMOE_LANES_H
#define LRMOE_LANES_H

#include <stdint.h>

#define TILE 64
#define LANES 16

enum { F32 = 0, BF16 = 1 };

#ifdef __FMA__
#define MADD(a, b, c) __builtin_fmaf((a), (b), (c))
#else
#define MADD(a, b, c) ((a) * (b) + (c))
#endif

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float of_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float widened(uint16_t bits) { return of_bits((uint32_t)bits << 16); }

/* Nearest bf16, ties to even; NaN stays NaN. */
static inline uint16_t narrowed(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

/* Numbers `at` to `at + n` of a row, zeros after them. */
static inline void load(float *restrict tile, const void *restrict row, int64_t at, int64_t n, int format) {
    if (n < TILE)
        for (int i = 0; i < TILE; i++) tile[i] = 0.0f;
    if (format == F32) {
        const float *from = (const float *)row + at;
        if (n == TILE)
            for (int i = 0; i < TILE; i++) tile[i] = from[i];
        else
            for (int64_t i = 0; i < n; i++) tile[i] = from[i];
    } else {
        const uint16_t *from = (const uint16_t *)row + at;
        if (n == TILE)
            for (int i = 0; i < TILE; i++) tile[i] = widened(from[i]);
        else
            for (int64_t i = 0; i < n; i++) tile[i] = widened(from[i]);
    }
}

static inline void store(const float *restrict tile, void *restrict row, int64_t at, int64_t n, int format) {
    if (format == F32) {
        float *to = (float *)row + at;
        if (n == TILE)
            for (int i = 0; i < TILE; i++) to[i] = tile[i];
        else
            for (int64_t i = 0; i < n; i++) to[i] = tile[i];
    } else {
        uint16_t *to = (uint16_t *)row + at;
        if (n == TILE)
            for (int i = 0; i < TILE; i++) to[i] = narrowed(tile[i]);
        else
            for (int64_t i = 0; i < n; i++) to[i] = narrowed(tile[i]);
    }
}

/* The tile as it reads back after a store. */
static inline void as_stored(float *restrict tile, int format) {
    if (format == BF16)
        for (int i = 0; i < TILE; i++) tile[i] = widened(narrowed(tile[i]));
}

/* sum[l] += a[i] * b[i] over the i of lane l. */
static inline void add_products(float *restrict sum, const float *a, const float *b) {
    for (int i = 0; i < TILE; i += LANES)
        for (int l = 0; l < LANES; l++) sum[l] = MADD(a[i + l], b[i + l], sum[l]);
}

static inline float total_of(const float *sum) {
    float half[LANES];
    for (int l = 0; l < LANES; l++) half[l] = sum[l];
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int l = 0; l < step; l++) half[l] += half[l + step];
    return half[0];
}

/* e^x: x = n ln 2 + r with |r| <= ln 2 / 2, Taylor's polynomial to r^7 (relative error 5e-9 before rounding), 2^n in two
 * factors so that results up to the largest float come out; 0 below 2^-125, infinity above the largest float. */
static inline float exponential(float x) {
    const float least = -86.643394f, most = 89.0f, magic = 12582912.0f; /* 1.5 * 2^23 */
    float low = x < least ? least : x; /* comparisons with NaN are false: NaN stays */
    float c = low > most ? most : low;
    float shifted = MADD(c, 1.44269504f, magic);
    float n = shifted - magic;
    float r = MADD(n, -0.693145752f, c);
    r = MADD(n, -1.42860682e-06f, r);
    float p = 1.98412698e-04f;
    p = MADD(p, r, 1.38888889e-03f);
    p = MADD(p, r, 8.33333333e-03f);
    p = MADD(p, r, 4.16666667e-02f);
    p = MADD(p, r, 1.66666667e-01f);
    p = MADD(p, r, 0.5f);
    p = MADD(p, r, 1.0f);
    p = MADD(p, r, 1.0f);
    float half_power = of_bits((bits_of(shifted) << 23) + (126u << 23)); /* 2^(n - 1) */
    float found = p * half_power * 2.0f;
    return x < least ? 0.0f : found;
}

/* 1 / (1 + e^-x). */
static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

#endif
