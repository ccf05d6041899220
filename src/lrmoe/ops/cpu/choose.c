/* Chances, samples and weights of rows, one expert after the other: bit for bit what lrmoe/layer/single.py computes.
 * Sizes and chances are whole numbers in doubles, their sums whole numbers in 64 bits, so the order does not matter; sums
 * of costs go to LANES that the code names. Built once for each instruction set (CHOICES names the table). */
#include "variant.h"

#include <float.h>
#include <stddef.h>
#include <stdint.h>

#define WORTH_A_TEAM 8192 /* rows from which on more than one thread pays */
#define LANES 8
#define TILE 64

static inline int finite(float value) { return value - value == 0.0f; }

static inline double whole(double value) { return __builtin_floor(value); }

static inline int64_t floored(int64_t value, int64_t by) {
    int64_t found = value / by;
    return found - (value % by != 0 && (value < 0) != (by < 0));
}

/* Scores over the largest, as whole numbers >= 1; returns how many are not finite. */
static int64_t sizes(const float *restrict score, int64_t rows, units_t units, double *restrict size) {
    int64_t broken = 0, sum = 0;
    double top = -DBL_MAX;
#pragma omp simd reduction(max : top) reduction(+ : broken)
    for (int64_t i = 0; i < rows; i++) {
        int known = finite(score[i]);
        broken += !known;
        size[i] = known ? score[i] : 0.0;
        top = size[i] > top ? size[i] : top;
    }
    top = top > 0.0 ? top : 1.0;
    for (int64_t i = 0; i < rows; i++) {
        size[i] = whole(size[i] / top * units.top);
        sum += (int64_t)size[i];
    }
    int64_t least = (int64_t)((double)floored(sum, rows) * units.floor);
    double floor = least > 1 ? (double)least : 1.0;
    for (int64_t i = 0; i < rows; i++) size[i] = size[i] < floor ? floor : size[i];
    return broken;
}

/* Rounds the free chances so that they sum to the free quota exactly: down first, then single units in order. */
static void fixed_point(const double *restrict size, int64_t rows, int64_t left, units_t units,
                        double *restrict chance) {
    int64_t sum = 0, free = 0;
    for (int64_t i = 0; i < rows; i++) {
        chance[i] = whole(chance[i] * (units.unit - 2.0));
        sum += (int64_t)chance[i];
        free += size[i] != 0.0;
    }
    int64_t missing = left * (int64_t)units.unit - sum, among = free > 1 ? free : 1;
    int64_t each = floored(missing, among), rest = missing - each * among, more = 0;
    for (int64_t seen = 0; more < rows && seen < rest; more++) seen += size[more] != 0.0;
    for (int64_t i = 0; i < rows; i++) {
        double found = chance[i] + (double)each + (i < more ? 1.0 : 0.0);
        chance[i] = size[i] == 0.0 || found > units.unit ? units.unit : found;
    }
}

static void chances(const float *restrict score, int64_t rows, int64_t quota, units_t units, double *restrict size,
                    double *restrict chance) {
    if (quota >= rows) {
        for (int64_t i = 0; i < rows; i++) chance[i] = units.unit;
        return;
    }
    int64_t left = quota, broken = sizes(score, rows, units, size);
    if (broken) {
        double instead = broken <= quota ? 0.0 : units.broken; /* 0 from here on: certain */
        left -= broken <= quota ? broken : 0;
        for (int64_t i = 0; i < rows; i++) size[i] = finite(score[i]) ? size[i] : instead;
    }
    for (int64_t fresh = 1; fresh;) {
        int64_t sum = 0;
        for (int64_t i = 0; i < rows; i++) sum += (int64_t)size[i];
        double ratio = (double)left / (double)(sum > 1 ? sum : 1);
        fresh = 0;
        for (int64_t i = 0; i < rows; i++) {
            chance[i] = size[i] * ratio;
            fresh += chance[i] >= 1.0;
        }
        if (fresh) {
            left -= fresh;
            for (int64_t i = 0; i < rows; i++) size[i] = chance[i] >= 1.0 ? 0.0 : size[i];
        }
    }
    fixed_point(size, rows, left, units, chance);
}

static double total_of(const double *sum) {
    double total = 0.0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    return total;
}

/* Up to TILE rows of an expert: 1/pi where the running sum of chances passes a whole unit, else 0; their costs. */
static int64_t weigh(const float *restrict score, const double *restrict chance, int64_t n, int64_t total,
                     units_t units, int bits, float *restrict weight, double sum[4][LANES]) {
    int64_t step[TILE] = {0}, upto[TILE + 1];
    double inverse[TILE], kept[TILE], energy[TILE] = {0}, lost[TILE] = {0};
    for (int64_t i = 0; i < n; i++) step[i] = (int64_t)chance[i];
    upto[0] = total;
    for (int i = 0; i < TILE; i++) upto[i + 1] = upto[i] + step[i];
    for (int i = 0; i < TILE; i++) kept[i] = (double)((upto[i + 1] >> bits) - (upto[i] >> bits));
    for (int i = 0; i < TILE; i++) inverse[i] = 1.0 / (double)(step[i] > 1 ? step[i] : 1) * units.unit;
    for (int64_t i = 0; i < n; i++) {
        double known = finite(score[i]) ? score[i] : 0.0;
        weight[i] = (float)(inverse[i] * kept[i]);
        energy[i] = known * known;
        lost[i] = finite(score[i]) ? 0.0 : 1.0;
    }
    for (int i = 0; i < TILE; i += LANES)
        for (int l = 0; l < LANES; l++) {
            sum[0][l] += energy[i + l];
            sum[1][l] += energy[i + l] - energy[i + l] * kept[i + l];
            sum[2][l] += (inverse[i + l] - 1.0) * energy[i + l];
            sum[3][l] += lost[i + l];
        }
    return upto[TILE];
}

static void keep_of_expert(const float *restrict score, const double *restrict chance, int64_t rows, int64_t offset,
                           units_t units, int bits, float *restrict weight, double *restrict costs) {
    double sum[4][LANES] = {{0}};
    int64_t total = offset;
    for (int64_t at = 0; at < rows; at += TILE) {
        int64_t n = rows - at < TILE ? rows - at : TILE;
        total = weigh(score + at, chance + at, n, total, units, bits, weight + at, sum);
    }
    for (int c = 0; c < 4; c++) costs[c] = total_of(sum[c]);
}

static void inclusion(const float *score, int64_t rows, experts_t experts, const int64_t *quotas, units_t units,
                      double *size, double *chance, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows >= WORTH_A_TEAM && threads > 1)
    for (int64_t e = 0; e < experts.count; e++) {
        int64_t at = experts.start[e];
        chances(score + at, experts.rows[e], quotas[e], units, size + at, chance + at);
    }
}

static void keep(const float *score, int64_t rows, experts_t experts, const int64_t *quotas, const int64_t *offsets,
                 units_t units, int bits, double *size, double *chance, float *weight, double *costs, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows >= WORTH_A_TEAM && threads > 1)
    for (int64_t e = 0; e < experts.count; e++) {
        int64_t at = experts.start[e], n = experts.rows[e];
        chances(score + at, n, quotas[e], units, size + at, chance + at);
        keep_of_expert(score + at, chance + at, n, offsets[e], units, bits, weight + at, costs + 4 * e);
    }
}

const choices_t CHOICES = {inclusion, keep};
