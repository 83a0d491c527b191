/* Cuts a layer's attention into items of work, and runs them on all threads. */
#include "attention.h"

#include <stdlib.h>

#include "threads.h"

/* Items per thread that the plan aims at, so that the last to finish is not far behind. */
#define ITEMS_PER_THREAD 4
/* Keys must be packed whatever the number of queries: this many more queries cost as much. */
#define PACKING_COST 8

/* What pays for waking another thread, in units of cost_of: about 15 microseconds of work. */
#define COST_PER_THREAD 20000

/* Memory that grows to what calls need, and stays. */
typedef struct {
    attention_item *items, *merges;
    float *partials, *scratch;
    size_t items_size, merges_size, partials_size, scratch_size;
    int64_t count, merge_count, threads; /* of the latest plan */
} attention_workspace;

void *kvweave_attention_open(void) { return calloc(1, sizeof(attention_workspace)); }

void kvweave_attention_close(void *workspace) {
    attention_workspace *space = workspace;
    free(space->items);
    free(space->merges);
    free(space->partials);
    free(space->scratch);
    free(space);
}

static int grow(void **memory, size_t *size, size_t needed) {
    if (needed <= *size) return 1;
    free(*memory);
    *size = 0;
    needed += needed / 4;
    /* aligned_alloc wants a multiple of the alignment */
    *memory = aligned_alloc(64, (needed + 63) / 64 * 64);
    if (*memory) *size = needed;
    return *memory != NULL;
}

static int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* Items cut by queries and KV heads only, one after another. */
typedef struct {
    const attention_call *call;
    int64_t group, tokens_at_once; /* what is constant */
    int few;                       /* rows: an item holds one KV head, to keep all threads busy */
    int64_t row, block, head;      /* where the next one begins */
} cutter;

static cutter start_cutting(const attention_call *call) {
    int64_t group = call->heads / call->kv_heads;
    cutter at = {.call = call, .group = group};
    at.few = call->rows < 2 * call->threads;
    at.tokens_at_once = group > ITEM_ROWS ? 1 : ITEM_ROWS / group;
    return at;
}

/* The next item; 0 when there is none. */
static int next_item(cutter *at, attention_item *item) {
    const attention_call *call = at->call;
    for (; at->row < call->rows; at->row++, at->block = at->head = 0) {
        int64_t first = call->query_start[at->row];
        int64_t tokens = call->query_start[at->row + 1] - first;
        int64_t blocks = (tokens + at->tokens_at_once - 1) / at->tokens_at_once;
        if (at->block == blocks) continue;
        item->row = at->row;
        item->token = first + at->block * tokens / blocks;
        item->token_end = first + (at->block + 1) * tokens / blocks;
        item->partial = -1;
        int64_t pairs = (item->token_end - item->token) * at->group;
        int64_t heads = pairs < ITEM_ROWS ? ITEM_ROWS / pairs : 1;
        if (at->few) heads = 1;
        item->head = at->head;
        item->head_end = smaller_of(at->head + heads, call->kv_heads);
        int64_t low = call->window ? call->positions[item->token] - call->window + 1 : 0;
        item->split = low > 0 ? low / SPLIT : 0;
        item->split_end = call->positions[item->token_end - 1] / SPLIT + 1;
        at->head = item->head_end;
        if (at->head == call->kv_heads) at->head = 0, at->block++;
        return 1;
    }
    return 0;
}

/* Proportional to the time that an item takes. */
static int64_t cost_of(const attention_call *call, const attention_item *item) {
    int64_t pairs = (item->token_end - item->token) * (call->heads / call->kv_heads);
    int64_t end = call->positions[item->token_end - 1] + 1, begin = item->split * SPLIT;
    return (pairs + PACKING_COST) * (item->head_end - item->head) * (end - begin);
}

/* Cut the call into items, those that are too large for an even load also by splits. */
static int make_plan(const attention_call *call, attention_workspace *space) {
    attention_item item;
    int64_t count = 0, total = 0;
    for (cutter at = start_cutting(call); next_item(&at, &item); count++)
        total += cost_of(call, &item);
    space->threads = smaller_of(call->threads, 1 + total / COST_PER_THREAD);
    int64_t spread = space->threads * ITEMS_PER_THREAD;
    /* No more than `spread` parts cost more than a share of total / spread. */
    if (!grow((void **)&space->items, &space->items_size, (count + spread) * sizeof(item)) ||
        !grow((void **)&space->merges, &space->merges_size, (count + spread) * sizeof(item)))
        return 0;
    int64_t rows = 0;
    space->count = space->merge_count = 0;
    for (cutter at = start_cutting(call); next_item(&at, &item);) {
        int64_t splits = item.split_end - item.split;
        int64_t parts = 1 + cost_of(call, &item) * spread / (total + 1);
        if (space->threads == 1) parts = 1;
        if (parts > splits) parts = splits;
        if (parts > 1) {
            item.partial = rows;
            space->merges[space->merge_count++] = item;
        }
        int64_t pairs = (item.token_end - item.token) * at.group * (item.head_end - item.head);
        for (int64_t part = 0; part < parts; part++) {
            attention_item *made = &space->items[space->count++];
            *made = item;
            made->split = item.split + part * splits / parts;
            made->split_end = item.split + (part + 1) * splits / parts;
            if (parts > 1) made->partial = rows + (made->split - item.split) * pairs;
        }
        if (parts > 1) rows += pairs * splits;
    }
    return grow((void **)&space->partials, &space->partials_size,
                rows * PARTIAL_FLOATS(call) * sizeof(float));
}

/* Attend. 0 when done, -1 if there was no memory. One call at a time per workspace. */
int32_t kvweave_attention(const attention_call *call, void *workspace) {
    attention_workspace *space = workspace;
    const attention_level *level = &attention_base;
#if defined(__x86_64__)
    if (call->level == 1) level = &attention_avx2;
    if (call->level == 2) level = &attention_avx512;
    if (call->level == 3) level = &attention_bf16;
#endif
    size_t scratch = level->scratch(call);
    if (!make_plan(call, space) || !grow((void **)&space->scratch, &space->scratch_size,
                                         space->threads * scratch * sizeof(float)))
        return -1;
    int64_t next = space->count, next_merge = space->merge_count;
    int threads = (int)smaller_of(space->threads, space->count);
    if (!threads) return 0;
    PARALLEL(threads)
    {
        float *mine = space->scratch + THREAD * scratch;
        /* From the last, which in a prefill sees the most keys, to the first. */
        for (int64_t i; (i = __atomic_sub_fetch(&next, 1, __ATOMIC_RELAXED)) >= 0;)
            level->attend(call, &space->items[i], space->partials, mine);
        if (space->merge_count) {
            BARRIER
        }
        for (int64_t i; (i = __atomic_sub_fetch(&next_merge, 1, __ATOMIC_RELAXED)) >= 0;)
            level->merge(call, &space->merges[i], space->partials);
    }
    return 0;
}
