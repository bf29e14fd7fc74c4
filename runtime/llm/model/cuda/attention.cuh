// Attention of a decode step over the cache, through block tables.

#pragma once

// Slot of a position in the cache, by the sequence's block table.
__device__ int slot_of(const long long* table, int place) {
  return static_cast<int>(table[place / kBlockTokens]) * kBlockTokens + place % kBlockTokens;
}

__device__ int from_lane(int number, int lane) { return __shfl_sync(kAll, number, lane); }

// Scores of a group's queries and a warp's next kStep keys, whose slots are in its lanes. `times` writes those of query
// lane / 4 and keys 8 n + 2 (lane % 4) and the one behind it to score[n]; `scratch` is the warp's.
#if defined(FS_TENSOR_CORES)
// By the tensor cores: products of [16, 16] queries, half of them zeros, and [16, 8] keys. The order of a head's numbers
// does not matter, so a lane takes 16 bytes of both that lie together.
constexpr int kPacks = kLanes / 4;

struct alignas(16) Words {
  unsigned at[4];
};

struct Keys {
  Words at[kTiles][kPacks];

  __device__ Keys(const Stored* keys, int slot) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Stored* key = keys + static_cast<long long>(from_lane(slot, n * 8 + lane / 4)) * kHeadDim;
#pragma unroll
      for (int j = 0; j < kPacks; ++j)
        at[n][j] = *reinterpret_cast<const Words*>(key + (j * 4 + lane % 4) * kPer);
    }
  }
};

struct Queries {
  Words at[kPacks];

  __device__ explicit Queries(const Stored* queries) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      at[j] = {};
      if (lane / 4 < kGroup)
        at[j] = *reinterpret_cast<const Words*>(queries + lane / 4 * kHeadDim + (j * 4 + lane % 4) * kPer);
    }
  }

  __device__ void times(const Keys& keys, float (*)[kGroup], float (*score)[2]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float sums[4] = {};
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        multiply_and_add(sums, at[j].at[0], at[j].at[1], keys.at[n][j].at[0], keys.at[n][j].at[1]);
        multiply_and_add(sums, at[j].at[2], at[j].at[3], keys.at[n][j].at[2], keys.at[n][j].at[3]);
      }
      score[n][0] = sums[0];
      score[n][1] = sums[1];
    }
  }
};
#else
struct Keys {
  Pack at[kUnroll];

  __device__ Keys(const Stored* keys, int slot) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      at[u] = pack_at(keys + static_cast<long long>(from_lane(slot, u * kKeys + lane / kLanes)) * kHeadDim +
                      lane % kLanes * kPer);
  }
};

struct Queries {
  float at[kGroup][kPer];

  __device__ explicit Queries(const Stored* queries) {
    for (int g = 0; g < kGroup; ++g) {
      const Pack pack = pack_at(queries + g * kHeadDim + threadIdx.x % kLanes * kPer);
      for (int i = 0; i < kPer; ++i) at[g][i] = loaded(pack.at[i]);
    }
  }

  __device__ void times(const Keys& keys, float (*scratch)[kGroup], float (*score)[2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        float sum = 0.0f;
        for (int i = 0; i < kPer; ++i) sum += at[g][i] * loaded(keys.at[u].at[i]);
        for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(kAll, sum, other);
        if (lane % kLanes == 0) scratch[u * kKeys + lane / kLanes][g] = sum;
      }
    }
    __syncwarp();
    for (int n = 0; n < kTiles; ++n)
      for (int i = 0; i < 2; ++i)
        score[n][i] = lane / 4 < kGroup ? scratch[n * 8 + lane % 4 * 2 + i][lane / 4] : 0.0f;
    __syncwarp();
  }
};
#endif

