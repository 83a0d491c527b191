/* The types of numbers, as the callers name them; quantising fresh KV to one of them. */
#ifndef KVWEAVE_NUMBERS_H
#define KVWEAVE_NUMBERS_H

#include <stdint.h>

/* BFLOAT16 is the upper half of a float's bits. INT8 is an integer from -127 to 127, to be
 * multiplied by a float32 scale: one for the values of a token's head, one for each KEY_GROUP
 * numbers of its key (the last group may be shorter). Keys have outliers, and need finer scales. */
enum { FLOAT32, BFLOAT16, INT8, NUMBER_TYPES };
_Static_assert(NUMBER_TYPES == 3, /* in each of these the last branch is for the type that is left */
               "a new type needs a branch in BYTES (numbers.h); load_stored, store_stored, "
               "load_one, store_one (simd.h); move_keys (move_kernel.h); and, if it has scales, "
               "wherever INT8 stands in move_kernel.h, attention_kernel.h and attention_tile.h");
#define KEY_GROUP 32
#define KEY_GROUPS(dim) (((dim) + KEY_GROUP - 1) / KEY_GROUP)
#define BYTES(type) ((type) == FLOAT32 ? 4 : (type) == BFLOAT16 ? 2 : 1)

/* Fresh keys, or values, of one layer, to be kept as INT8.
 * The Python side mirrors this struct field by field. */
typedef struct {
    int64_t tokens, heads, dim;
    int64_t group;        /* numbers that share a scale */
    const int64_t *slots; /* (tokens) */
    const void *numbers;  /* (tokens, heads, dim) of `type` */
    int8_t *pool;         /* (slots, heads, dim) */
    float *scales;        /* (slots, heads, groups) */
    int32_t type;
    int32_t level;
} quantize_call;

typedef void quantize_kernel(const quantize_call *call);

extern quantize_kernel quantize_kv_base;
#if defined(__x86_64__)
extern quantize_kernel quantize_kv_avx2, quantize_kv_avx512;
#endif

#endif
