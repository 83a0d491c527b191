/* Runs quantised linear layers, and the decoder layers built on them, on all threads. */
#include "linear.h"

#include <stdlib.h>
#include <string.h>

#include "threads.h"

/* Rows that go through a layer together: what they leave between two products stays in the cache. */
#define CHUNK 192
/* Up to this many rows, each thread prepares all rows for itself rather than wait for the others. */
#define FEW 2
/* Shares per thread that a product is cut into, so that the last to finish is not far behind. */
#define SHARES 4

#define ALIGNED(n) (((n) + 63) / 64 * 64)

typedef struct {
    char *memory;
    size_t size;
} linear_workspace;

void *kvweave_linear_open(void) { return calloc(1, sizeof(linear_workspace)); }

void kvweave_linear_close(void *workspace) {
    free(((linear_workspace *)workspace)->memory);
    free(workspace);
}

/* What all threads share, and what each has for itself, within one call. */
typedef struct {
    const linear_level *level;
    int threads;
    int64_t inputs;      /* of the widest row that is quantised */
    quantized_rows rows; /* shared: CHUNK of them */
    float *between;      /* (CHUNK, outputs) of the widest product that is kept */
    char *own;           /* per thread: FEW quantised rows, and a row of floats */
    size_t own_size;
} work;

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

static quantized_rows place_rows(char *at, int64_t rows, int64_t inputs) {
    int64_t numbers = ALIGNED(rows * (inputs / GROUP) * 4);
    quantized_rows placed = {.values = (int16_t *)at, .rows = rows};
    at += ALIGNED(rows * inputs * 2);
    placed.scales = (float *)at;
    placed.sums = (int32_t *)(at + numbers);
    placed.offsets = (float *)(at + 2 * numbers);
    return placed;
}

static size_t size_of_rows(int64_t rows, int64_t inputs) {
    return ALIGNED(rows * inputs * 2) + 3 * ALIGNED(rows * (inputs / GROUP) * 4);
}

/* Room for a call's intermediate results; 0 if there is no memory. */
static int begin(work *w, linear_workspace *space, int level, int threads, int64_t rows,
                 int64_t inputs, int64_t between) {
    w->level = &linear_base;
#if defined(__x86_64__)
    if (level >= 1) w->level = &linear_avx2;
    if (level >= 2 && __builtin_cpu_supports("avx512vnni")) w->level = &linear_vnni;
#endif
    w->threads = threads;
    w->inputs = inputs;
    rows = smaller_of(rows, CHUNK);
    size_t shared = size_of_rows(rows, inputs);
    size_t kept = ALIGNED(rows * between * sizeof(float));
    w->own_size = size_of_rows(FEW, inputs) + ALIGNED(inputs * sizeof(float));
    size_t needed = shared + kept + threads * w->own_size;
    if (space->size < needed) {
        free(space->memory);
        space->memory = aligned_alloc(64, needed);
        space->size = space->memory ? needed : 0;
        if (!space->memory) return 0;
    }
    w->rows = place_rows(space->memory, rows, inputs);
    w->between = (float *)(space->memory + shared);
    w->own = space->memory + shared + kept;
    return 1;
}

/* What a product does to its rows before it quantises them. */
typedef struct {
    const float *x;
    int64_t stride, inputs;
    const float *norm; /* RMSNorm's weight, or NULL */
    float eps;
    int gated; /* x holds gate and up: silu(gate) * up is what is meant */
} row_source;

/* Quantise `rows` rows; every thread takes part. Returns where they are. */
static quantized_rows prepare(const work *w, const row_source *from, int64_t rows) {
    char *own = w->own + THREAD * w->own_size;
    float *scratch = (float *)(own + size_of_rows(FEW, w->inputs));
    int alone = rows <= FEW || w->threads == 1;
    quantized_rows to = rows <= FEW ? place_rows(own, FEW, w->inputs) : w->rows;
    int64_t share = alone ? rows : (rows + w->threads - 1) / w->threads;
    int64_t row = alone ? 0 : THREAD * share, end = smaller_of(row + share, rows);
    for (; row < end; row++) {
        const float *x = from->x + row * from->stride;
        if (from->norm) {
            w->level->rms_norm(x, from->norm, from->eps, from->inputs, scratch);
            x = scratch;
        } else if (from->gated) {
            w->level->silu_product(x, x + from->inputs, from->inputs, scratch);
            x = scratch;
        }
        w->level->quantize(x, from->inputs, &to, row);
    }
    if (!alone) {
        BARRIER
    }
    return to;
}

