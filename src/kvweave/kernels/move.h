/* Moving KV from slots to slots, keys rotated, and copying whole pages out and in: what the callers
 * and the kernels agree on. */
#ifndef KVWEAVE_MOVE_H
#define KVWEAVE_MOVE_H

#include <stdint.h>

#include "numbers.h"

/* One layer's pool. `turned` dimensions of each key, from `offset` on, are rotated; x becomes
 * x * cos + partner(x) * sin, where the partner of dimension i of these is i + turned / 2 (or minus
 * that), or its neighbour in the pair (2j, 2j + 1) if `interleaved`.
 * The Python side mirrors both structs field by field. */
typedef struct {
    void *keys;   /* (slots, heads, key_dim) */
    void *values; /* (slots, heads, value_dim) */
    float *key_scales;   /* (slots, heads, KEY_GROUPS(key_dim)), of INT8 */
    float *value_scales; /* (slots, heads) */
    int64_t heads, key_dim, value_dim;
    int64_t offset, turned;
    const float *turns; /* (runs, 2, turned): cos, then sin with its sign, per run */
    int32_t interleaved;
    int32_t zeroed; /* not copied: the target gets zeros */
} move_layer;

typedef struct {
    int64_t layers, runs;
    const move_layer *layer;
    const int64_t *run_start; /* (runs + 1), into the slots */
    const int32_t *sources, *targets;
    int32_t type; /* of keys and values */
    int32_t threads;
    int32_t level;
} move_call;

/* Bytes of whole pages, between the tensors of a pool and the rows of a buffer. A row holds the
 * page's bytes of all tensors, one after another. One call for all of them, since whoever copies
 * from Python array by array must wait for the interpreter's lock between any two.
 * The Python side mirrors this struct field by field. */
typedef struct {
    int64_t tensors, pages;
    char *const *tensor;
    const int64_t *bytes; /* of a page in each tensor */
    const int32_t *page;
    char *rows;
    int64_t stride; /* bytes from row to row */
    int32_t into_pool;
} page_copy;

/* Tokens that a thread moves at a time, within one layer. */
#define MOVE_CHUNK 128

/* Move tokens [first, last), all of run `run`, in one layer. */
typedef void move_kernel(const move_call *call, const move_layer *layer, int64_t run, int64_t first,
                         int64_t last);

extern move_kernel move_base;
#if defined(__x86_64__)
extern move_kernel move_avx2, move_avx512;
#endif

#endif
