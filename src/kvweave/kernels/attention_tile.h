/* Attention of a few queries to one block of keys, in registers.
 *
 * The includer defines VL and TARGET (see simd.h), PANEL, the vectors of columns that a tile keeps
 * in registers, and NAMED(name), which makes exported names its own.
 *
 * Both products, scores = queries x keys and sums = weights x values, are the same loop over a tile
 * of ROWS x (PANEL * VL) results, over keys and values packed to float32, keys transposed so that
 * lanes run over keys. Where a KV head has too few queries to pay for packing, keys and values are
 * read where they lie ("direct"), and keys transposed in registers. Both ways add in one order, so
 * that a token's result depends neither on the other tokens nor on their number.
 *
 * Arithmetic is float32, but where the processor has other instructions: products with INT8 keys are
 * those of integers, and queries are rounded to 16 bits; products with BFLOAT16 keys and values are
 * of two numbers with two, and queries and weights are rounded to BFLOAT16.
 * Scores are kept in powers of two: log2(e) is folded into the queries' scale.
 */
#include "attention.h"
#include "simd.h"

#define ROWS 6
/* Vectors of four numbers that share a scale of INT8 keys. */
#define QUARTER (VL < KEY_GROUP / 4 ? VL : KEY_GROUP / 4)
#define LINE 64 /* bytes that memory is fetched by */
#define LOG2_E 1.4426950408889634f
/* Below every score, and finite: the difference of two of them is a number. */
#define NOTHING -1e30f

/* Softmax over part of the context for every (token, head) pair of an item. */
typedef struct {
    float *sums;    /* (pairs, padded value_dim): weighted values */
    float *weights; /* (pairs): sum of weights */
    float *maximum; /* (pairs) */
} softmax_part;

/* Where a block of the context lies: byte offsets of its positions' keys and values in the pool,
 * for KV head 0. Positions [low, high), counted from the block's start, are there; the others
 * repeat one of these, so that whole blocks may be read. */
typedef struct {
    int64_t low, high;
    int64_t keys[BLOCK], values[BLOCK];
    int64_t scales[BLOCK]; /* slot * KV heads, of INT8 */
} block_place;

/* One KV head's part of a block. `next` is the block that comes after it, or NULL. */
typedef struct {
    const char *keys, *values; /* of the KV head, in slot 0 */
    const block_place *place, *next;
    float *packed_keys;   /* (key_dim, BLOCK) */
    float *packed_values; /* (BLOCK, padded value_dim) */
    float *scores;        /* (ROWS, BLOCK): scratch */
    float *key_scales;    /* (KEY_GROUPS(key_dim), BLOCK), of INT8 */
    float *value_scales;  /* (BLOCK) */
} block_view;

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* The first position that a query at `position` sees. */
static int64_t lowest_seen(const attention_call *call, int64_t position) {
    return call->window ? larger_of(0, position - call->window + 1) : 0;
}

/* Have a line of memory fetched that is read soon. The processor's own prefetching does not foresee
 * jumps from page to page. Fetches are spread over the arithmetic: it can only overlap with a few.
 */
INLINE void prefetch(const char *line) { __builtin_prefetch(line, 0, 2); }

/* c = (fade ? fade * c : 0) + a x b, for `rows` rows and `panel` vectors of columns. Row k of b is
 * at b + k * b_stride, in float32; or, if `places` is given, at bytes b + places[k], as stored.
 * With `two`, a is BFLOAT16, and its numbers k and k + 1 are multiplied at once; depth is even, and
 * rows k and k + 1 of b are woven at b + k / 2 * b_stride, or, if `places` is given, woven here. */
