// Loops that are compiled for machines with and without wide vectors. Internal to kernels of ours.
#pragma once

// Functions that are compiled twice; which one runs is decided when the program is loaded. `SMP_WIDE_VECTORS` never fuses a
// multiplication with an addition; in `SMP_FUSED_MULTIPLY_ADD` __builtin_fmaf() is one instruction where there is one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SMP_WIDE_VECTORS __attribute__((target_clones("default", "avx2")))
#define SMP_FUSED_MULTIPLY_ADD __attribute__((target_clones("default", "fma")))
#else
#define SMP_WIDE_VECTORS
#define SMP_FUSED_MULTIPLY_ADD
#endif
