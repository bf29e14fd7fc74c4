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

#include "number_types.cuh"

constexpr int kHeadDim = FS_HEAD_DIM;
constexpr int kGroup = FS_GROUP;
constexpr int kBlockTokens = FS_BLOCK_TOKENS;
constexpr int kPer = 16 / sizeof(Stored);          // numbers a lane holds of a head
constexpr int kLanes = kHeadDim / kPer;            // lanes that hold a head
constexpr int kKeys = 32 / kLanes;                 // keys that a warp reads together
constexpr int kTiles = kKeys > 1 ? kKeys / 2 : 1;  // of eight keys, for which a warp has scores at a time
constexpr int kStep = 8 * kTiles;
constexpr int kUnroll = kStep / kKeys;             // reads in flight
constexpr int kWarps = FS_THREADS / 32;
constexpr int kBlocks = kGroup <= 4 && kHeadDim <= 128 ? 4 : 1;  // of a multiprocessor: more would spill registers
constexpr int kParts = kWarps * kKeys;             // results that a thread block adds up
constexpr float kNone = -1e30f;                    // below every score, and finite: differences of two are no NaN
constexpr unsigned kAll = 0xffffffffu;             // lanes of a warp

struct alignas(16) Pack {
  Stored at[kPer];
};

__device__ Pack pack_at(const Stored* address) { return *reinterpret_cast<const Pack*>(address); }

// Rotates queries and keys by their positions, and stores keys and values in the cache.
// Shapes: query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim], each with the stride of its rows, a
// multiple of kPer; cosines and signed_sines [rows, rotary], written [rows], rotated [rows, heads, head_dim].
// Grid: (parts of a row, rows), FS_THREADS threads, kLanes of them a head.
extern "C" __global__ void rotate_and_store(const Stored* query, const Stored* key, const Stored* value,
                                            const Stored* cosines, const Stored* signed_sines,
                                            const long long* written, Stored* rotated, Stored* cache, long long slots,
                                            long long query_stride, long long key_stride, long long value_stride,
                                            int heads, int kv_heads, int rotary) {
  const int row = blockIdx.y, thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int head = thread / kLanes, kv = head - heads, begin = thread % kLanes * kPer;
  if (kv >= 2 * kv_heads) return;
  const Stored* source = kv < 0          ? query + row * query_stride + head * kHeadDim
                         : kv < kv_heads ? key + row * key_stride + kv * kHeadDim
                                         : value + row * value_stride + (kv - kv_heads) * kHeadDim;
  Pack pack = pack_at(source + begin);
  if (kv < kv_heads && begin < rotary) {
    const int half = rotary / 2;
    const Stored* cosine = cosines + row * rotary;
    const Stored* sine = signed_sines + row * rotary;
    if (half % kPer == 0) {
      const Pack other = pack_at(source + (begin < half ? begin + half : begin - half));
      const Pack by = pack_at(cosine + begin), by_other = pack_at(sine + begin);
      for (int i = 0; i < kPer; ++i)
        pack.at[i] = stored(loaded(pack.at[i]) * loaded(by.at[i]) + loaded(other.at[i]) * loaded(by_other.at[i]));
    } else {
      for (int i = 0; i < kPer && begin + i < rotary; ++i) {
        const int at = begin + i;
        const float other = loaded(source[at < half ? at + half : at - half]);
        pack.at[i] = stored(loaded(pack.at[i]) * loaded(cosine[at]) + other * loaded(sine[at]));
      }
    }
  }
  Stored* target = kv < 0 ? rotated + (static_cast<long long>(row) * heads + head) * kHeadDim
                          : cache + (kv * slots + written[row]) * kHeadDim;
  *reinterpret_cast<Pack*>(target + begin) = pack;
}

#include "attention.cuh"
#include "row_kernels.cuh"
