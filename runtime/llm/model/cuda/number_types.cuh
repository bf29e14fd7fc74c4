// Numbers of FS_FP32, FS_FP16 or FS_BF16, and the tensor cores' products of them, as instructions of PTX. No headers: a
// machine that runs models need not have them.

#pragma once

#if defined(FS_FP32)
typedef float Stored;
__device__ float loaded(Stored value) { return value; }
__device__ Stored stored(float value) { return value; }
#elif defined(FS_FP16)
typedef unsigned short Stored;
__device__ float loaded(Stored value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}
__device__ Stored stored(float value) {
  Stored narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
#else
typedef unsigned short Stored;
__device__ float loaded(Stored value) { return __uint_as_float(static_cast<unsigned>(value) << 16); }
__device__ Stored stored(float value) {
  Stored narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
#endif

#if !defined(FS_FP32) && __CUDA_ARCH__ >= 800
#define FS_TENSOR_CORES

// Adds the product of matrices [16, 16] and [16, 8] to sums [16, 8], all in the registers of a warp: lane 4 r + c has
// numbers 2 c, 2 c + 1 (low) and 2 c + 8, 2 c + 9 (high) of row r of the first and column r of the second matrix, and
// numbers 2 c and 2 c + 1 of row r of the sums in its first two. The first matrix's last eight rows are zeros.
__device__ void multiply_and_add(float* sums, unsigned left_low, unsigned left_high, unsigned right_low,
                                 unsigned right_high) {
#if defined(FS_FP16)
#define FS_TYPE "f16"
#else
#define FS_TYPE "bf16"
#endif
  asm("mma.sync.aligned.m16n8k16.row.col.f32." FS_TYPE "." FS_TYPE ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left_low), "r"(0), "r"(left_high), "r"(right_low), "r"(right_high));
}
#endif
