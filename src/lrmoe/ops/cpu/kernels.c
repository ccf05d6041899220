/* Passes over rows, one row after the other inside a thread: a row's result does not depend on how many there are, on
 * where they lie or on the number of threads. Built once for each instruction set (VARIANT names the table). */
#include "lanes.h"
#include "variant.h"

#include <stddef.h>

/* A pass of fewer numbers than this takes one thread: waking others would cost more. Any other pass takes all of them:
 * a team that shrank would end threads, and one that grew start new ones. */
#define WORTH_A_TEAM 32768

/* Runs `of_row` for every row, consecutive rows in a thread. */
#define FOR_ROWS(row, rows, width)                                                                  \
    int team = (rows) * (width) < WORTH_A_TEAM ? 1 : threads;                                       \
    _Pragma("omp parallel for schedule(static) num_threads(team) if (team > 1)")                    \
    for (int64_t row = 0; row < (rows); row++)

static inline char *at_row(rows_t rows, int64_t row) { return rows.data + row * rows.stride; }

#define AHEAD 4 /* rows that are asked for before they are read, where they lie apart */

static inline void fetch(const char *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

/* Chance that a standard normal number lies below -z, z >= 0, over e^(-z^2/2): t = 1 / (1 + z/4) times a polynomial in
 * t, fitted to the least largest relative error, 4e-8. */
static inline float tail_ratio(float z) {
    float t = 1.0f / MADD(z, 0.25f, 1.0f);
    float p = 0.0203826874f;
    p = MADD(p, t, -0.0835399628f);
    p = MADD(p, t, 0.100542121f);
    p = MADD(p, t, -0.0367152989f);
    p = MADD(p, t, 0.0666876063f);
    p = MADD(p, t, 0.0578983389f);
    p = MADD(p, t, 0.0818311349f);
    p = MADD(p, t, 0.093439959f);
    p = MADD(p, t, 0.0997378677f);
    p = MADD(p, t, 0.0997355431f);
    return p * t;
}

/* act(x), and its derivative where asked for. */
static inline void activation(int kind, const float *restrict x, float *restrict act, float *restrict slope) {
    if (kind == SILU) {
        for (int i = 0; i < TILE; i++) {
            float s = sigmoid(x[i]);
            act[i] = x[i] * s;
            if (slope != NULL) slope[i] = s * MADD(x[i], 1.0f - s, 1.0f);
        }
    } else if (kind == GELU) {
        for (int i = 0; i < TILE; i++) {
            float bell = exponential(-0.5f * x[i] * x[i]);
            float above = bell * tail_ratio(__builtin_fabsf(x[i]));
            float below = x[i] < 0.0f ? above : 1.0f - above;
            act[i] = x[i] * below;
            if (slope != NULL) slope[i] = MADD(x[i] * 0.398942280f, bell, below);
        }
    } else {
        for (int i = 0; i < TILE; i++) {
            float square = x[i] * x[i];
            float e = exponential(-1.59576912f * x[i] * MADD(square, 0.044715f, 1.0f));
            float s = 1.0f / (1.0f + e);
            act[i] = x[i] * s;
            if (slope != NULL) {
                float rest = (e > 1e30f ? 1e30f : e) * s; /* 1 - s without its rounding; no infinity times 0 */
                float inner = 1.59576912f * MADD(square, 0.134145f, 1.0f);
                slope[i] = MADD(x[i] * s * rest, inner, s);
            }
        }
    }
}

static void gate(int kind, int format, rows_t h, rows_t phi, float *norms, int64_t rows, int64_t width, int threads) {
    FOR_ROWS(row, rows, width) {
        const char *from = at_row(h, row);
        char *to = at_row(phi, row);
        float squares[LANES] = {0};
        for (int64_t at = 0; at < width; at += TILE) {
            int64_t n = width - at < TILE ? width - at : TILE;
            float x[TILE], up[TILE], act[TILE];
            load(x, from, at, n, format);
            load(up, from, width + at, n, format);
            activation(kind, x, act, NULL);
            for (int i = 0; i < TILE; i++) act[i] *= up[i];
            store(act, to, at, n, format);
            if (norms != NULL) {
                as_stored(act, format);
                add_products(squares, act, act);
            }
        }
        if (norms != NULL) norms[row] = __builtin_sqrtf(total_of(squares));
    }
}

/* Row i reads h[index[i]], or h[i] without an index. */
static void gate_backward(int kind, int format, rows_t dphi, rows_t h, const int64_t *index, const float *scale,
                          rows_t dh, float *dot, int64_t rows, int64_t width, int threads) {
    int64_t size = format == F32 ? 4 : 2;
    FOR_ROWS(row, rows, width) {
        const char *from = at_row(h, index == NULL ? row : index[row]);
        if (index != NULL && row + AHEAD < rows) fetch(at_row(h, index[row + AHEAD]), 2 * width * size);
        char *grad = at_row(dphi, row), *to = at_row(dh, row);
        float products[LANES] = {0}, factor = scale[row];
        for (int64_t at = 0; at < width; at += TILE) {
            int64_t n = width - at < TILE ? width - at : TILE;
            float x[TILE], up[TILE], d[TILE], act[TILE], slope[TILE];
            load(x, from, at, n, format);
            load(up, from, width + at, n, format);
            load(d, grad, at, n, format);
            activation(kind, x, act, slope);
            for (int i = 0; i < TILE; i++) {
                float scaled = d[i] * factor;
                slope[i] *= scaled * up[i];
                up[i] *= act[i]; /* phi from here on */
                act[i] *= scaled;
            }
            add_products(products, d, up);
            for (int i = 0; i < TILE; i++) up[i] *= factor;
            store(slope, to, at, n, format);
            store(act, to, width + at, n, format);
            store(up, grad, at, n, format);
        }
        dot[row] = total_of(products);
    }
}

#define SUM_WIDTH 1024 /* numbers of a token summed at once: 4 KiB that stay in the nearest cache */

static inline void add_row(float *restrict sum, const char *row, int64_t at, int64_t n, int format, float weight) {
    if (format == F32) {
        const float *from = (const float *)row + at;
        for (int64_t i = 0; i < n; i++) sum[i] = MADD(from[i], weight, sum[i]);
    } else {
        const uint16_t *from = (const uint16_t *)row + at;
        for (int64_t i = 0; i < n; i++) sum[i] = MADD(widened(from[i]), weight, sum[i]);
    }
}

static void combine(int format, rows_t rows, const int64_t *index, const int64_t *ends, const float *weight,
                    rows_t out, int64_t tokens, int64_t width, int threads) {
    int64_t size = format == F32 ? 4 : 2;
    int64_t entries = tokens > 0 ? ends[tokens - 1] : 0;
    FOR_ROWS(token, tokens, width) {
        int64_t begin = token == 0 ? 0 : ends[token - 1], end = ends[token];
        for (int64_t at = 0; at < width; at += SUM_WIDTH) {
            int64_t n = width - at < SUM_WIDTH ? width - at : SUM_WIDTH;
            float sum[SUM_WIDTH];
            for (int64_t i = 0; i < n; i++) sum[i] = 0.0f;
            for (int64_t m = begin; m < end; m++) {
                if (m + AHEAD < entries) fetch(at_row(rows, index[m + AHEAD]) + at * size, n * size);
                add_row(sum, at_row(rows, index[m]), at, n, format, weight == NULL ? 1.0f : weight[m]);
            }
            for (int64_t i = 0; i < n; i += TILE)
                store(sum + i, at_row(out, token), at + i, n - i < TILE ? n - i : TILE, format);
        }
    }
}

static void norms(int format, rows_t rows, float *norms, int64_t count, int64_t width, int threads) {
    FOR_ROWS(row, count, width) {
        float squares[LANES] = {0};
        for (int64_t at = 0; at < width; at += TILE) {
            int64_t n = width - at < TILE ? width - at : TILE;
            float x[TILE];
            load(x, at_row(rows, row), at, n, format);
            add_products(squares, x, x);
        }
        norms[row] = __builtin_sqrtf(total_of(squares));
    }
}

const variant_t VARIANT = {gate, gate_backward, combine, norms};
