/* The attention of one item: block by block, then split by split.
 *
 * FlashAttention's scheme (Dao et al., arXiv 2205.14135): softmax with a running maximum, so that
 * scores never leave the cache. See attention_tile.h for what the includer defines.
 */
#include "attention_tile.h"
#include "turn.h"

/* An item's queries. */
typedef struct {
    float *numbers;      /* (pairs, key_dim), scaled */
    int16_t *shorts;     /* the same as integers, for INT8 keys, or as BFLOAT16 */
    float *short_scales; /* (pairs) */
} query_view;

/* One thread's scratch, cut to size for a call. */
typedef struct {
    query_view plain, turned; /* as they are, and for the keys of segment `segment` */
    int64_t segment;
    int64_t *positions; /* (pairs of one KV head) */
    softmax_part whole, part;
    block_view view;
    int how;
} workplace;

/* (token, head) pairs that an item may hold over all its KV heads. */
static int64_t most_pairs(const attention_call *call) {
    int64_t group = call->heads / call->kv_heads;
    return group > ITEM_ROWS ? group : ITEM_ROWS;
}

/* Scratch while it is cut up; without memory, it only counts. */
typedef struct {
    float *memory;
    int64_t used;
} arena;

static float *take(arena *from, int64_t floats) {
    float *taken = from->memory ? from->memory + from->used : NULL;
    from->used += PADDED(floats);
    return taken;
}

/* Returns how many floats it takes. */
static int64_t lay_out(const attention_call *call, float *scratch, workplace *at) {
    int64_t pairs = most_pairs(call), wide = PADDED(call->value_dim);
    arena from = {.memory = scratch};
    query_view *views[] = {&at->plain, &at->turned};
    for (int i = 0; i < (call->segment_start ? 2 : 1); i++) {
        views[i]->numbers = take(&from, pairs * call->key_dim);
        views[i]->shorts = (int16_t *)take(&from, pairs * call->key_dim / 2 + 1);
        views[i]->short_scales = take(&from, pairs);
    }
    at->segment = -1;
    at->positions = (int64_t *)take(&from, 2 * pairs);
    at->view.packed_keys = take(&from, call->key_dim * BLOCK);
    at->view.packed_values = take(&from, BLOCK * wide);
    at->view.scores = take(&from, ROWS * BLOCK);
    at->view.key_scales = take(&from, KEY_GROUPS(call->key_dim) * BLOCK);
    at->view.value_scales = take(&from, BLOCK);
    softmax_part *parts[] = {&at->whole, &at->part};
    for (int i = 0; i < 2; i++) {
        parts[i]->sums = take(&from, pairs * wide);
        parts[i]->weights = take(&from, pairs);
        parts[i]->maximum = take(&from, pairs);
    }
    return from.used;
}

static int64_t scratch_floats(const attention_call *call) {
    workplace at;
    return lay_out(call, NULL, &at);
}

/* A piece of the context: positions [low, high) of one block, of one segment or of none (-1), with
 * `shared` positions in the segments before it. */
typedef struct {
    int64_t block, low, high, segment, shared;
} context_piece;

/* The longest piece of the row that begins at position `low` and ends at `high` or before. */
static context_piece next_piece(const attention_call *call, int64_t row, int64_t low,
                                int64_t high) {
    int64_t block = low / BLOCK * BLOCK;
    context_piece piece = {block, low, smaller_of(high, block + BLOCK), -1, 0};
    if (!call->segment_start) return piece;
    for (int64_t s = call->segment_start[row]; s < call->segment_start[row + 1]; s++) {
        const attention_segment *segment = &call->segments[s];
        if (segment->end <= low) {
            piece.shared += segment->end - segment->begin;
            continue;
        }
        if (segment->begin <= low) {
            piece.segment = s;
            piece.high = smaller_of(piece.high, segment->end);
        } else {
            piece.high = smaller_of(piece.high, segment->begin);
        }
        break;
    }
    return piece;
}

