/* Kernels of quantised linear layers, compiled once per instruction set (see simd.h).
 *
 * Products of integers are summed as integers within a group, then scaled. Sums of groups are
 * added in order, so that a row's result does not depend on the other rows.
 */
#include "linear.h"
#include "simd.h"

/* Rows that are computed together, so that their weights are unpacked once; and, of a group, the
 * blocks of weights whose unpacked numbers are held in registers at a time. */
#if VL == 16
#define ROWS_AT_ONCE 12
enum { BLOCKS_AT_ONCE = 8 };
#else
#define ROWS_AT_ONCE 6
enum { BLOCKS_AT_ONCE = 1 };
#endif

/* VL float16 numbers. */
INLINE vf load_halves(const uint16_t *from) {
#if defined(__x86_64__) && VL == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__x86_64__) && VL == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    vu bits = __builtin_convertvector(*(const vh_memory *)from, vu);
    /* Multiplying by 2^112 mends the exponent's bias, for denormal numbers, too. */
    vf size = (vf)((bits & 0x7FFF) << 13) * 0x1p112f;
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

/* `count` rows (a constant) of VL outputs of a tile, from `part` on. */
INLINE void tile_rows(const quantized_weight *weight, int bits, const quantized_rows *from,
                      int64_t row, int count, int64_t tile, int part, vf *sums) {
    int64_t groups = weight->inputs / GROUP;
    int numbers = bits == 4 ? 2 * TILE_OUTPUTS : TILE_OUTPUTS;
    const uint8_t *values = weight->values + tile * groups * (bits * 64) + 4 * part;
    const uint16_t *scales = weight->scales + tile * groups * numbers + part;
    for (int r = 0; r < count; r++) sums[r] = splat(0);
    for (int64_t g = 0; g < groups; g++, values += bits * 64, scales += numbers) {
        int64_t at = g * from->rows + row;
        const int16_t *x = from->values + at * GROUP;
        vi dots[ROWS_AT_ONCE];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
            dots[r] = (bits == 4 ? 0 : -128 * from->sums[at + r]) - (vi){0};
#pragma GCC unroll BLOCKS_AT_ONCE
        for (int i = 0; i < bits; i++, x += 4) {
            vu q = *(const vu_memory *)(values + 64 * i);
            const unsigned mask = bits == 4 ? 0x000F000F : 0x00FF00FF;
#pragma GCC unroll 12
            for (int r = 0; r < count; r++) {
                const int16_t *four = x + r * GROUP;
                dots[r] = add_products(dots[r], (vi)(q & mask), four);
                dots[r] = add_products(dots[r], (vi)(q >> 8 & mask), four + 2);
                if (bits == 4) {
                    dots[r] = add_products(dots[r], (vi)(q >> 4 & mask), four + 16);
                    dots[r] = add_products(dots[r], (vi)(q >> 12 & mask), four + 18);
                }
            }
        }
        vf scale = load_halves(scales);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            /* With 4 bits the sum is below 2^24, and exact as a float. */
            vf dot = __builtin_convertvector(dots[r], vf);
            sums[r] += dot * (scale * from->scales[at + r]);
            if (bits == 4) sums[r] += load_halves(scales + TILE_OUTPUTS) * from->offsets[at + r];
        }
    }
}

INLINE void store_rows(const quantized_weight *weight, int64_t row, int count, int64_t first,
                       const vf *sums, float *out, int64_t stride, int add) {
    const float *bias = weight->bias;
    int64_t left = weight->outputs - first;
    for (int r = 0; r < count; r++) {
        float *to = out + (row + r) * stride + first;
        vf x = sums[r];
        if (left >= VL) {
            if (bias) x += load(bias + first);
            if (add) x += load(to);
            store(to, x);
        } else {
            for (int64_t n = 0; n < left; n++)
                to[n] = (bias ? x[n] + bias[first + n] : x[n]) + (add ? to[n] : 0);
        }
    }
}

