/* Moving the KV of some tokens, in the instruction set of the file that includes this (see simd.h).
 */
#include "move.h"
#include "simd.h"

/* One head's key, `dim` numbers, with its rotated part beginning at `offset`. */
INLINE void turn_key(int bfloat16, const move_layer *layer, const char *from, const float *cosines,
                     char *to) {
    int64_t turned = layer->turned, half = turned / 2, size = bfloat16 ? 2 : 4;
    const float *sines = cosines + turned;
    int64_t before = layer->offset * size, after = (layer->offset + turned) * size;
    memcpy(to, from, before);
    memcpy(to + after, from + after, layer->key_dim * size - after);
    from += before;
    to += before;
    int64_t i = 0;
    if (layer->interleaved)
        for (; i + VL <= turned; i += VL) {
            vf x = load_stored(bfloat16, from, i);
            store_stored(bfloat16, to, i, x * load(cosines + i) + SWAP_PAIRS(x) * load(sines + i));
        }
    else if (half % VL == 0)
        for (; i < half; i += VL) {
            vf x = load_stored(bfloat16, from, i), y = load_stored(bfloat16, from, i + half);
            store_stored(bfloat16, to, i, x * load(cosines + i) + y * load(sines + i));
            store_stored(bfloat16, to, i + half,
                         y * load(cosines + i + half) + x * load(sines + i + half));
        }
    if (layer->interleaved || half % VL)
        for (; i < turned; i++) {
            int64_t partner = layer->interleaved ? i ^ 1 : (i + half) % turned;
            float x = load_one(bfloat16, from, i), y = load_one(bfloat16, from, partner);
            store_one(bfloat16, to, i, x * cosines[i] + y * sines[i]);
        }
}

TARGET static void move_keys(const move_call *call, const move_layer *layer, int64_t run,
                             int64_t first, int64_t last) {
    int bfloat16 = call->bfloat16;
    int64_t bytes = layer->key_dim * (bfloat16 ? 2 : 4), row = layer->heads * bytes;
    const float *turns = layer->turns + run * 2 * layer->turned;
    for (int64_t t = first; t < last; t++) {
        const char *from = (const char *)layer->keys + call->sources[t] * row;
        char *to = (char *)layer->keys + call->targets[t] * row;
        for (int64_t head = 0; head < layer->heads; head++, from += bytes, to += bytes)
            if (bfloat16)
                turn_key(1, layer, from, turns, to);
            else
                turn_key(0, layer, from, turns, to);
    }
}

/* Values do not change on the way: whole stretches of consecutive slots are copied at once. */
static void move_values(const move_call *call, const move_layer *layer, int64_t first,
                        int64_t last) {
    int64_t row = layer->heads * layer->value_dim * (call->bfloat16 ? 2 : 4);
    const int32_t *sources = call->sources, *targets = call->targets;
    char *values = layer->values;
    for (int64_t t = first, end; t < last; t = end) {
        for (end = t + 1; end < last && sources[end] == sources[end - 1] + 1 &&
                          targets[end] == targets[end - 1] + 1;)
            end++;
        memcpy(values + targets[t] * row, values + sources[t] * row, (end - t) * row);
    }
}

void NAMED(move)(const move_call *call, const move_layer *layer, int64_t run, int64_t first,
                 int64_t last) {
    if (!layer->zeroed) {
        move_keys(call, layer, run, first, last);
        move_values(call, layer, first, last);
        return;
    }
    int64_t size = call->bfloat16 ? 2 : 4;
    int64_t key_row = layer->heads * layer->key_dim * size;
    int64_t value_row = layer->heads * layer->value_dim * size;
    for (int64_t t = first; t < last; t++) {
        memset((char *)layer->keys + call->targets[t] * key_row, 0, key_row);
        memset((char *)layer->values + call->targets[t] * value_row, 0, value_row);
    }
}
