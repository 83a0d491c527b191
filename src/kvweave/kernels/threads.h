/* Threads, where the compiler offers them. The runtime is the one that torch has loaded, if it is
 * of the same kind: its threads may still be spinning from the last operation, and are at hand. */
#ifndef KVWEAVE_THREADS_H
#define KVWEAVE_THREADS_H

#include <stdint.h>
#if defined(_OPENMP)
#include <omp.h>
#define PARALLEL(threads) _Pragma("omp parallel num_threads(threads) if ((threads) > 1)")
#define BARRIER _Pragma("omp barrier")
#define THREAD omp_get_thread_num()
#else
#define PARALLEL(threads) (void)(threads);
#define BARRIER
#define THREAD 0
#endif

#endif
