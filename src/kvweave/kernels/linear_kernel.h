/* Kernels of quantised linear layers, compiled once per instruction set (see simd.h).
 *
 * Products of 8-bit numbers are summed as integers within a group, then scaled. Sums of groups are
 * added in order, so that a row's result does not depend on the other rows.
 */
#include "linear.h"
#include "simd.h"

INLINE int64_t groups_of(const quantized_weight *weight) { return weight->inputs / GROUP; }

#if defined(LINEAR_VNNI)
#define ROWS_AT_ONCE 12

/* `count` rows (a constant) of one tile. */
INLINE void tile_rows(const quantized_weight *weight, int bits, const quantized_rows *from,
                      int64_t row, int count, int64_t tile, vf *sums) {
    int64_t groups = groups_of(weight), inputs = weight->inputs;
    const uint8_t *values = weight->values + tile * groups * (bits * 64);
    const uint16_t *scales = weight->scales + tile * groups * (bits == 4 ? 2 * TILE_OUTPUTS : TILE_OUTPUTS);
    const __m512i low = _mm512_set1_epi8(15);
    for (int r = 0; r < count; r++) sums[r] = splat(0);
    for (int64_t g = 0; g < groups; g++, values += bits * 64) {
        __m512i q[8];
        if (bits == 4) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m512i both = _mm512_loadu_si512(values + 64 * i);
                q[i] = _mm512_and_si512(both, low);
                q[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) q[i] = _mm512_loadu_si512(values + 64 * i);
        }
        vf scale = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales)), offset;
        scales += TILE_OUTPUTS;
        if (bits == 4) {
            offset = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
            scales += TILE_OUTPUTS;
        }
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            const int8_t *x = from->values + (row + r) * inputs + g * GROUP;
            int64_t at = (row + r) * groups + g;
            __m512i dot = bits == 4 ? _mm512_setzero_si512()
                                    : _mm512_set1_epi32(-128 * from->sums[at]);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                int32_t four;
                memcpy(&four, x + 4 * i, sizeof four);
                dot = _mm512_dpbusd_epi32(dot, q[i], _mm512_set1_epi32(four));
            }
            sums[r] += (vf)_mm512_cvtepi32_ps(dot) * (scale * from->scales[at]);
            if (bits == 4) sums[r] += offset * from->offsets[at];
        }
    }
}
#elif defined(LINEAR_AVX2)
#define ROWS_AT_ONCE 4

INLINE void tile_rows(const quantized_weight *weight, int bits, const quantized_rows *from,
                      int64_t row, int count, int64_t tile, vf *sums) {
    int64_t groups = groups_of(weight), inputs = weight->inputs;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i sign = _mm256_set1_epi8(-128);
    for (int half = 0; half < 2; half++) {
        const uint8_t *values = weight->values + tile * groups * (bits * 64) + 32 * half;
        const uint16_t *scales =
            weight->scales + tile * groups * (bits == 4 ? 2 * TILE_OUTPUTS : TILE_OUTPUTS) + 8 * half;
        for (int r = 0; r < count; r++) sums[2 * r + half] = splat(0);
        for (int64_t g = 0; g < groups; g++, values += bits * 64) {
            vf scale = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales)), offset;
            scales += TILE_OUTPUTS;
            if (bits == 4) {
                offset = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
                scales += TILE_OUTPUTS;
            }
            __m256i dots[ROWS_AT_ONCE];
            for (int r = 0; r < count; r++) dots[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int i = 0; i < bits; i++) {
                __m256i q = _mm256_loadu_si256((const __m256i *)(values + 64 * i)), upper = q;
                if (bits == 4) {
                    upper = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
                    q = _mm256_and_si256(q, low);
                } else {
                    q = _mm256_xor_si256(q, sign);
                }
#pragma GCC unroll 4
                for (int r = 0; r < count; r++) {
                    const int8_t *x = from->values + (row + r) * inputs + g * GROUP + 4 * i;
                    int32_t four;
                    memcpy(&four, x, sizeof four);
                    __m256i a = _mm256_set1_epi32(four);
                    if (bits == 4) {
                        /* Sums of 16 products of at most 15 * 127 fit into 16 bits. */
                        dots[r] = _mm256_add_epi16(dots[r], _mm256_maddubs_epi16(q, a));
                        memcpy(&four, x + 16, sizeof four);
                        a = _mm256_set1_epi32(four);
                        dots[r] = _mm256_add_epi16(dots[r], _mm256_maddubs_epi16(upper, a));
                    } else {
                        __m256i pairs =
                            _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(q, a));
                        dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            for (int r = 0; r < count; r++) {
                int64_t at = (row + r) * groups + g;
                __m256i dot = bits == 4 ? _mm256_madd_epi16(dots[r], ones) : dots[r];
                vf *sum = &sums[2 * r + half];
                *sum += (vf)_mm256_cvtepi32_ps(dot) * (scale * from->scales[at]);
                if (bits == 4) *sum += offset * from->offsets[at];
            }
        }
    }
}
#else
#define ROWS_AT_ONCE 1

/* A float16 as a float. */
static float TARGET NAMED(half)(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7FFF) << 13;
    /* Multiplying by 2^112 mends the exponent's bias, for denormal numbers, too. */
    float scale, x;
    uint32_t two_to_112 = 0x77800000u;
    memcpy(&scale, &two_to_112, sizeof scale);
    memcpy(&x, &rest, sizeof x);
    x *= scale;
    memcpy(&rest, &x, sizeof rest);
    rest |= sign;
    memcpy(&x, &rest, sizeof x);
    return x;
}

