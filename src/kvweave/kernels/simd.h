/* Vectors of VL floats, written once for every instruction set.
 *
 * A file that includes this defines VL (floats per vector) and TARGET (the function attribute that
 * enables the instruction set). GCC's vector types do the arithmetic; only what they cannot say,
 * maximum and shuffles, is spelled out.
 */
#ifndef KVWEAVE_SIMD_H
#define KVWEAVE_SIMD_H

#include <stdint.h>
#include <string.h>

#include "numbers.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef int8_t vb __attribute__((vector_size(VL)));
typedef int16_t vw __attribute__((vector_size(4 * VL)));
/* The same in memory: at any address, and free to alias. */
typedef float vf_memory __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef uint32_t vu_memory __attribute__((vector_size(4 * VL), aligned(1), may_alias));
typedef int16_t vs __attribute__((vector_size(2 * VL)));
typedef int16_t vs_memory __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef int8_t vb_memory __attribute__((vector_size(VL), aligned(1), may_alias));

/* First and second halves of a and b, woven: a0 b0 a1 b1 ...; and pairs of a, swapped. */
#if VL == 16
#define LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define IOTA 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define PARTNERS 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define MIDDLES_SWAPPED 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15
#define LOG_VL 4
#elif VL == 8
#define LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#define IOTA 0, 1, 2, 3, 4, 5, 6, 7
#define PARTNERS 1, 0, 3, 2, 5, 4, 7, 6
#define MIDDLES_SWAPPED 0, 2, 1, 3, 4, 6, 5, 7
#define LOG_VL 3
#else
#define LOW_HALVES 0, 4, 1, 5
#define HIGH_HALVES 2, 6, 3, 7
#define IOTA 0, 1, 2, 3
#define PARTNERS 1, 0, 3, 2
#define MIDDLES_SWAPPED 0, 2, 1, 3
#define LOG_VL 2
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#define WEAVE_LOW(a, b) SHUFFLE(a, b, LOW_HALVES)
#define WEAVE_HIGH(a, b) SHUFFLE(a, b, HIGH_HALVES)
#define SWAP_PAIRS(a) SHUFFLE(a, a, PARTNERS)

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf load(const float *p) { return *(const vf_memory *)p; }
INLINE void store(float *p, vf x) { *(vf_memory *)p = x; }

/* The larger of each pair; where b is not a number, b. */
INLINE vf larger(vf a, vf b) {
#if defined(__x86_64__) && VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__x86_64__) && VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    vi first = a > b;
    return (vf)(((vi)a & first) | ((vi)b & ~first));
#endif
}

/* The largest, or the sum, of all elements, in every element. Half by half: narrow instructions are
 * cheaper than shuffles of whole vectors. */
#if defined(__x86_64__)
#define FOLD(x, with)                                                                              \
    __m128 quarter = lower_quarters(x, with##_ps);                                                 \
    quarter = _mm_##with##_ps(quarter, _mm_movehl_ps(quarter, quarter));                           \
    return splat(_mm_##with##_ps(quarter, _mm_shuffle_ps(quarter, quarter, 1))[0]);
#if VL == 16
#define lower_quarters(x, with)                                                                    \
    _mm_##with(_mm_##with(_mm512_castps512_ps128((__m512)x), _mm512_extractf32x4_ps((__m512)x, 1)),\
               _mm_##with(_mm512_extractf32x4_ps((__m512)x, 2),                                    \
                          _mm512_extractf32x4_ps((__m512)x, 3)))
#elif VL == 8
#define lower_quarters(x, with)                                                                    \
    _mm_##with(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1))
#else
#define lower_quarters(x, with) (__m128) x
#endif
INLINE vf largest(vf x) { FOLD(x, max) }
INLINE vf total(vf x) { FOLD(x, add) }
#else
INLINE vf largest(vf x) {
    for (int i = 0; i < LOG_VL; i++) x = larger(WEAVE_LOW(x, x), WEAVE_HIGH(x, x));
    return x;
}