/* Where a piece, not empty, lies in the pool. */
static void find_piece(const attention_call *call, int64_t row, const context_piece *piece,
                       block_place *place) {
    int64_t size = call->page_size, bytes = call->kv_heads * BYTES(call->type);
    const int32_t *pages = call->pages + call->page_start[row];
    int64_t position = piece->low, shift = -piece->shared;
    if (piece->segment >= 0) {
        const attention_segment *segment = &call->segments[piece->segment];
        pages = call->shared_pages + segment->page;
        shift = segment->slot - segment->begin;
    }
    place->low = position - piece->block;
    place->high = piece->high - piece->block;
    while (position < piece->high) {
        int64_t page = (position + shift) / size, within = (position + shift) % size;
        int64_t stop = smaller_of(piece->high, (page + 1) * size - shift);
        for (int64_t slot = pages[page] * size + within; position < stop; slot++, position++) {
            int64_t at = position - piece->block;
            place->keys[at] = slot * call->key_dim * bytes;
            place->values[at] = slot * call->value_dim * bytes;
            place->scales[at] = slot * call->kv_heads;
        }
    }
    for (int64_t i = 0; i < BLOCK; i++)
        if (i < place->low || i >= place->high) {
            place->keys[i] = place->keys[place->low];
            place->values[i] = place->values[place->low];
            place->scales[i] = place->scales[place->low];
        }
}

/* Keys of a block -> (dim, BLOCK), transposed, in float32. */
TARGET static void pack_keys(const attention_call *call, const block_view *view) {
    int64_t dim = call->key_dim;
    int type = call->type;
    for (int64_t j = 0; j < BLOCK; j += VL) {
        const int64_t *places = view->place->keys + j;
        const float *scales = view->key_scales + j;
        int64_t d = 0;
        for (; type == BFLOAT16 && d + 2 * VL <= dim; d += 2 * VL) { /* two numbers at a time */
            vf square[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                square[i] = load((const float *)(view->keys + places[i] + 2 * d));
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                float *to = view->packed_keys + (d + 2 * i) * BLOCK + j;
                store(to, first_of_two(square[i]));
                store(to + BLOCK, second_of_two(square[i]));
            }
        }
        for (; d + VL <= dim; d += VL) {
            vf square[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                square[i] = load_stored(type, view->keys + places[i], d);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                if (type == INT8) square[i] *= load(scales + d / KEY_GROUP * BLOCK);
                store(view->packed_keys + (d + i) * BLOCK + j, square[i]);
            }
        }
        for (; d < dim; d++)
            for (int i = 0; i < VL; i++)
                view->packed_keys[d * BLOCK + j + i] =
                    load_one(type, view->keys + places[i], d) *
                    (type == INT8 ? scales[d / KEY_GROUP * BLOCK + i] : 1);
    }
}

/* A KV head's scales of a block. */
TARGET static void gather_scales(const attention_call *call, int64_t head, const block_view *view) {
    const int64_t *places = view->place->scales, groups = KEY_GROUPS(call->key_dim);
    for (int64_t i = 0; i < BLOCK; i++) {
        for (int64_t g = 0; g < groups; g++)
            view->key_scales[g * BLOCK + i] = call->key_scales[(places[i] + head) * groups + g];
        view->value_scales[i] = call->value_scales[places[i] + head];
    }
}

/* INT8 keys of a block for `multiply_integers`: (dim / 4, even and odd bytes, BLOCK). */
TARGET static void pack_integers(const attention_call *call, const block_view *view) {
    int32_t *to = (int32_t *)view->packed_keys;
    for (int64_t j = 0; j < BLOCK; j += VL)
        for (int64_t d = 0; d < call->key_dim; d += 4 * VL) {
            vf square[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                square[i] = load((const float *)(view->keys + view->place->keys[j + i] + d));
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                int64_t at = (d / 2 + 2 * i) * BLOCK + j;
                store((float *)(to + at), (vf)even_bytes((vi)square[i]));
                store((float *)(to + at + BLOCK), (vf)odd_bytes((vi)square[i]));
            }
        }
}

/* BFLOAT16 keys and values of a block for products of two numbers: (dim / 2, BLOCK) for keys,
 * (BLOCK / 2, dim) for values, each lane two numbers. */
