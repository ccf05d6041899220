/* Chances and samples of rows, one expert after the other: bit for bit what lrmoe/layer/single.py computes. Sizes and
 * chances are whole numbers in doubles, sums whole numbers in 64 bits, so their order does not matter. */
#include <float.h>
#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))
#define WORTH_A_TEAM 8192 /* rows from which on more than one thread pays */

/* Fixed-point numbers: a probability of 1, an expert's largest score, a row of non-finite score, the least score over
 * the expert's mean. */
typedef struct {
    double unit, top, broken, floor;
} units_t;

static inline int finite(float value) { return value - value == 0.0f; }

static inline double whole(double value) { return __builtin_floor(value); }

static inline int64_t floored(int64_t value, int64_t by) {
    int64_t found = value / by;
    return found - (value % by != 0 && (value < 0) != (by < 0));
}

/* Scores over the largest, as whole numbers >= 1; returns how many are not finite. */
static int64_t sizes(const float *score, int64_t rows, units_t units, double *size) {
    int64_t broken = 0, sum = 0;
    double top = -DBL_MAX;
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
static void fixed_point(const double *size, int64_t rows, int64_t left, units_t units, double *chance) {
    int64_t sum = 0, free = 0, seen = 0;
    for (int64_t i = 0; i < rows; i++) {
        chance[i] = whole(chance[i] * (units.unit - 2.0));
        sum += (int64_t)chance[i];
        free += size[i] != 0.0;
    }
    int64_t missing = left * (int64_t)units.unit - sum, among = free > 1 ? free : 1;
    int64_t each = floored(missing, among), rest = missing - each * among;
    for (int64_t i = 0; i < rows; i++) {
        double more = chance[i] + (double)each + (seen < rest ? 1.0 : 0.0);
        seen += size[i] != 0.0;
        chance[i] = size[i] == 0.0 || more > units.unit ? units.unit : more;
    }
}

static void of_expert(const float *score, int64_t rows, int64_t quota, units_t units, double *size, double *chance) {
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

static void kept_of_expert(const double *chance, int64_t rows, int64_t offset, int bits, double *kept) {
    int64_t total = offset, before = 0;
    for (int64_t i = 0; i < rows; i++) {
        total += (int64_t)chance[i];
        kept[i] = (double)((total >> bits) - before);
        before = total >> bits;
    }
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

/* Inclusion probabilities of `rows` rows, expert after expert. size, start: room for as many numbers as there are rows
 * and experts. Returns 0, or 1 (nothing computed) where counts do not fit. */
PUBLIC int lrmoe_inclusion(const float *score, int64_t rows, const int64_t *counts, const int64_t *quotas,
                           int64_t experts, double unit, double top, double broken, double floor, int64_t *start,
                           double *size, double *chance, int threads) {
    if (starts(counts, experts, rows, start)) return 1;
    units_t units = {unit, top, broken, floor};
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows >= WORTH_A_TEAM && threads > 1)
    for (int64_t e = 0; e < experts; e++)
        of_expert(score + start[e], counts[e], quotas[e], units, size + start[e], chance + start[e]);
    return 0;
}

/* The systematic sample, 1 where a row is kept: where the running sum of chances passes a whole unit. */
PUBLIC int lrmoe_sample(const double *chance, int64_t rows, const int64_t *counts, const int64_t *offsets,
                        int64_t experts, int bits, int64_t *start, double *kept, int threads) {
    if (starts(counts, experts, rows, start)) return 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows >= WORTH_A_TEAM && threads > 1)
    for (int64_t e = 0; e < experts; e++)
        kept_of_expert(chance + start[e], counts[e], offsets[e], bits, kept + start[e]);
    return 0;
}