INLINE vf total(vf x) {
    for (int i = 0; i < LOG_VL; i++) x = WEAVE_LOW(x, x) + WEAVE_HIGH(x, x);
    return x;
}
#endif

/* 1.5 * 2^23: adding it to numbers up to 2^22 rounds them to integers, half to even. */
#define SHIFTER 12582912.0f
INLINE vi nearest(vf x) { return (vi)(x + SHIFTER) - (vi)splat(SHIFTER); }

/* 2^x, within 1e-7 of it, for x up to 127; exactly 1 at 0, and exactly 0 below -126.5.
 * The polynomial is the minimax fit (relative error) of 2^f on [-1/2, 1/2] with constant term 1. */
INLINE vf exp2_of(vf x) {
    x = larger(splat(-127.0f), x);
    vf shifted = x + SHIFTER;
    vi n = (vi)shifted - (vi)splat(SHIFTER);
    vf f = x - (shifted - SHIFTER);
    vf p = f * 0.001326472731307149f + 0.009671512991189957f;
    p = p * f + 0.05550733581185341f;
    p = p * f + 0.24022242426872253f;
    p = p * f + 0.6931470036506653f;
    p = p * f + 1.0f;
    return p * (vf)((n + 127) << 23);
}

/* VL bytes, or unsigned 16-bit integers, as integers, and back. GCC takes apart what conversions of whole vectors should say. */
INLINE vi widen_bytes(const int8_t *from) {
#if defined(__x86_64__) && VL == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__x86_64__) && VL == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return __builtin_convertvector(*(const vb_memory *)from, vi);
#endif
}

INLINE vu widen_shorts(const uint16_t *from) {
#if defined(__x86_64__) && VL == 16
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__x86_64__) && VL == 8
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(*(const vh_memory *)from, vu);
#endif
}

INLINE void narrow_shorts(vi whole, int16_t *to) {
#if defined(__x86_64__) && VL == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)whole));
#else
    *(vs_memory *)to = __builtin_convertvector(whole, vs);
#endif
}

INLINE void narrow_bytes(vi whole, int8_t *to) {
#if defined(__x86_64__) && VL == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)whole));
#else
    *(vb_memory *)to = __builtin_convertvector(whole, vb);
#endif
}

/* Numbers as they are stored (see numbers.h): VL of them from element i on, or one. Of INT8 it is
 * the integer, without its scale. */
INLINE vf load_stored(int type, const void *from, int64_t i) {
    if (type == INT8)
        return __builtin_convertvector(widen_bytes((const int8_t *)from + i), vf);
    if (type == FLOAT32) return load((const float *)from + i);
    return (vf)(widen_shorts((const uint16_t *)from + i) << 16);
}

INLINE void store_stored(int type, void *to, int64_t i, vf x) {
    if (type == INT8) {
        narrow_bytes(nearest(x), (int8_t *)to + i);
        return;
    }
    if (type == FLOAT32) {
        store((float *)to + i, x);
        return;
    }
    vu bits = (vu)x, unordered = (vu)(x != x);
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    bits = (bits & ~unordered) | (0x7FC0 & unordered);
    narrow_shorts((vi)bits, (int16_t *)to + i);
}

/* The two BFLOAT16 numbers of each lane: those at even places in memory, and those at odd ones. */
INLINE vf first_of_two(vf both) { return (vf)((vi)both << 16); }
INLINE vf second_of_two(vf both) { return (vf)((vi)both & (vi)((vu){0} + 0xFFFF0000u)); }

