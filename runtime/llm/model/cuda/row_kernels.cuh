// Kernels over rows: norms, residuals and gates.

#pragma once

// Sum of a number of each thread of a block of FS_NORM_THREADS, in all of them.
__device__ float sum_of_block(float number) {
  __shared__ float of_warps[FS_NORM_THREADS / 32];
  for (int other = 16; other > 0; other /= 2) number += __shfl_xor_sync(0xffffffffu, number, other);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < FS_NORM_THREADS / 32; ++w) total += of_warps[w];
  return total;
}

// A row by the root of the mean of its squares, and by the weight.
__device__ void write_normed(const Stored* row, const Stored* weight, Stored* normed, int width, float scale) {
  for (int at = threadIdx.x * kPer; at < width; at += blockDim.x * kPer) {
    const Pack pack = pack_at(row + at), factors = pack_at(weight + at);
    Pack out;
    for (int i = 0; i < kPer; ++i) out.at[i] = stored(loaded(pack.at[i]) * scale * loaded(factors.at[i]));
    *reinterpret_cast<Pack*>(normed + at) = out;
  }
}

// RMSNorm.  Shapes: hidden [rows / inner, inner, width] with the stride of its first dimension, weight [width], normed
// [rows, width]; width a multiple of kPer.  Grid: rows, FS_NORM_THREADS threads.
extern "C" __global__ void normalise(const Stored* hidden, const Stored* weight, Stored* normed, long long stride,
                                     int inner, int width, float eps) {
  const Stored* row = hidden + blockIdx.x / inner * stride + blockIdx.x % inner * width;
  float squares = 0.0f;
  for (int at = threadIdx.x * kPer; at < width; at += blockDim.x * kPer) {
    const Pack pack = pack_at(row + at);
    for (int i = 0; i < kPer; ++i) squares += loaded(pack.at[i]) * loaded(pack.at[i]);
  }
  const float scale = rsqrtf(sum_of_block(squares) / width + eps);
  write_normed(row, weight, normed + static_cast<long long>(blockIdx.x) * width, width, scale);
}

// Residual connection and the norm behind it.  Shapes: hidden, result, total and normed [rows, width], weight [width];
// width a multiple of kPer.  Grid: rows, FS_NORM_THREADS threads.
extern "C" __global__ void add_and_normalise(const Stored* hidden, const Stored* result, const Stored* weight,
                                             Stored* total, Stored* normed, int width, float eps) {
  const long long begin = static_cast<long long>(blockIdx.x) * width;
  float squares = 0.0f;
  for (int at = threadIdx.x * kPer; at < width; at += blockDim.x * kPer) {
    const Pack before = pack_at(hidden + begin + at), more = pack_at(result + begin + at);
    Pack sum;
    for (int i = 0; i < kPer; ++i) {
      sum.at[i] = stored(loaded(before.at[i]) + loaded(more.at[i]));
      squares += loaded(sum.at[i]) * loaded(sum.at[i]);
    }
    *reinterpret_cast<Pack*>(total + begin + at) = sum;
  }
  const float scale = rsqrtf(sum_of_block(squares) / width + eps);
  write_normed(total + begin, weight, normed + begin, width, scale);  // each thread reads what it has written
}

// Activation of gates, times what they let through.  Shapes: gate and up [rows, width], each with the stride of its
// rows, out [rows, width]; width and strides multiples of kPer.  Grid: (parts of a row, rows), FS_NORM_THREADS threads.
// tanh_gelu 0: SiLU; otherwise GELU by its approximation with tanh.
extern "C" __global__ void apply_gates(const Stored* gate, const Stored* up, Stored* out, long long gate_stride,
                                       long long up_stride, int width, int tanh_gelu) {
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * kPer;
  if (at >= width) return;
  const Pack gates = pack_at(gate + blockIdx.y * gate_stride + at), through = pack_at(up + blockIdx.y * up_stride + at);
  Pack result;
  for (int i = 0; i < kPer; ++i) {
    const float x = loaded(gates.at[i]);
    const float active = tanh_gelu ? 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)))
                                   : x / (1.0f + expf(-x));
    result.at[i] = stored(loaded(stored(active)) * loaded(through.at[i]));
  }
  *reinterpret_cast<Pack*>(out + static_cast<long long>(blockIdx.y) * width + at) = result;
}
