/* Runs a move on all threads, quantises fresh KV, and copies whole pages. */
#include "move.h"

#include <string.h>

#include "threads.h"

/* Every token of every run, in every layer. Sources and targets are distinct slots in the pool. */
void kvweave_move(const move_call *call) {
    move_kernel *kernel = move_base;
#if defined(__x86_64__)
    if (call->level == 1) kernel = move_avx2;
    if (call->level >= 2) kernel = move_avx512;
#endif
    int64_t tokens = call->run_start[call->runs];
    int64_t chunks = (tokens + MOVE_CHUNK - 1) / MOVE_CHUNK, next = 0;
    int threads = call->threads;
    PARALLEL(threads)
    for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < chunks * call->layers;) {
        const move_layer *layer = &call->layer[i / chunks];
        int64_t first = i % chunks * MOVE_CHUNK;
        int64_t last = first + MOVE_CHUNK < tokens ? first + MOVE_CHUNK : tokens;
        for (int64_t run = 0; run < call->runs; run++) {
            int64_t from = call->run_start[run], to = call->run_start[run + 1];
            if (from < first) from = first;
            if (to > last) to = last;
            if (from < to) kernel(call, layer, run, from, to);
        }
    }
}

/* One thread does: of a step's time it is too little to wake another. */
void kvweave_quantize(const quantize_call *call) {
    quantize_kernel *kernel = quantize_kv_base;
#if defined(__x86_64__)
    if (call->level == 1) kernel = quantize_kv_avx2;
    if (call->level >= 2) kernel = quantize_kv_avx512;
#endif
    kernel(call);
}

/* On the calling thread: others have steps to run. */
void kvweave_copy_pages(const page_copy *call) {
    char *row = call->rows;
    for (int64_t t = 0; t < call->tensors; row += call->bytes[t++]) {
        size_t bytes = call->bytes[t];
        for (int64_t i = 0; i < call->pages; i++) {
            char *inside = call->tensor[t] + call->page[i] * (int64_t)bytes;
            char *outside = row + i * call->stride;
            memcpy(call->into_pool ? inside : outside, call->into_pool ? outside : inside, bytes);
        }
    }
}