INLINE void multiply(int rows, int panel, int two, int type, int64_t depth, const void *a,
                     int64_t a_stride, const char *b, int64_t b_stride, const int64_t *places,
                     const int64_t *next, float *c, int64_t c_stride, const float *fade) {
    vf sum[ROWS][PANEL];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < panel; j++)
            sum[r][j] = fade ? load(c + r * c_stride + j * VL) * fade[r] : (vf){0};
    for (int64_t k = 0; k < depth; k += 1 + two) {
        vf column[PANEL];
        const char *row = b + (places ? places[k] : k / (1 + two) * b_stride * 4);
#pragma GCC unroll 4
        for (int j = 0; j < panel; j++)
            column[j] = two && places ? weave_rows(row, b + places[k + 1], j * VL)
                                      : load_stored(two ? FLOAT32 : type, row, j * VL);
        if (next)
            for (int i = 0; i < panel * VL * BYTES(type); i += LINE) {
                prefetch(b + next[k] + i);
                if (two) prefetch(b + next[k + 1] + i);
            }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const float *one = (const float *)a + r * a_stride + k;
            const uint16_t *both = (const uint16_t *)a + r * a_stride + k;
#pragma GCC unroll 4
            for (int j = 0; j < panel; j++)
                sum[r][j] = two ? add_two_products(sum[r][j], column[j], both)
                                : sum[r][j] + splat(*one) * column[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < panel; j++) store(c + r * c_stride + j * VL, sum[r][j]);
}

/* The same for all columns, panel by panel. */
INLINE void multiply_all(int rows, int64_t columns, int two, int type, int64_t depth,
                         const void *a, int64_t a_stride, const char *b, int64_t b_stride, const int64_t *places,
                         const int64_t *next, float *c, int64_t c_stride, const float *fade) {
    int64_t j = 0, size = BYTES(type);
    for (; j + PANEL * VL <= columns; j += PANEL * VL)
        multiply(rows, PANEL, two, type, depth, a, a_stride, b + j * size, b_stride, places, next,
                 c + j, c_stride, fade);
    for (; j < columns; j += VL)
        multiply(rows, 1, two, type, depth, a, a_stride, b + j * size, b_stride, places, next, c + j,
                 c_stride, fade);
}

/* Add to the scores of `rows` queries with VL keys from `j` of a block what dimensions from `d` on
 * give: VL of them, or, where `two` BFLOAT16 numbers are moved as one float, 2 * VL. With
 * `products` these are multiplied so, and queries are BFLOAT16. */
INLINE void dot_square(int rows, int type, int two, int products, int64_t dim, int64_t d,
                       int64_t j, const void *queries, const block_view *view, vf *sum) {
    const int64_t *places = view->place->keys, *next = view->next ? view->next->keys : NULL;
    int64_t byte = d * BYTES(type);
    vf square[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
        const char *key = view->keys + places[j + i];
        square[i] = two ? load((const float *)(key + byte)) : load_stored(type, key, d);
        if (next && byte % LINE == 0) prefetch(view->keys + next[j + i] + byte);
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
        if (products) {
            const uint16_t *both = (const uint16_t *)queries + d + 2 * i;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                sum[r] = add_two_products(sum[r], square[i], both + r * dim);
            continue;
        }
        const float *query = (const float *)queries + d + i + two * i;
        vf first = two ? first_of_two(square[i]) : square[i];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] += splat(query[r * dim]) * first;
        if (two) {
            vf second = second_of_two(square[i]);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sum[r] += splat(query[r * dim + 1]) * second;
        }
    }
}

/* Scores of `rows` queries with a block's keys where they lie. Keys are transposed in registers, so
 * that a score adds its products in the order of dimensions, as it does with packed keys. */
INLINE void dot_all(int rows, int type, int products, int64_t dim, const void *queries,
                    const block_view *view) {
    for (int64_t j = view->place->low / VL * VL; j < view->place->high; j += VL) {
        vf sum[ROWS];
        int64_t d = 0;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] = (vf){0};
        if (type == BFLOAT16)
            for (; d + 2 * VL <= dim; d += 2 * VL)
                dot_square(rows, type, 1, products, dim, d, j, queries, view, sum);
        for (; d < dim; d += VL) dot_square(rows, type, 0, 0, dim, d, j, queries, view, sum);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) store(view->scores + r * BLOCK + j, sum[r]);
    }
}

/* The same for INT8 keys and queries of 16-bit integers (see quantize_short), as products of
 * integers: lanes run over keys, four numbers of each. */