INLINE float load_one(int type, const void *from, int64_t i) {
    if (type == INT8) return ((const int8_t *)from)[i];
    if (type == FLOAT32) return ((const float *)from)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE void store_one(int type, void *to, int64_t i, float x) {
    if (type == INT8) {
        ((int8_t *)to)[i] = (int8_t)nearest(splat(x))[0];
        return;
    }
    if (type == FLOAT32) {
        ((float *)to)[i] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    ((uint16_t *)to)[i] = (uint16_t)(x == x ? bits : 0x7FC0);
}

/* Whether there is an instruction for `add_two_products`. */
#if !defined(TWO_PRODUCTS)
#define TWO_PRODUCTS 0
#endif

/* VL floats, rounded to BFLOAT16 as `store_stored` does. Numbers below 1.2e-38 may become zero. */
INLINE void narrow_floats(vf x, uint16_t *to) {
#if TWO_PRODUCTS
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store_stored(BFLOAT16, to, 0, x);
#endif
}

/* In each lane, sum + products of its two BFLOAT16 numbers with the two that `both` points to.
 * Few processors have an instruction for it. */
INLINE vf add_two_products(vf sum, vf numbers, const uint16_t *both) {
#if TWO_PRODUCTS
    int32_t bits;
    memcpy(&bits, both, sizeof bits);
    vi other = bits - (vi){0};
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)numbers, (__m512bh)other);
#else
    sum += second_of_two(numbers) * load_one(BFLOAT16, both, 1);
    return sum + first_of_two(numbers) * load_one(BFLOAT16, both, 0);
#endif
}

/* Two rows of BFLOAT16 numbers, VL of each from element i on, side by side in each lane. */
INLINE vf weave_rows(const void *first, const void *second, int64_t i) {
    return (vf)(widen_shorts((const uint16_t *)first + i) |
                widen_shorts((const uint16_t *)second + i) << 16);
}

/* `count` numbers as float32, each times `scale`. */
INLINE void widen(int type, const void *from, int64_t count, float scale, float *to) {
    int64_t i = 0;
    for (; i + VL <= count; i += VL) store(to + i, scale * load_stored(type, from, i));
    for (; i < count; i++) to[i] = scale * load_one(type, from, i);
}

/* `count` numbers of another type as INT8 with one scale. What is not a number, or infinite,
 * makes the scale so. */
INLINE void quantize(int type, const void *from, int64_t count, int8_t *to, float *scale) {
    const vi sign = (vi)splat(-0.0f);
    vf top = {0}, unordered = {0};
    float largest_one = 0, odd = 0;
    int64_t i = 0;
    for (; i + VL <= count; i += VL) {
        vf x = load_stored(type, from, i);
        top = larger(top, (vf)((vi)x & ~sign));
        unordered += x * 0.0f;
    }
    for (; i < count; i++) {
        float x = load_one(type, from, i);
        odd += x * 0.0f;
        x = x < 0 ? -x : x;
        largest_one = x > largest_one ? x : largest_one;
    }
    float most = largest(top)[0];
    most = (largest_one > most ? largest_one : most) + total(unordered)[0] + odd;
    float factor = most > 1e-35f ? 127 / most : 0;
    *scale = most / 127;
    for (i = 0; i + VL <= count; i += VL)
        store_stored(INT8, to, i, factor * load_stored(type, from, i));
    for (; i < count; i++) store_one(INT8, to, i, factor * load_one(type, from, i));
}

/* The same with a scale for each `group` of them. */
INLINE void quantize_groups(int type, const char *from, int64_t count, int64_t group, int8_t *to,
                            float *scales) {
    for (int64_t i = 0; i < count; i += group, scales++)
        quantize(type, from + i * BYTES(type), count - i < group ? count - i : group, to + i,
                 scales);
}

/* `count` floats, a multiple of VL, as 16-bit integers, and their scale. Of each four the order is
 * 0, 2, 1, 3, for `add_products`. */
INLINE void quantize_short(const float *from, int64_t count, int16_t *to, float *scale) {
    const vi sign = (vi)splat(-0.0f);
    vf top = {0}, unordered = {0};
    for (int64_t i = 0; i < count; i += VL) {
        vf x = load(from + i);
        top = larger(top, (vf)((vi)x & ~sign));
        unordered += x * 0.0f;
    }
    float most = largest(top)[0] + total(unordered)[0];
    float factor = most > 1e-34f ? 32767 / most : 0; /* 1 / most is finite */
    *scale = most / 32767;
    for (int64_t i = 0; i < count; i += VL) {
        vi whole = nearest(factor * load(from + i));
        narrow_shorts(SHUFFLE(whole, whole, MIDDLES_SWAPPED), to + i);
    }
}

