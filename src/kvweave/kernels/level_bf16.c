/* Attention for x86-64 processors with AVX-512 and its products of bfloat16 numbers. */
#if defined(__x86_64__)
#define VL 16
#define PANEL 4
#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define NAMED(name) name##_bf16
#define TWO_PRODUCTS 1
#include "attention_kernel.h"
#else
typedef int nothing_here; /* a file must not be empty */
#endif
