/* Moving the KV of some tokens, and quantising fresh KV, in the instruction set of the file that
 * includes this (see simd.h). */
#include "move.h"
#include "simd.h"
#include "turn.h"

/* One head's INT8 key: turned in float32, then rounded once, with scales of its own. */
TARGET static void turn_int8(const move_layer *layer, int64_t source, int64_t target,
                             const float *turns) {
    int64_t dim = layer->key_dim, groups = KEY_GROUPS(dim);
    const int8_t *from = (const int8_t *)layer->keys + source * dim;
    float straight[dim], turned[dim];
    rotated_part part = PART_OF(layer);
    for (int64_t i = 0; i < dim; i += KEY_GROUP)
        widen(INT8, from + i, dim - i < KEY_GROUP ? dim - i : KEY_GROUP,
              layer->key_scales[source * groups + i / KEY_GROUP], straight + i);
    turn(FLOAT32, part, (char *)straight, turns, (char *)turned);
    quantize_groups(FLOAT32, (char *)turned, dim, KEY_GROUP, (int8_t *)layer->keys + target * dim,
                    layer->key_scales + target * groups);
}

TARGET static void move_keys(const move_call *call, const move_layer *layer, int64_t run,
                             int64_t first, int64_t last) {
    int64_t heads = layer->heads, bytes = layer->key_dim * BYTES(call->type);
    const float *turns = layer->turns + run * 2 * layer->turned;
    rotated_part part = PART_OF(layer);
    for (int64_t t = first; t < last; t++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t source = call->sources[t] * heads + head;
            int64_t target = call->targets[t] * heads + head;
            const char *from = (const char *)layer->keys + source * bytes;
            char *to = (char *)layer->keys + target * bytes;
            if (call->type == FLOAT32)
                turn(FLOAT32, part, from, turns, to);
            else if (call->type == BFLOAT16)
                turn(BFLOAT16, part, from, turns, to);
            else
                turn_int8(layer, source, target, turns);
        }
}

/* Values do not change on the way: whole stretches of consecutive slots are copied at once. */
static void move_values(const move_call *call, const move_layer *layer, int64_t first,
                        int64_t last) {
    int64_t row = layer->heads * layer->value_dim * BYTES(call->type), heads = layer->heads;
    const int32_t *sources = call->sources, *targets = call->targets;
    char *values = layer->values;
    float *scales = layer->value_scales;
    for (int64_t t = first, end; t < last; t = end) {
        for (end = t + 1; end < last && sources[end] == sources[end - 1] + 1 &&
                          targets[end] == targets[end - 1] + 1;)
            end++;
        memcpy(values + targets[t] * row, values + sources[t] * row, (end - t) * row);
        if (call->type == INT8)
            memcpy(scales + targets[t] * heads, scales + sources[t] * heads,
                   (end - t) * heads * sizeof(float));
    }
}

void NAMED(move)(const move_call *call, const move_layer *layer, int64_t run, int64_t first,
                 int64_t last) {
    if (!layer->zeroed) {
        move_keys(call, layer, run, first, last);
        move_values(call, layer, first, last);
        return;
    }
    int64_t size = BYTES(call->type), heads = layer->heads;
    int64_t key_row = layer->heads * layer->key_dim * size;
    int64_t value_row = layer->heads * layer->value_dim * size;
    for (int64_t t = first; t < last; t++) {
        memset((char *)layer->keys + call->targets[t] * key_row, 0, key_row);
        memset((char *)layer->values + call->targets[t] * value_row, 0, value_row);
        if (call->type != INT8) continue;
        int64_t scales = heads * KEY_GROUPS(layer->key_dim);
        memset(layer->key_scales + call->targets[t] * scales, 0, scales * sizeof(float));
        memset(layer->value_scales + call->targets[t] * heads, 0, heads * sizeof(float));
    }
}

/* Fresh KV to its slots; see numbers.h. */
TARGET void NAMED(quantize_kv)(const quantize_call *call) {
    int64_t heads = call->heads, dim = call->dim, bytes = dim * BYTES(call->type);
    int64_t groups = (dim + call->group - 1) / call->group;
    const char *from = call->numbers;
    for (int64_t t = 0; t < call->tokens; t++)
        for (int64_t head = 0; head < heads; head++, from += bytes) {
            int64_t target = call->slots[t] * heads + head;
            int8_t *to = call->pool + target * dim;
            float *scales = call->scales + target * groups;
            if (call->type == FLOAT32)
                quantize_groups(FLOAT32, from, dim, call->group, to, scales);
            else
                quantize_groups(BFLOAT16, from, dim, call->group, to, scales);
        }
}
