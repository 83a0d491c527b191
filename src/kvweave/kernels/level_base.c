/* Kernels for any processor: SSE2 on x86-64, NEON on ARM, plain code elsewhere. */
#define VL 4
#if defined(__aarch64__)
#define PANEL 4 /* 32 registers */
#else
#define PANEL 2
#endif
#define TARGET
#define NAMED(name) name##_base
#include "attention_kernel.h"
#include "move_kernel.h"
#include "linear_kernel.h"
