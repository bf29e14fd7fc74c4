// Kernels of a decode step: one token a sequence. Compiled at run time (decode_kernels.py) for one shape of a model:
//
//   FS_FP32, FS_FP16 or FS_BF16   type of weights, activations, keys and values
//   FS_HEAD_DIM                   numbers of a head, of which 4, 8, 16 or 32 lanes hold all, 16 bytes each
//   FS_GROUP                      query heads that one thread block computes, which share a key-value head
//   FS_BLOCK_TOKENS               tokens of a block of the cache
//   FS_THREADS, FS_NORM_THREADS   threads of a block of `attend`, and of kernels over rows
//
// The cache of a layer is [2, kv_heads, slots, head_dim]: keys, then values. No headers: a machine that runs models
// need not have them.

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

constexpr int kHeadDim = FS_HEAD_DIM;
constexpr int kGroup = FS_GROUP;
constexpr int kBlockTokens = FS_BLOCK_TOKENS;
constexpr int kPer = 16 / sizeof(Stored);    // numbers a lane holds of a head
constexpr int kLanes = kHeadDim / kPer;      // lanes that hold a head
constexpr int kKeys = 32 / kLanes;           // keys that a warp reads together
constexpr int kUnroll = 4;                   // reads in flight
constexpr int kWarps = FS_THREADS / 32;
constexpr int kBlocks = kGroup <= 4 ? 4 : 1;  // of a multiprocessor, at least: more would spill registers
constexpr int kParts = kWarps * kKeys;       // softmaxes that a thread block merges
constexpr float kNone = -1e30f;              // below every score, and finite: differences of two are no NaN

struct alignas(16) Pack {
  Stored at[kPer];
};

__device__ Pack pack_at(const Stored* address) { return *reinterpret_cast<const Pack*>(address); }

// Rotates queries and keys by their positions, and stores keys and values in the cache.
// Shapes: query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim], each with the stride of its rows;
// cosines and signed_sines [rows, rotary], written [rows], rotated [rows, heads, head_dim].
// Grid: (heads + 2 * kv_heads, rows), a thread a number of a head.
extern "C" __global__ void rotate_and_store(const Stored* query, const Stored* key, const Stored* value,
                                            const Stored* cosines, const Stored* signed_sines,
                                            const long long* written, Stored* rotated, Stored* cache, long long slots,
                                            long long query_stride, long long key_stride, long long value_stride,
                                            int heads, int kv_heads, int rotary) {
  const int row = blockIdx.y, at = threadIdx.x;
  const int head = blockIdx.x, kv = head - heads;
  const Stored* source = kv < 0          ? query + row * query_stride + head * kHeadDim
                         : kv < kv_heads ? key + row * key_stride + kv * kHeadDim
                                         : value + row * value_stride + (kv - kv_heads) * kHeadDim;
  float number = loaded(source[at]);
  if (kv < kv_heads && at < rotary) {
    const int half = rotary / 2;
    const float other = loaded(source[at < half ? at + half : at - half]);
    number = number * loaded(cosines[row * rotary + at]) + other * loaded(signed_sines[row * rotary + at]);
  }
  Stored* target = kv < 0 ? rotated + (static_cast<long long>(row) * heads + head) * kHeadDim
                          : cache + (kv * slots + written[row]) * kHeadDim;
  target[at] = stored(number);
}

