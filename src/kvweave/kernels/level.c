/* Which instruction set this processor has. */
#include "attention.h"
#include "move.h"

/* The best level: 0 nothing in particular, 1 AVX2 (with FMA and F16C), 2 AVX-512, 3 its
 * products of bfloat16 numbers as well. All below it work, too. */
int32_t kvweave_level(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return 1;
#endif
    return 0;
}

/* Sizes of the structs that the caller must fill in, so that it never calls a build that does not
 * fit. */
int64_t kvweave_sizes(void) {
    return (int64_t)sizeof(attention_call) << 48 | (int64_t)sizeof(quantize_call) << 36 |
           (int64_t)sizeof(page_copy) << 24 | sizeof(move_call) << 12 | sizeof(move_layer);
}