/* One product; every thread takes shares of its tiles. `next` was 0. */
static void multiply(const work *w, const quantized_weight *weight, const quantized_rows *from,
                     int64_t rows, float *out, int add, int64_t *next) {
    int64_t tiles = (weight->outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    int64_t share = larger_of(1, tiles / (w->threads * SHARES));
    if (w->threads == 1) share = tiles;
    for (int64_t tile; (tile = __atomic_fetch_add(next, share, __ATOMIC_RELAXED)) < tiles;)
        w->level->multiply(weight, from, rows, tile, smaller_of(tile + share, tiles), out,
                           weight->outputs, add);
}

/* Multiply. 0 when done, -1 if there was no memory. One call at a time per workspace. */
int32_t kvweave_linear(const linear_call *call, void *workspace) {
    const quantized_weight *weight = &call->weight;
    work w;
    if (!begin(&w, workspace, call->level, call->threads, call->rows, weight->inputs, 0)) return -1;
    int64_t next[2] = {0};
    int threads = w.threads;
    PARALLEL(threads)
    for (int64_t at = 0, turn = 0; at < call->rows; at += CHUNK, turn ^= 1) {
        int64_t rows = smaller_of(CHUNK, call->rows - at);
        row_source from = {call->x + at * weight->inputs, weight->inputs, weight->inputs,
                           call->norm, call->eps, 0};
        quantized_rows quantized = prepare(&w, &from, rows);
        multiply(&w, weight, &quantized, rows, call->out + at * weight->outputs, 0, &next[turn]);
        BARRIER
        if (THREAD == 0) next[turn] = 0;
    }
    return 0;
}

/* A token's queries and keys, normalised and turned, and its values, to where they belong. */
static void place_token(const work *w, const decoder_layer *layer, const decoder_call *call,
                        int64_t row, const float *qkv) {
    int64_t dim = layer->dim, kv = layer->kv_heads * dim, half = layer->turned / 2;
    const float *cosines = call->cosines + call->positions[row] * half;
    const float *sines = call->sines + call->positions[row] * half;
    int64_t slot = call->slots ? call->slots[row] : row;
    float *scratch = (float *)(w->own + THREAD * w->own_size + size_of_rows(FEW, w->inputs));
    float *turned = scratch + dim; /* begin() has made room for both */
    for (int64_t head = 0; head < layer->heads + layer->kv_heads; head++, qkv += dim) {
        int is_query = head < layer->heads;
        const float *norm = is_query ? layer->q_norm : layer->k_norm, *x = qkv;
        if (norm) {
            w->level->rms_norm(x, norm, layer->eps, dim, scratch);
            x = scratch;
        }
        float *to = is_query ? call->query + (row * layer->heads + head) * dim : turned;
        w->level->rotate(x, cosines, sines, layer->turned, dim, to);
        if (!is_query)
            w->level->round(to, dim, call->type, call->keys,
                            slot * kv + (head - layer->heads) * dim);
    }
    w->level->round(qkv, kv, call->type, call->values, slot * kv);
}

/* A decoder layer up to its attention: queries, keys and values of all rows. 0 when done. */
int32_t kvweave_before_attention(const decoder_layer *layer, const decoder_call *call,
                                 void *workspace) {
    const quantized_weight *qkv = &layer->qkv;
    work w;
    if (!begin(&w, workspace, call->level, call->threads, call->rows,
               larger_of(qkv->inputs, 2 * layer->dim), qkv->outputs))
        return -1;
    int64_t next[2] = {0};
    int threads = w.threads;
    PARALLEL(threads)
    for (int64_t at = 0, turn = 0; at < call->rows; at += CHUNK, turn ^= 1) {
        int64_t rows = smaller_of(CHUNK, call->rows - at);
        row_source from = {call->hidden + at * qkv->inputs, qkv->inputs, qkv->inputs,
                           layer->input_norm, layer->eps, 0};
        quantized_rows quantized = prepare(&w, &from, rows);
        multiply(&w, qkv, &quantized, rows, w.between, 0, &next[turn]);
        BARRIER
        if (THREAD == 0) next[turn] = 0;
        for (int64_t row = THREAD; row < rows; row += w.threads)
            place_token(&w, layer, call, at + row, w.between + row * qkv->outputs);
        if (at + CHUNK < call->rows) {
            BARRIER
        }
    }
    return 0;
}

/* The rest of a decoder layer, once attention is there; `hidden` is updated. 0 when done. */
int32_t kvweave_after_attention(const decoder_layer *layer, const decoder_call *call,
                                void *workspace) {
    const quantized_weight *o = &layer->o, *gate_up = &layer->gate_up, *down = &layer->down;
    int64_t hidden = o->outputs;
    int64_t widest = larger_of(hidden, larger_of(o->inputs, down->inputs));
    work w;
    if (!begin(&w, workspace, call->level, call->threads, call->rows, widest, gate_up->outputs))
        return -1;
    int64_t next[2][3] = {{0}};
    int threads = w.threads;
    PARALLEL(threads)
    for (int64_t at = 0, turn = 0; at < call->rows; at += CHUNK, turn ^= 1) {
        int64_t rows = smaller_of(CHUNK, call->rows - at);
        float *x = call->hidden + at * hidden;
        row_source attention = {call->attention + at * o->inputs, o->inputs, o->inputs,
                                NULL, 0, 0};
        quantized_rows quantized = prepare(&w, &attention, rows);
        multiply(&w, o, &quantized, rows, x, 1, &next[turn][0]);
        BARRIER
        if (THREAD == 0) memset(next[turn ^ 1], 0, sizeof next[0]);
        row_source normed = {x, hidden, hidden, layer->post_norm, layer->eps, 0};
        quantized = prepare(&w, &normed, rows);
        multiply(&w, gate_up, &quantized, rows, w.between, 0, &next[turn][1]);
        BARRIER
        row_source gated = {w.between, gate_up->outputs, down->inputs, NULL, 0, 1};
        quantized = prepare(&w, &gated, rows);
        multiply(&w, down, &quantized, rows, x, 1, &next[turn][2]);
        if (at + CHUNK < call->rows) {
            BARRIER
        }
    }
    return 0;
}

/* Sizes of the structs that the caller fills in, see kvweave_sizes. */
int64_t kvweave_linear_sizes(void) {
    return (int64_t)sizeof(linear_call) << 40 | sizeof(decoder_layer) << 20 | sizeof(decoder_call);
}