TARGET static void pack_two(const attention_call *call, const block_view *view) {
    const block_place *place = view->place;
    for (int64_t j = 0; j < BLOCK; j += VL)
        for (int64_t d = 0; d < call->key_dim; d += 2 * VL) {
            vf square[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                square[i] = load((const float *)(view->keys + place->keys[j + i] + 2 * d));
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                store(view->packed_keys + (d / 2 + i) * BLOCK + j, square[i]);
        }
    for (int64_t i = place->low / 2 * 2; i < place->high; i += 2) {
        const char *first = view->values + place->values[i];
        const char *second = view->values + place->values[i + 1];
        for (int64_t d = 0; d < call->value_dim; d += VL)
            store(view->packed_values + i / 2 * call->value_dim + d,
                  weave_rows(first, second, d));
    }
}

/* Pack a KV head's part of a block. */
TARGET static void pack_block(const attention_call *call, int how, const block_view *view) {
    int64_t wide = PADDED(call->value_dim);
    const block_place *place = view->place;
    if (how == PACKED_TWO) {
        pack_two(call, view);
        return;
    }
    if (how == PACKED_INTEGERS)
        pack_integers(call, view);
    else
        pack_keys(call, view);
    for (int64_t i = place->low; i < place->high; i++)
        widen(call->type, view->values + place->values[i], call->value_dim, 1,
              view->packed_values + i * wide);
}

/* Have positions [from, to) of the next block fetched. */
TARGET static void prefetch_next(const attention_call *call, const block_view *view, int64_t from,
                                 int64_t to) {
    int64_t size = BYTES(call->type);
    for (int64_t i = from; i < to; i++) {
        for (int64_t byte = 0; byte < call->key_dim * size; byte += LINE)
            prefetch(view->keys + view->next->keys[i] + byte);
        for (int64_t byte = 0; byte < call->value_dim * size; byte += LINE)
            prefetch(view->values + view->next->values[i] + byte);
    }
}

/* All pairs of one KV head attend to the block that begins at position `block`. */
TARGET static void attend_block(const attention_call *call, workplace *at,
                                const query_view *queries, const softmax_part *part, int64_t base,
                                int64_t rows, int64_t block) {
    block_view *view = &at->view;
    int64_t dim = call->key_dim;
    int packed = at->how < DIRECT_TWO;
    if (packed) pack_block(call, at->how, view);
    /* As even as ROWS allows: a tile of few rows leaves registers unused. */
    int64_t tiles = (rows + ROWS - 1) / ROWS, row = 0;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t height = rows / tiles + (t < rows % tiles);
        const int64_t *positions = at->positions + row;
        const float *q = queries->numbers + (base + row) * dim;
        const float *scales = queries->short_scales + base + row;
        const int16_t *shorts = queries->shorts + (base + row) * dim;
        if (packed && view->next)
            prefetch_next(call, view, t * BLOCK / tiles, (t + 1) * BLOCK / tiles);
        if (positions[height - 1] >= block + view->place->low &&
            lowest_seen(call, positions[0]) < block + view->place->high) {
            switch (height * WAYS + at->how) {
#define TILE(n, how)                                                                               \
    case n * WAYS + how:                                                                              \
        attend_tile(n, how, call, view, q, shorts, scales, part, base + row, positions, block);    \
        break;
#define TILES(how) TILE(1, how) TILE(2, how) TILE(3, how) TILE(4, how) TILE(5, how) TILE(6, how)
                TILES(PACKED) TILES(PACKED_INTEGERS)
                TILES(DIRECT_FLOAT32) TILES(DIRECT_BFLOAT16) TILES(DIRECT_INT8)
#if TWO_PRODUCTS
                TILES(PACKED_TWO) TILES(DIRECT_TWO)
#endif
            }
            if (!packed) view->next = NULL; /* fetched by now */
        }
        row += height;
    }
}

/* The queries as integers, or as BFLOAT16, where they are wanted so. */
TARGET static void shorten(const attention_call *call, const workplace *at, int64_t pairs,
                           const query_view *queries) {
    int64_t dim = call->key_dim;
    if (at->how == PACKED_TWO || at->how == DIRECT_TWO)
        for (int64_t i = 0; i < pairs * dim; i += VL)
            narrow_floats(load(queries->numbers + i), (uint16_t *)queries->shorts + i);
    if (at->how != PACKED_INTEGERS && at->how != DIRECT_INT8) return;
    for (int64_t r = 0; r < pairs; r++)
        quantize_short(queries->numbers + r * dim, dim, queries->shorts + r * dim,
                       queries->short_scales + r);
}

