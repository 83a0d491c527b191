/* Rotating keys, and queries, in the instruction set of the file that includes this (see simd.h). */
#ifndef KVWEAVE_TURN_H
#define KVWEAVE_TURN_H

#include "simd.h"

/* Which of `dim` numbers are rotated, and how they pair: see move.h. */
typedef struct {
    int64_t dim, offset, turned;
    int interleaved;
} rotated_part;
#define PART_OF(owner) {(owner)->key_dim, (owner)->offset, (owner)->turned, (owner)->interleaved}

/* One head's key or query. `cosines`: (2, turned), cos, then sin with its sign. */
INLINE void turn(int type, rotated_part part, const char *from, const float *cosines, char *to) {
    int64_t turned = part.turned, half = turned / 2, size = BYTES(type);
    const float *sines = cosines + turned;
    int64_t before = part.offset * size, after = (part.offset + turned) * size;
    memcpy(to, from, before);
    memcpy(to + after, from + after, part.dim * size - after);
    from += before;
    to += before;
    int64_t i = 0;
    if (part.interleaved)
        for (; i + VL <= turned; i += VL) {
            vf x = load_stored(type, from, i);
            store_stored(type, to, i, x * load(cosines + i) + SWAP_PAIRS(x) * load(sines + i));
        }
    else if (half % VL == 0)
        for (; i < half; i += VL) {
            vf x = load_stored(type, from, i), y = load_stored(type, from, i + half);
            store_stored(type, to, i, x * load(cosines + i) + y * load(sines + i));
            store_stored(type, to, i + half,
                         y * load(cosines + i + half) + x * load(sines + i + half));
        }
    if (part.interleaved || half % VL)
        for (; i < turned; i++) {
            int64_t partner = part.interleaved ? i ^ 1 : (i + half) % turned;
            float x = load_one(type, from, i), y = load_one(type, from, partner);
            store_one(type, to, i, x * cosines[i] + y * sines[i]);
        }
}

#endif
