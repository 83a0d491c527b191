/* Quantised linear layers, and the decoder layer built on them: what callers and kernels agree on. */
#ifndef KVWEAVE_LINEAR_H
#define KVWEAVE_LINEAR_H

#include <stdint.h>

#include "numbers.h"

/* Inputs that share a scale, and outputs that are computed together. */
#define GROUP 32
#define TILE_OUTPUTS 16

/* A weight w = scale * q + offset, with q of 4 or 8 bits (unsigned). Outputs lie in tiles of 16,
 * and within a tile in groups of 32 inputs. A group of 8 bits is (8, 16, 4): for each four inputs
 * in a row, their values for each output. With 4 bits a byte of (4, 16, 4) holds the value of the
 * first 16 inputs in its lower, and of the last 16 in its upper half. Numbers of (tiles, groups)
 * follow as float16: 16 scales, and with 4 bits 16 offsets; with 8 bits the offset is -128 scales.
 * The Python side mirrors this and the next structs field by field. */
typedef struct {
    const uint8_t *values;
    const uint16_t *scales;
    const float *bias; /* (outputs), or NULL */
    int64_t inputs;    /* a multiple of GROUP */
    int64_t outputs;
    int64_t bits;
} quantized_weight;

/* Products of one weight with float32 rows. */
typedef struct {
    quantized_weight weight;
    const float *norm; /* (inputs): rows go through RMSNorm first; or NULL */
    const float *x;    /* (rows, inputs) */
    float *out;        /* (rows, outputs) */
    int64_t rows;
    float eps;
    int32_t threads, level;
} linear_call;

/* A decoder layer: x += o(attention(rope(qkv(norm(x))))); x += down(silu(gate(n)) * up(n)) with
 * n = norm(x). All numbers are float32. */
typedef struct {
    quantized_weight qkv, o, gate_up, down;
    const float *input_norm, *post_norm; /* (hidden) */
    const float *q_norm, *k_norm;        /* (dim), or NULL */
    int64_t heads, kv_heads, dim;
    int64_t turned; /* leading dimensions of a head that the rotation turns, half-split */
    float eps;
} decoder_layer;

typedef struct {
    int64_t rows;
    float *hidden;            /* (rows, hidden), updated in place */
    const int64_t *positions; /* (rows) */
    const float *cosines;     /* (positions, turned / 2) */
    const float *sines;
    float *query;           /* (rows, heads, dim) */
    void *keys, *values;    /* (rows or slots, kv heads, dim), of `type` */
    const int64_t *slots;   /* (rows): where keys and values go; NULL: to their row */
    const float *attention; /* (rows, heads * dim), what attention gave */
    int32_t threads, level;
    int32_t type; /* FLOAT32 or BFLOAT16 */
} decoder_call;

/* Rows quantised to 16 bits: values (groups, rows, GROUP) in -32767..32767, with the second and the
 * third of each four inputs swapped, as `add_products` takes them; (groups, rows) their scales,
 * their values' sums, and the products of both. */
typedef struct {
    int16_t *values;
    float *scales;
    int32_t *sums;
    float *offsets;
    int64_t rows; /* that there is room for */
} quantized_rows;

/* One level of instruction set. */
typedef struct {
    void (*rms_norm)(const float *x, const float *weight, float eps, int64_t n, float *out);
    /* silu(gate) * up */
    void (*silu_product)(const float *gate, const float *up, int64_t n, float *out);
    void (*quantize)(const float *x, int64_t n, const quantized_rows *to, int64_t row);
    /* Tiles [tile, end) of the outputs, for all rows; `add` to what is there, or store. A row's
     * result depends on neither the other rows nor the tiles. */
    void (*multiply)(const quantized_weight *weight, const quantized_rows *from, int64_t rows,
                     int64_t tile, int64_t end, float *out, int64_t stride, int add);
    /* Turn one head's leading dimensions by the angles whose cosines and sines are given. */
    void (*rotate)(const float *x, const float *cosines, const float *sines, int64_t turned,
                   int64_t dim, float *out);
    /* `n` floats from x to element `at` of numbers of `type`, rounded half to even. */
    void (*round)(const float *x, int64_t n, int type, void *to, int64_t at);
} linear_level;

extern const linear_level linear_base;
#if defined(__x86_64__)
extern const linear_level linear_avx2, linear_vnni;
#endif

#endif