/* Turn all queries for a segment: by as much as its keys would have to be turned, the other way. */
TARGET static void turn_queries(const attention_call *call, workplace *at, int64_t pairs,
                                int64_t segment) {
    int64_t dim = call->key_dim;
    rotated_part part = PART_OF(call);
    for (int64_t r = 0; r < pairs; r++)
        turn(FLOAT32, part, (const char *)(at->plain.numbers + r * dim),
             call->turns + segment * 2 * call->turned, (char *)(at->turned.numbers + r * dim));
    shorten(call, at, pairs, &at->turned);
    at->segment = segment;
}

/* Softmax over one split, for all of an item's pairs. */
TARGET static void attend_split(const attention_call *call, const attention_item *item,
                                workplace *at, const softmax_part *part, int64_t split) {
    int64_t heads = item->head_end - item->head, size = BYTES(call->type);
    int64_t rows = (item->token_end - item->token) * (call->heads / call->kv_heads);
    int64_t last = call->positions[item->token_end - 1] + 1;
    int64_t low = larger_of(split * SPLIT, lowest_seen(call, call->positions[item->token]));
    int64_t high = smaller_of((split + 1) * SPLIT, last);
    block_place places[2];
    block_view *view = &at->view;
    memset(part->sums, 0, sizeof(float) * heads * rows * PADDED(call->value_dim));
    for (int64_t i = 0; i < heads * rows; i++) part->weights[i] = 0, part->maximum[i] = NOTHING;
    context_piece piece = next_piece(call, item->row, low, high), next;
    find_piece(call, item->row, &piece, &places[0]);
    for (int flip = 0; piece.low < high; flip = !flip, piece = next) {
        view->place = &places[flip];
        int more = piece.high < smaller_of(item->split_end * SPLIT, last);
        next = (context_piece){.low = high};
        if (more) {
            next = next_piece(call, item->row, piece.high, last);
            find_piece(call, item->row, &next, &places[!flip]);
        }
        const query_view *queries = &at->plain;
        if (piece.segment >= 0) {
            if (at->segment != piece.segment) turn_queries(call, at, heads * rows, piece.segment);
            queries = &at->turned;
        }
        for (int64_t h = 0; h < heads; h++) {
            view->next = more ? &places[!flip] : NULL;
            view->keys = (const char *)call->keys + (item->head + h) * call->key_dim * size;
            view->values = (const char *)call->values + (item->head + h) * call->value_dim * size;
            if (call->type == INT8) gather_scales(call, item->head + h, view);
            attend_block(call, at, queries, part, h * rows, rows, piece.block);
        }
    }
}

/* A function whose every call gives the same bits: of two products that are added, the compiler
 * chooses the one that it rounds first, and may choose otherwise in each inlined copy. */
#define ONE_COPY TARGET __attribute__((noinline)) static

/* Merge the second softmax, over later keys, into the first. */
ONE_COPY void merge(float *sums, float *weights, float *maximum, const float *other_sums,
                    float other_weights, float other_maximum, int64_t wide) {
    vf top = larger(splat(*maximum), splat(other_maximum));
    vf ours = exp2_of(splat(*maximum) - top), theirs = exp2_of(splat(other_maximum) - top);
    for (int64_t j = 0; j < wide; j += VL)
        store(sums + j, ours * load(sums + j) + theirs * load(other_sums + j));
    *weights = ours[0] * *weights + theirs[0] * other_weights;
    *maximum = top[0];
}

/* The result of pair `row` of the item's KV head `head`, to its place in the output. All parts are
 * merged by now, so a sink is counted once. */
ONE_COPY void finish(const attention_call *call, const attention_item *item, int64_t head,
                     int64_t row, const float *sums, float weights, float maximum) {
    int64_t group = call->heads / call->kv_heads, dim = call->value_dim;
    int64_t query_head = (item->head + head) * group + row % group;
    int64_t at = ((item->token + row / group) * call->heads + query_head) * dim;
    float share = 1;
    if (call->sinks) {
        vf ours = splat(maximum), sink = splat(call->sinks[query_head] * LOG2_E);
        vf top = larger(ours, sink);
        share = exp2_of(ours - top)[0];
        weights = weights * share + exp2_of(sink - top)[0];
    }
    for (int64_t d = 0; d < dim; d++)
        store_one(call->query_type, call->out, at + d, sums[d] * share / weights);
}

