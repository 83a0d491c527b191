/* Kernels for x86-64 processors with AVX-512. */
#if defined(__x86_64__)
#define VL 16
#define PANEL 4
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define NAMED(name) name##_avx512
#include "attention_kernel.h"
#include "move_kernel.h"
#else
typedef int nothing_here; /* a file must not be empty */
#endif