INLINE void dot_integers(int rows, int64_t dim, const int16_t *queries, const float *query_scales,
                         const block_view *view) {
    const int64_t *places = view->place->keys, *next = view->next ? view->next->keys : NULL;
    for (int64_t j = view->place->low / VL * VL; j < view->place->high; j += VL) {
        vf sum[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] = (vf){0};
        for (int64_t d = 0; d < dim; d += 4 * VL) {
            vf square[VL];
            vi even[VL], odd[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                square[i] = load((const float *)(view->keys + places[j + i] + d));
                if (next && d % LINE == 0) prefetch(view->keys + next[j + i] + d);
            }
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                even[i] = even_bytes((vi)square[i]);
                odd[i] = odd_bytes((vi)square[i]);
            }
#pragma GCC unroll 2
            for (int first = 0; first < VL; first += QUARTER) {
                int64_t group = (d + 4 * first) / KEY_GROUP;
                vf scales = load(view->key_scales + group * BLOCK + j);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const int16_t *query = queries + r * dim + d;
                    vi whole = {0};
#pragma GCC unroll 8
                    for (int i = first; i < first + QUARTER; i++) {
                        whole = add_products(whole, even[i], query + 4 * i);
                        whole = add_products(whole, odd[i], query + 4 * i + 2);
                    }
                    sum[r] += __builtin_convertvector(whole, vf) * scales;
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            store(view->scores + r * BLOCK + j, sum[r] * query_scales[r]);
    }
}

/* What `dot_integers` gives, over packed keys, for PANEL / 2 vectors of keys at a time. */
INLINE void multiply_integers(int rows, int64_t dim, const int16_t *queries,
                              const float *query_scales, const block_view *view) {
    enum { WIDTH = PANEL / 2 };
    for (int64_t j = 0; j < BLOCK; j += WIDTH * VL) {
        vf sum[ROWS][WIDTH];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < WIDTH; p++) sum[r][p] = (vf){0};
        for (int64_t d = 0; d < dim; d += 4 * QUARTER) {
            const int32_t *numbers = (const int32_t *)view->packed_keys + d / 2 * BLOCK + j;
            const float *scales = view->key_scales + d / KEY_GROUP * BLOCK + j;
            vi whole[ROWS][WIDTH];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int p = 0; p < WIDTH; p++) whole[r][p] = (vi){0};
            for (int i = 0; i < 2 * QUARTER; i++, numbers += BLOCK) {
                vi column[WIDTH];
#pragma GCC unroll 2
                for (int p = 0; p < WIDTH; p++) column[p] = (vi)load((const float *)numbers + p * VL);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                    for (int p = 0; p < WIDTH; p++)
                        whole[r][p] =
                            add_products(whole[r][p], column[p], queries + r * dim + d + 2 * i);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int p = 0; p < WIDTH; p++)
                    sum[r][p] += __builtin_convertvector(whole[r][p], vf) * load(scales + p * VL);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < WIDTH; p++)
                store(view->scores + r * BLOCK + j + p * VL, sum[r][p] * query_scales[r]);
    }
}

/* Fold one block's scores of one (token, head) pair into its softmax: weights replace the scores.
 * Keys [from, to) of the block are visible. Returns the sum of the weights; `rise` gets by how much
 * the maximum rose. */
INLINE float weigh(float *scores, int64_t from, int64_t to, float softcap, float *maximum,
                   float *rise) {
    if (softcap > 0) {
        /* cap * tanh(s / cap), with tanh(x) = 1 - 2 / (e^2x + 1), constant beyond +-20 */
        for (int j = 0; j < BLOCK; j += VL) {
            vf x = load(scores + j) / softcap;
            x = larger(splat(-20.0f), -larger(splat(-20.0f), -x));
            vf tanh = 1.0f - 2.0f / (exp2_of(x * (2 * LOG2_E)) + 1.0f);
            store(scores + j, tanh * (softcap * LOG2_E));
        }
    }
    if (from > 0 || to < BLOCK) {
        const vi iota = {IOTA};
        const vi hidden = (vi)splat(-__builtin_inff());
        for (int j = 0; j < BLOCK; j += VL) {
            vi seen = (iota >= (int32_t)(from - j)) & (iota < (int32_t)(to - j));
            store(scores + j, (vf)(((vi)load(scores + j) & seen) | (hidden & ~seen)));
        }
    }
    vf top = splat(*maximum);
    for (int j = 0; j < BLOCK; j += VL) top = larger(top, load(scores + j));
    top = largest(top);
    vf sums = {0};
    for (int j = 0; j < BLOCK; j += VL) {
        vf weight = exp2_of(load(scores + j) - top);
        store(scores + j, weight);
        sums += weight;
    }
    *rise = top[0] - *maximum;
    *maximum = top[0];
    return total(sums)[0];
}