/* Queries in the order of tiles: by KV head, token, head in its group; and each pair's position. */
TARGET static void gather_queries(const attention_call *call, const attention_item *item,
                                  const workplace *at) {
    int64_t group = call->heads / call->kv_heads, size = BYTES(call->query_type);
    float scale = call->softcap > 0 ? call->scale : call->scale * LOG2_E;
    float *to = at->plain.numbers;
    for (int64_t h = item->head; h < item->head_end; h++)
        for (int64_t t = item->token; t < item->token_end; t++) {
            int64_t index = (t * call->heads + h * group) * call->key_dim;
            widen(call->query_type, (const char *)call->query + index * size, group * call->key_dim,
                  scale, to);
            to += group * call->key_dim;
        }
    int64_t *position = at->positions;
    for (int64_t t = item->token; t < item->token_end; t++)
        for (int64_t g = 0; g < group; g++) *position++ = call->positions[t];
}

TARGET static void attend_item(const attention_call *call, const attention_item *item,
                               float *partials, float *scratch) {
    workplace at;
    lay_out(call, scratch, &at);
    int64_t rows = (item->token_end - item->token) * (call->heads / call->kv_heads);
    int64_t all = rows * (item->head_end - item->head), stride = PARTIAL_FLOATS(call),
            wide = PADDED(call->value_dim);
    int integers = INTEGER_PRODUCTS && call->type == INT8 && call->key_dim % (4 * VL) == 0;
    int two = TWO_PRODUCTS && call->type == BFLOAT16 && call->key_dim % (2 * VL) == 0 &&
              call->value_dim == wide;
    at.how = integers ? PACKED_INTEGERS : two ? PACKED_TWO : PACKED;
    /* More than one tile pays for packing. Both ways give the same bits: an answer must not depend
     * on how its prompt was cut into chunks. */
    if (rows <= ROWS && call->value_dim == wide && call->key_dim % VL == 0 &&
        integers == (call->type == INT8))
        at.how = two ? DIRECT_TWO : DIRECT_FLOAT32 + call->type;
    else if (call->value_dim < wide)
        memset(at.view.packed_values, 0, sizeof(float) * BLOCK * wide);
    gather_queries(call, item, &at);
    shorten(call, &at, all, &at.plain);
    for (int64_t split = item->split; split < item->split_end; split++) {
        const softmax_part *part = split == item->split ? &at.whole : &at.part;
        attend_split(call, item, &at, part, split);
        for (int64_t r = 0; r < all; r++) {
            const float *sums = part->sums + r * wide;
            if (item->partial >= 0) {
                float *kept = partials + (item->partial + (split - item->split) * all + r) * stride;
                memcpy(kept, sums, sizeof(float) * wide);
                kept[wide] = part->weights[r];
                kept[wide + 1] = part->maximum[r];
            } else if (split > item->split) {
                merge(at.whole.sums + r * wide, at.whole.weights + r, at.whole.maximum + r, sums,
                      part->weights[r], part->maximum[r], wide);
            }
        }
    }
    if (item->partial < 0)
        for (int64_t r = 0; r < all; r++)
            finish(call, item, r / rows, r % rows, at.whole.sums + r * wide, at.whole.weights[r],
                   at.whole.maximum[r]);
}

/* Merge the parts that several items left for what is, but for its splits, one item. */
TARGET static void merge_item(const attention_call *call, const attention_item *item,
                              float *partials) {
    int64_t rows = (item->token_end - item->token) * (call->heads / call->kv_heads);
    int64_t all = rows * (item->head_end - item->head), stride = PARTIAL_FLOATS(call);
    int64_t wide = PADDED(call->value_dim);
    for (int64_t r = 0; r < all; r++) {
        float *whole = partials + (item->partial + r) * stride;
        for (int64_t split = item->split + 1; split < item->split_end; split++) {
            const float *part = whole + (split - item->split) * all * stride;
            merge(whole, whole + wide, whole + wide + 1, part, part[wide], part[wide + 1], wide);
        }
        finish(call, item, r / rows, r % rows, whole, whole[wide], whole[wide + 1]);
    }
}

const attention_level NAMED(attention) = {scratch_floats, attend_item, merge_item};
