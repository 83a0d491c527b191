/* Kernels for x86-64 processors with AVX-512 and its integer products (VNNI). */
#if defined(__x86_64__)
#define VL 16
#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define NAMED(name) name##_vnni
#define VNNI
#include "linear_kernel.h"
#else
typedef int nothing_here; /* a file must not be empty */
#endif