/* Each lane of 32 bits holds four INT8 numbers of a key: numbers 0 and 2, and 1 and 3, as 16 bits.
 */
INLINE vi even_bytes(vi four) { return (vi)(((vw)four << 8) >> 8); }
INLINE vi odd_bytes(vi four) { return (vi)((vw)four >> 8); }

/* In each lane, sum + products of two 16-bit integers with the two that `pair` points to. Not every
 * processor has an instruction for it. */
#if defined(__x86_64__)
#define INTEGER_PRODUCTS 1
INLINE vi add_products(vi sum, vi numbers, const int16_t *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    vi other = both - (vi){0};
#if defined(VNNI)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)numbers, (__m512i)other);
#elif VL == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)numbers, (__m512i)other);
#elif VL == 8
    return sum + (vi)_mm256_madd_epi16((__m256i)numbers, (__m256i)other);
#else
    return sum + (vi)_mm_madd_epi16((__m128i)numbers, (__m128i)other);
#endif
}
#else
#define INTEGER_PRODUCTS 0
INLINE vi add_products(vi sum, vi numbers, const int16_t *pair) {
    return sum + ((numbers << 16) >> 16) * pair[0] + (numbers >> 16) * pair[1];
}
#endif

/* Shuffles that are one instruction each: within lanes of 128 bits, and of whole lanes. */
#if VL == 16
#define UNPACK_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define UNPACK_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define PAIRS_LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define PAIRS_HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LANES_EVEN 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define LANES_ODD 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#elif VL == 8
#define UNPACK_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define UNPACK_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define PAIRS_LOW 0, 1, 8, 9, 4, 5, 12, 13
#define PAIRS_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#define LANES_EVEN 0, 1, 2, 3, 8, 9, 10, 11
#define LANES_ODD 4, 5, 6, 7, 12, 13, 14, 15
#else
#define UNPACK_LOW 0, 4, 1, 5
#define UNPACK_HIGH 2, 6, 3, 7
#define PAIRS_LOW 0, 1, 4, 5
#define PAIRS_HIGH 2, 3, 6, 7
#endif

/* In place: VL vectors of VL elements as a matrix, transposed. */
INLINE void transpose(vf *rows) {
    vf four[VL];
#pragma GCC unroll 4
    for (int i = 0; i < VL; i += 4) { /* within lanes */
        vf a = SHUFFLE(rows[i], rows[i + 1], UNPACK_LOW);
        vf b = SHUFFLE(rows[i], rows[i + 1], UNPACK_HIGH);
        vf c = SHUFFLE(rows[i + 2], rows[i + 3], UNPACK_LOW);
        vf d = SHUFFLE(rows[i + 2], rows[i + 3], UNPACK_HIGH);
        four[i] = SHUFFLE(a, c, PAIRS_LOW);
        four[i + 1] = SHUFFLE(a, c, PAIRS_HIGH);
        four[i + 2] = SHUFFLE(b, d, PAIRS_LOW);
        four[i + 3] = SHUFFLE(b, d, PAIRS_HIGH);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* the lanes */
#if VL == 16
        vf a = SHUFFLE(four[i], four[i + 4], LANES_EVEN);
        vf b = SHUFFLE(four[i], four[i + 4], LANES_ODD);
        vf c = SHUFFLE(four[i + 8], four[i + 12], LANES_EVEN);
        vf d = SHUFFLE(four[i + 8], four[i + 12], LANES_ODD);
        rows[i] = SHUFFLE(a, c, LANES_EVEN);
        rows[i + 4] = SHUFFLE(b, d, LANES_EVEN);
        rows[i + 8] = SHUFFLE(a, c, LANES_ODD);
        rows[i + 12] = SHUFFLE(b, d, LANES_ODD);
#elif VL == 8
        rows[i] = SHUFFLE(four[i], four[i + 4], LANES_EVEN);
        rows[i + 4] = SHUFFLE(four[i], four[i + 4], LANES_ODD);
#else
        rows[i] = four[i];
#endif
    }
}

#endif
