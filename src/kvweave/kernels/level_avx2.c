/* Kernels for x86-64 processors with AVX2. */
#if defined(__x86_64__)
#define VL 8
#define PANEL 2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NAMED(name) name##_avx2
#include "attention_kernel.h"
#include "move_kernel.h"
#include "linear_kernel.h"
#else
typedef int nothing_here; /* a file must not be empty */
#endif