/* A block's weights, each times the scale of its position's values. */
INLINE void scale_row(float *row, const float *scales) {
    for (int j = 0; j < BLOCK; j += VL) store(row + j, load(row + j) * load(scales + j));
}

/* A block's weights, rounded, in their place: as many bytes from the row's start as they need. */
INLINE void narrow_row(float *row) {
    for (int j = 0; j < BLOCK; j += VL) narrow_floats(load(row + j), (uint16_t *)row + j);
}

/* How a tile reads its block: packed, to floats or for products of integers or of two BFLOAT16
 * numbers; or where it lies, for products of two, or as DIRECT_FLOAT32 + the type. */
enum {
    PACKED,
    PACKED_INTEGERS,
    PACKED_TWO,
    DIRECT_TWO,
    DIRECT_FLOAT32,
    DIRECT_BFLOAT16,
    DIRECT_INT8,
    WAYS
};
_Static_assert(DIRECT_BFLOAT16 == DIRECT_FLOAT32 + BFLOAT16 && DIRECT_INT8 == DIRECT_FLOAT32 + INT8,
               "in the order of number types");

/* `rows` pairs, from `row` of the part on, attend to the block that begins at position `block`. */
INLINE void attend_tile(int rows, int how, const attention_call *call, const block_view *view,
                        const float *queries, const int16_t *shorts, const float *short_scales,
                        const softmax_part *part, int64_t row, const int64_t *positions,
                        int64_t block) {
    const block_place *place = view->place;
    int64_t dim = call->key_dim, wide = PADDED(call->value_dim), first = BLOCK, last = 0;
    float fade[PADDED(ROWS)] = {0}, fresh[ROWS], *scores = view->scores, *sums = part->sums + row * wide;
    int two = how == PACKED_TWO || how == DIRECT_TWO, packed = how < DIRECT_TWO;
    int type = two ? BFLOAT16 : how - DIRECT_FLOAT32;
    if (how == PACKED)
        multiply_all(rows, BLOCK, 0, FLOAT32, dim, queries, dim, (char *)view->packed_keys, BLOCK,
                     NULL, NULL, scores, BLOCK, NULL);
    else if (how == PACKED_TWO)
        multiply_all(rows, BLOCK, 1, FLOAT32, dim, shorts, dim, (char *)view->packed_keys, BLOCK,
                     NULL, NULL, scores, BLOCK, NULL);
    else if (how == PACKED_INTEGERS)
        multiply_integers(rows, dim, shorts, short_scales, view);
    else if (how == DIRECT_INT8)
        dot_integers(rows, dim, shorts, short_scales, view);
    else
        dot_all(rows, type, two, dim, two ? (const void *)shorts : queries, view);
    for (int r = 0; r < rows; r++) {
        int64_t to = smaller_of(positions[r] + 1 - block, place->high);
        int64_t from = larger_of(lowest_seen(call, positions[r]) - block, place->low);
        fresh[r] = weigh(scores + r * BLOCK, from, to, call->softcap, part->maximum + row + r,
                         fade + r);
        if (call->type == INT8) scale_row(scores + r * BLOCK, view->value_scales);
        if (two) narrow_row(scores + r * BLOCK);
        first = smaller_of(first, from);
        last = larger_of(last, to);
    }
    /* What the older sums must be multiplied by, of all rows at once. */
    for (int r = 0; r < ROWS; r += VL) store(fade + r, exp2_of(-load(fade + r)));
    for (int r = 0; r < rows; r++)
        part->weights[row + r] = part->weights[row + r] * fade[r] + fresh[r];
    const void *seen = scores + first;
    int64_t stride = BLOCK;
    if (two) { /* whole pairs: a weight beside the visible ones is 0 */
        first &= ~1;
        last = (last + 1) & ~1;
        seen = (const uint16_t *)scores + first;
        stride = 2 * BLOCK;
    }
    if (packed)
        multiply_all(rows, wide, two, FLOAT32, last - first, seen, stride,
                     (char *)(view->packed_values + first / (1 + two) * wide), wide, NULL, NULL,
                     sums, wide, fade);
    else
        multiply_all(rows, wide, two, type, last - first, seen, stride, view->values, 0,
                     place->values + first, view->next ? view->next->values + first : NULL, sums,
                     wide, fade);
}