INLINE void multiply_tile(const quantized_weight *weight, int bits, const quantized_rows *from,
                          int64_t rows, int64_t tile, float *out, int64_t stride, int add) {
    vf sums[ROWS_AT_ONCE];
    /* As even as ROWS_AT_ONCE allows: weights are unpacked as seldom as can be. */
    int64_t passes = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, row = 0;
    for (int64_t pass = 0; pass < passes; pass++) {
        int count = (int)(rows / passes + (pass < rows % passes));
        for (int part = 0; part < TILE_OUTPUTS; part += VL) {
            switch (count) {
#define SOME(n)                                                                                    \
    case n:                                                                                        \
        tile_rows(weight, bits, from, row, n, tile, part, sums);                                   \
        break;
                SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6)
#if ROWS_AT_ONCE > 6
                SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
#endif
#undef SOME
            }
            store_rows(weight, row, count, tile * TILE_OUTPUTS + part, sums, out, stride, add);
        }
        row += count;
    }
}

static void TARGET NAMED(multiply)(const quantized_weight *weight, const quantized_rows *from,
                                   int64_t rows, int64_t tile, int64_t end, float *out,
                                   int64_t stride, int add) {
    for (; tile < end; tile++) {
        if (weight->bits == 4)
            multiply_tile(weight, 4, from, rows, tile, out, stride, add);
        else
            multiply_tile(weight, 8, from, rows, tile, out, stride, add);
    }
}

static void TARGET NAMED(quantize)(const float *x, int64_t n, const quantized_rows *to,
                                   int64_t row) {
    for (int64_t g = 0; g < n / GROUP; g++, x += GROUP) {
        int64_t at = g * to->rows + row;
        int16_t *values = to->values + at * GROUP;
        int32_t sum = 0;
        quantize_short(x, GROUP, values, &to->scales[at]);
        for (int i = 0; i < GROUP; i++) sum += values[i];
        to->sums[at] = sum;
        to->offsets[at] = to->scales[at] * (float)sum;
    }
}

static void TARGET NAMED(rms_norm)(const float *x, const float *weight, float eps, int64_t n,
                                   float *out) {
    vf squares = splat(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) squares += load(x + i) * load(x + i);
    float sum = total(squares)[0];
    for (; i < n; i++) sum += x[i] * x[i];
    float scale = 1 / __builtin_sqrtf(sum / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) store(out + i, load(weight + i) * (load(x + i) * scale));
    for (; i < n; i++) out[i] = weight[i] * (x[i] * scale);
}

static void TARGET NAMED(silu_product)(const float *gate, const float *up, int64_t n, float *out) {
    const vf log2e = splat(1.44269504f);
    for (int64_t i = 0; i < n; i += VL) { /* a multiple of GROUP */
        vf x = load(gate + i);
        vf power = -larger(splat(-126.0f), x * log2e); /* exp(-x) stays finite */
        store(out + i, x / (exp2_of(power) + 1.0f) * load(up + i));
    }
}

static void TARGET NAMED(rotate)(const float *x, const float *cosines, const float *sines,
                                 int64_t turned, int64_t dim, float *out) {
    int64_t half = turned / 2, i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        out[i] = a * cosines[i] - b * sines[i];
        out[half + i] = b * cosines[i] + a * sines[i];
    }
    memcpy(out + turned, x + turned, (dim - turned) * sizeof *out);
}

static void TARGET NAMED(round)(const float *x, int64_t n, int type, void *to, int64_t at) {
    int64_t i = 0;
    if (type == FLOAT32) {
        memcpy((float *)to + at, x, n * sizeof *x);
        return;
    }
    for (; i + VL <= n; i += VL) store_stored(BFLOAT16, to, at + i, load(x + i));
    for (; i < n; i++) store_one(BFLOAT16, to, at + i, x[i]);
}

const linear_level NAMED(linear) = {NAMED(rms_norm), NAMED(silu_product), NAMED(quantize),
                                    NAMED(multiply), NAMED(rotate),       NAMED(round)};