// Attention of one query a sequence over the cache, through its block table. Each thread block computes kGroup heads of
// a sequence over one part of its keys, with a running softmax (FlashAttention); each group of kLanes lanes has a key
// at a time, and lanes hold the same numbers of query, keys, values and result.
// Shapes: query [rows, heads, head_dim]; positions [rows] and tables [rows, blocks], each with its stride; partial
// [rows, heads / kGroup, splits, kGroup, head_dim + 2]: weighted values, largest score, sum of weights.
// Grid: (splits, heads / kGroup, rows), FS_THREADS threads.  window 0: every key; cap 0: scores as they are.
extern "C" __global__ void __launch_bounds__(FS_THREADS, kBlocks)
    attend(const Stored* query, const Stored* cache, const long long* positions, const long long* tables,
           float* partial, Stored* mixed, long long slots, int position_stride, int table_stride, int kv_heads,
           int window, float scale, float cap) {
  const int split = blockIdx.x, splits = gridDim.x, group = blockIdx.y, row = blockIdx.z;
  const int heads = gridDim.y * kGroup, kv = group * kGroup / (heads / kv_heads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane % kLanes, within = lane / kLanes;

  const int context = static_cast<int>(positions[static_cast<long long>(row) * position_stride]) + 1;
  const int first = window > 0 && context > window ? context - window : 0;
  const int share = (context - first + splits - 1) / splits;
  const int begin = first + split * share, end = min(context, begin + share);

  const long long* table = tables + static_cast<long long>(row) * table_stride;
  const Stored* keys = cache + static_cast<long long>(kv) * slots * kHeadDim + part * kPer;
  const Stored* values = keys + static_cast<long long>(kv_heads) * slots * kHeadDim;
  const Stored* queries = query + (static_cast<long long>(row) * heads + group * kGroup) * kHeadDim + part * kPer;

  float asked[kGroup][kPer], result[kGroup][kPer], largest[kGroup], sum[kGroup];
  for (int g = 0; g < kGroup; ++g) {
    const Pack pack = pack_at(queries + g * kHeadDim);
    for (int i = 0; i < kPer; ++i) {
      asked[g][i] = loaded(pack.at[i]) * scale;
      result[g][i] = 0.0f;
    }
    largest[g] = kNone;
    sum[g] = 0.0f;
  }

  for (int base = begin + warp * kKeys * kUnroll; base < end; base += kWarps * kKeys * kUnroll) {
    Pack key[kUnroll], value[kUnroll];
    float weight[kUnroll][kGroup];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int place = min(base + u * kKeys + within, end - 1);
      const long long slot = table[place / kBlockTokens] * kBlockTokens + place % kBlockTokens;
      key[u] = pack_at(keys + slot * kHeadDim);
      value[u] = pack_at(values + slot * kHeadDim);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        float score = 0.0f;
        for (int i = 0; i < kPer; ++i) score += asked[g][i] * loaded(key[u].at[i]);
        for (int other = kLanes / 2; other > 0; other /= 2) score += __shfl_xor_sync(0xffffffffu, score, other);
        weight[u][g] = cap > 0.0f ? cap * tanhf(score / cap) : score;
      }
    }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      float best = largest[g];
      for (int u = 0; u < kUnroll; ++u)
        if (base + u * kKeys + within < end) best = fmaxf(best, weight[u][g]);
      const float factor = __expf(largest[g] - best);
      largest[g] = best;
      sum[g] *= factor;
      for (int i = 0; i < kPer; ++i) result[g][i] *= factor;
      for (int u = 0; u < kUnroll; ++u) {
        const float one = base + u * kKeys + within < end ? __expf(weight[u][g] - best) : 0.0f;
        sum[g] += one;
        for (int i = 0; i < kPer; ++i) result[g][i] += one * loaded(value[u].at[i]);
      }
    }
  }

  __shared__ float all[kParts][kGroup][kHeadDim], tops[kParts][kGroup], sums[kParts][kGroup];
  const int mine = warp * kKeys + within;
  for (int g = 0; g < kGroup; ++g) {
    for (int i = 0; i < kPer; ++i) all[mine][g][part * kPer + i] = result[g][i];
    if (part == 0) {
      tops[mine][g] = largest[g];
      sums[mine][g] = sum[g];
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < kGroup * kHeadDim; index += blockDim.x) {
    const int g = index / kHeadDim, at = index % kHeadDim;
    float best = kNone, total = 0.0f, whole = 0.0f;
    for (int p = 0; p < kParts; ++p) best = fmaxf(best, tops[p][g]);
    for (int p = 0; p < kParts; ++p) {
      const float factor = __expf(tops[p][g] - best);
      total += sums[p][g] * factor;
      whole += all[p][g][at] * factor;
    }
    if (splits == 1) {
      mixed[(static_cast<long long>(row) * heads + group * kGroup + g) * kHeadDim + at] = stored(whole / total);
    } else {
      float* out = partial + (((static_cast<long long>(row) * gridDim.y + group) * splits + split) * kGroup + g) *
                                 (kHeadDim + 2);
      out[at] = whole;
      if (at == 0) {
        out[kHeadDim] = best;
        out[kHeadDim + 1] = total;
      }
    }
  }
}

// Merges the parts of `attend`.  Grid: (heads, rows), a thread a number of a head.
extern "C" __global__ void combine(const float* partial, Stored* mixed, int splits) {
  const int head = blockIdx.x, row = blockIdx.y, at = threadIdx.x;
  const long long group = static_cast<long long>(row) * (gridDim.x / kGroup) + head / kGroup;
  const float* part = partial + (group * splits * kGroup + head % kGroup) * (kHeadDim + 2);
  const int next = kGroup * (kHeadDim + 2);
  float best = kNone, total = 0.0f, whole = 0.0f;
  for (int s = 0; s < splits; ++s) best = fmaxf(best, part[s * next + kHeadDim]);
  for (int s = 0; s < splits; ++s) {
    const float factor = __expf(part[s * next + kHeadDim] - best);
    total += part[s * next + kHeadDim + 1] * factor;
    whole += part[s * next + at] * factor;
  }
  mixed[(static_cast<long long>(row) * gridDim.x + head) * kHeadDim + at] = stored(whole / total);
}

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