// Attention of one query a sequence over the cache, through its block table. Each thread block computes kGroup heads of
// a sequence over one part of its keys, with a running softmax (FlashAttention). A warp takes kStep keys at a time: row
// lane / 4 of the group has its largest score and sum of weights in four lanes, and of the result every lane has the
// same numbers of each row, over every kKeys-th key.
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
  const int own = lane / 4, pair = lane % 4;

  const int context = static_cast<int>(positions[static_cast<long long>(row) * position_stride]) + 1;
  const int first = window > 0 && context > window ? context - window : 0;
  const int share = (context - first + splits - 1) / splits;
  const int begin = first + split * share, end = min(context, begin + share);

  const long long* table = tables + static_cast<long long>(row) * table_stride;
  const Stored* keys = cache + static_cast<long long>(kv) * slots * kHeadDim;
  const Stored* values = keys + static_cast<long long>(kv_heads) * slots * kHeadDim + part * kPer;
  const Queries queries(query + (static_cast<long long>(row) * heads + group * kGroup) * kHeadDim);

  __shared__ float weights[kWarps][kStep][kGroup], factors[kWarps][kGroup];
  float result[kGroup][kPer] = {}, largest = kNone, sum = 0.0f;
  int slot = slot_of(table, min(begin + warp * kStep + lane % kStep, end - 1));
  for (int base = begin + warp * kStep; base < end; base += kWarps * kStep) {
    Keys key(keys, slot);
    Pack value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      value[u] = pack_at(values + static_cast<long long>(from_lane(slot, u * kKeys + within)) * kHeadDim);
    slot = slot_of(table, min(base + kWarps * kStep + lane % kStep, end - 1));

    float score[kTiles][2];
    queries.times(key, weights[warp], score);
    float best = largest;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score[n][i] *= scale;
        if (cap > 0.0f) score[n][i] = cap * tanhf(score[n][i] / cap);
        if (base + n * 8 + pair * 2 + i >= end) score[n][i] = kNone;
        best = fmaxf(best, score[n][i]);
      }
    }
    best = fmaxf(best, __shfl_xor_sync(kAll, best, 1));
    best = fmaxf(best, __shfl_xor_sync(kAll, best, 2));
    const float factor = __expf(largest - best);
    const bool rescales = __any_sync(kAll, best != largest);
    largest = best;
    sum *= factor;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float weight = base + n * 8 + pair * 2 + i < end ? __expf(score[n][i] - best) : 0.0f;
        sum += weight;
        if (own < kGroup) weights[warp][n * 8 + pair * 2 + i][own] = weight;
      }
    }
    if (pair == 0 && own < kGroup) factors[warp][own] = factor;
    __syncwarp();
    if (rescales) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const float by = factors[warp][g];
        for (int i = 0; i < kPer; ++i) result[g][i] *= by;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float wide[kPer];
      for (int i = 0; i < kPer; ++i) wide[i] = loaded(value[u].at[i]);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const float weight = weights[warp][u * kKeys + within][g];
        for (int i = 0; i < kPer; ++i) result[g][i] += weight * wide[i];
      }
    }
    __syncwarp();  // the weights are written again
  }
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);

  __shared__ float all[kParts][kGroup][kHeadDim], tops[kWarps][kGroup], sums[kWarps][kGroup];
  for (int g = 0; g < kGroup; ++g)
    for (int i = 0; i < kPer; ++i) all[warp * kKeys + within][g][part * kPer + i] = result[g][i];
  if (pair == 0 && own < kGroup) {
    tops[warp][own] = largest;
    sums[warp][own] = sum;
  }
  __syncthreads();
  for (int index = threadIdx.x; index < kGroup * kHeadDim; index += blockDim.x) {
    const int g = index / kHeadDim, at = index % kHeadDim;
    float best = kNone, total = 0.0f, whole = 0.0f;
    for (int w = 0; w < kWarps; ++w) best = fmaxf(best, tops[w][g]);
    for (int w = 0; w < kWarps; ++w) {
      const float factor = __expf(tops[w][g] - best);
      total += sums[w][g] * factor;
      for (int p = w * kKeys; p < (w + 1) * kKeys; ++p) whole += all[p][g][at] * factor;
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