INLINE void tile_rows(const quantized_weight *weight, int bits, const quantized_rows *from,
                      int64_t row, int count, int64_t tile, vf *sums) {
    int64_t groups = groups_of(weight), inputs = weight->inputs;
    const uint8_t *values = weight->values + tile * groups * (bits * 64);
    const uint16_t *scales = weight->scales + tile * groups * (bits == 4 ? 2 * TILE_OUTPUTS : TILE_OUTPUTS);
    float result[TILE_OUTPUTS] = {0};
    (void)count;
    for (int64_t g = 0; g < groups; g++, values += bits * 64) {
        const int8_t *x = from->values + row * inputs + g * GROUP;
        int64_t at = row * groups + g;
        int32_t dots[TILE_OUTPUTS] = {0};
        for (int i = 0; i < 8; i++)
            for (int n = 0; n < TILE_OUTPUTS; n++)
                for (int k = 0; k < 4; k++) {
                    int32_t q = values[(bits == 4 ? i & 3 : i) * 64 + 4 * n + k];
                    if (bits == 4) q = i < 4 ? q & 15 : q >> 4;
                    dots[n] += q * x[4 * i + k];
                }
        for (int n = 0; n < TILE_OUTPUTS; n++) {
            int32_t dot = bits == 4 ? dots[n] : dots[n] - 128 * from->sums[at];
            result[n] += (float)dot * (NAMED(half)(scales[n]) * from->scales[at]);
            if (bits == 4) result[n] += NAMED(half)(scales[TILE_OUTPUTS + n]) * from->offsets[at];
        }
        scales += bits == 4 ? 2 * TILE_OUTPUTS : TILE_OUTPUTS;
    }
    memcpy(sums, result, sizeof result);
}
#endif

INLINE void store_rows(const quantized_weight *weight, const float *bias, int64_t row, int count,
                       int64_t tile, const vf *sums, float *out, int64_t stride, int add) {
    int64_t first = tile * TILE_OUTPUTS, left = weight->outputs - first;
    for (int r = 0; r < count; r++) {
        const float *found = (const float *)(sums + r * (TILE_OUTPUTS / VL));
        float *to = out + (row + r) * stride + first;
        if (left >= TILE_OUTPUTS) {
#pragma GCC unroll 4
            for (int i = 0; i < TILE_OUTPUTS; i += VL) {
                vf x = sums[(r * TILE_OUTPUTS + i) / VL];
                if (bias) x += load(bias + first + i);
                if (add) x += load(to + i);
                store(to + i, x);
            }
        } else {
            float x[TILE_OUTPUTS];
            memcpy(x, found, sizeof x);
            for (int64_t n = 0; n < left; n++) {
                if (bias) x[n] += bias[first + n];
                to[n] = x[n] + (add ? to[n] : 0);
            }
        }
    }
}

INLINE void multiply_tile(const quantized_weight *weight, int bits, const quantized_rows *from,
                          int64_t rows, int64_t tile, float *out, int64_t stride, int add) {
    vf sums[ROWS_AT_ONCE * (TILE_OUTPUTS / VL)];
    const float *bias = weight->bias;
    for (int64_t first = 0; first < rows * weight->terms; first += rows, add = 1, bias = NULL) {
        int64_t row = 0;
#define SOME(count)                                                                                \
    for (; (count) <= ROWS_AT_ONCE && row + (count) <= rows; row += (count)) {                     \
        tile_rows(weight, bits, from, first + row, (count), tile, sums);                           \
        store_rows(weight, bias, row, (count), tile, sums, out, stride, add);                      \
    }
        SOME(ROWS_AT_ONCE)
#if ROWS_AT_ONCE > 8
        SOME(8)
#endif
#if ROWS_AT_ONCE > 4
        SOME(4)
#endif
#if ROWS_AT_ONCE > 2
        SOME(2)
#endif
#if ROWS_AT_ONCE > 1
        SOME(1)
#endif
#undef SOME
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
                                   int64_t row, float *rest) {
    const vf shifter = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    typedef int8_t vb __attribute__((vector_size(VL)));
    typedef int8_t vb_memory __attribute__((vector_size(VL), aligned(1), may_alias));
    for (int64_t g = 0; g < n / GROUP; g++, x += GROUP) {
        vf most = splat(0), not_numbers = splat(0);
        vi sum = {0};
        for (int i = 0; i < GROUP; i += VL) {
            vf v = load(x + i);
            most = larger(most, larger(v, -v));
            not_numbers += v * 0.0f;
        }
        /* What is infinite or no number makes the scale, and so every output, not a number. */
        float top = largest(most)[0] + total(not_numbers)[0];
        vf inverse = splat(top > 0 ? 127.0f / top : 0), scale = splat(top / 127.0f);
        int8_t *values = to->values + row * n + g * GROUP;
        for (int i = 0; i < GROUP; i += VL) {
            vf v = load(x + i);
            vi q = (vi)(v * inverse + shifter) - (vi)shifter;
            if (rest) store(rest + g * GROUP + i, v - __builtin_convertvector(q, vf) * scale);
            sum += q;
            *(vb_memory *)(values + i) = __builtin_convertvector(q, vb);
        }
        int64_t at = row * (n / GROUP) + g;
        int32_t all = 0;
        for (int i = 0; i < VL; i++) all += sum[i];
        to->scales[at] = top / 127.0f;
        to->sums[at] = all;
        to->offsets[at] = to->scales[at] * (float)all;
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

const linear_level NAMED(linear) = {NAMED(rms_norm), NAMED(silu_product), NAMED(quantize),
                                    NAMED(multiply), NAMED(rotate)};
