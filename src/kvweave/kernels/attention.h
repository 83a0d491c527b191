/* Attention over a paged pool: what the callers, the planner and the kernels agree on. */
#ifndef KVWEAVE_ATTENTION_H
#define KVWEAVE_ATTENTION_H

#include <stdint.h>

#include "numbers.h"

/* Positions [begin, end) of a row whose KV is used where its donor has it: in the shared pages from
 * number `page` on, beginning with slot `slot` of these. The row's own pages hold the others without
 * a gap. */
typedef struct {
    int64_t begin, end;
    int64_t page, slot;
} attention_segment;

/* One layer's attention for one packed batch; see engine/attention/base.py for the words.
 * The Python side mirrors this struct field by field. */
typedef struct {
    /* the batch */
    int64_t rows;
    int64_t page_size;
    const int64_t *positions;   /* (tokens), ascending within a row */
    const int32_t *query_start; /* (rows + 1) */
    const int32_t *pages;
    const int32_t *page_start; /* (rows + 1) */
    const int32_t *segment_start; /* (rows + 1), into the segments; NULL: there are none */
    const attention_segment *segments; /* ascending within a row */
    const int32_t *shared_pages;
    /* the layer's rotation, see move.h: queries are turned for the keys of each segment */
    const float *turns; /* (segments, 2, turned) */
    int64_t offset, turned;
    int32_t interleaved;
    /* the layer; numbers are of the types below */
    const void *query;         /* (tokens, heads, key_dim) */
    const void *keys;          /* (slots, kv_heads, key_dim) */
    const void *values;        /* (slots, kv_heads, value_dim) */
    const float *key_scales;   /* (slots, kv_heads, KEY_GROUPS(key_dim)), of INT8 */
    const float *value_scales; /* (slots, kv_heads) */
    const float *sinks;        /* (heads), or NULL: scores without a value, in the softmax's sum */
    void *out;                 /* (tokens, heads, value_dim) */
    int64_t heads;
    int64_t kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t window; /* 0: none */
    float scale;
    float softcap; /* 0: none */
    int32_t query_type; /* and out's: FLOAT32 or BFLOAT16 */
    int32_t type;       /* of keys and values */
    int32_t threads;
    int32_t level; /* of instruction set: from 0 to kvweave_level() */
} attention_call;

/* Keys are read in blocks of this many positions, aligned to it. */
#define BLOCK 64
/* Softmax restarts at multiples of this many positions, and the parts are merged in order: so a
 * query's result does not depend on the number of threads, nor on other rows. */
#define SPLIT 512
/* (token, head) pairs of one item that share one KV head, as long as a group is not larger. */
#define ITEM_ROWS 192

/* What one thread computes at a time: tokens [token, token_end) of a row, some KV heads, and the
 * splits [split, split_end) of the context. */
typedef struct {
    int32_t row;
    int32_t token, token_end; /* in the batch */
    int32_t head, head_end;   /* KV heads */
    int32_t split, split_end;
    int64_t partial; /* row of `partials` where its parts begin; -1: it finishes the output */
} attention_item;

/* A part is softmax over one split. Until they are merged, parts lie in rows of this many floats,
 * by split, KV head, token and head in its group: the weighted values' sums (padded), the weights'
 * sum, and the maximum that the weights are relative to. */
#define PADDED(dim) (((dim) + 15) / 16 * 16)
#define PARTIAL_FLOATS(call) (PADDED((call)->value_dim) + 2)

/* Floats of scratch that one thread needs. */
typedef int64_t attention_scratch(const attention_call *call);
/* Attend to the item's part of the context. */
typedef void attention_kernel(const attention_call *call, const attention_item *item,
                              float *partials, float *scratch);
/* Merge the parts that several items left for what is, but for its splits, one item. */
typedef void attention_merge(const attention_call *call, const attention_item *item,
                             float *partials);

/* One level of instruction set, filled in by level_*.c. */
typedef struct {
    attention_scratch *scratch;
    attention_kernel *attend;
    attention_merge *merge;
} attention_level;

extern const attention_level attention_base;
#if defined(__x86_64__)
extern const attention_level attention_avx2, attention_avx512, attention_bf16;
#endif

#endif
