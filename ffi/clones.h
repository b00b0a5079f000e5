// One copy of a hot loop for each instruction set, chosen by the loader: the wheel runs on any x86-64.
#ifndef JAX_TWOSHOT_CLONES_H_
#define JAX_TWOSHOT_CLONES_H_

#include <cstdlib>  // defines __GLIBC__

// Not without glibc, whose loader it takes; not under ThreadSanitizer, which cannot run the resolvers.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define JAX_TWOSHOT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define JAX_TWOSHOT_CLONES
#endif

#endif  // JAX_TWOSHOT_CLONES_H_
