// Products in bf16 on the tiles of AMX, with attention beside them, and for all else the kernels of AVX-512.
//
// Tiles of weights are read where the weights lie: computed is y^T = w x^T, so that w is the operand that AMX takes
// row by row, and only x, which is small, is put into the order of the other one. Both are rounded to bf16, and sums are
// fp32. They go along a slice of a row from its beginning, slice after slice, whatever other rows there are: a row's
// result is the same bits in whatever batch it is.
#include "kernels_amx.hpp"

#if defined(FS_AMX)
#include <sys/syscall.h>
#include <unistd.h>

#include "amx_attention.hpp"
#include "amx_tiles.hpp"
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(FS_AMX)
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace fs {
namespace {

constexpr std::size_t kAmxSlice = 2048;  // of a row are summed in tiles before they join its result
constexpr std::size_t kAmxRows = 256;    // of x are in the tiles' order at a time
constexpr std::size_t kWeightRows = 2 * kTile;

// 16 numbers of a matrix.
inline __m512 widened(const Matrix& w, std::size_t at) {
  if (w.type == Type::f32) return _mm512_loadu_ps(static_cast<const float*>(w.data) + at);
  const auto* const from = static_cast<const std::uint16_t*>(w.data) + at;
  const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if (w.type == Type::f16) return _mm512_cvtph_ps(stored);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
}

// Weights [rows][depth] in bf16, filled up to kWeightRows rows of whole tiles.
void convert(const Matrix& w, std::size_t row, std::size_t rows, std::size_t begin, std::size_t depth, bf16* to,
             std::size_t stride) {
  for (std::size_t n = 0; n < kWeightRows; ++n, to += stride) {
    if (n >= rows) {
      std::memset(to, 0, stride * sizeof(bf16));
      continue;
    }
    const std::size_t at = (row + n) * w.columns + begin;
    std::size_t k = 0;
    for (; k + kDepth <= depth; k += kDepth)
      _mm512_store_si512(to + k, w.type == Type::f32 ? narrowed(static_cast<const float*>(w.data) + at + k)
                                                     : narrowed(static_cast<const std::uint16_t*>(w.data) + at + k,
                                                                w.type == Type::f16));
    if (k < depth)  // half a tile: rows have a multiple of 16 numbers
      _mm512_store_si512(to + k, (__m512i)_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), widened(w, at + k)));
  }
}

// y[m][n] (+)= sums[n][m], for a tile's rows.
void put(const float* sums, std::size_t rows, std::size_t columns, float* y, std::size_t y_stride, bool onto) {
  __m512i words[kTile];
  for (std::size_t n = 0; n < kTile; ++n) words[n] = _mm512_load_si512(sums + n * kTile);
  transpose(words);
  const __mmask16 there = static_cast<__mmask16>((1u << columns) - 1);
  for (std::size_t m = 0; m < rows; ++m) {
    float* const to = y + m * y_stride;
    __m512 value = (__m512)words[m];
    if (onto) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(there, to));
    _mm512_mask_storeu_ps(to, there, value);
  }
}

// Products of kWeightRows rows of weights with all rows of x, over one slice. `ahead`: the weights of the next rows, which
// are fetched meanwhile where there is little to compute: tiles are read row by row, which no prefetcher foresees.
void multiply_block(const bf16* w, std::size_t w_stride, std::size_t weight_rows, const bf16* packed, std::size_t rows,
                    std::size_t tiles_deep, float* y, std::size_t y_stride, bool onto, const char* ahead) {
  alignas(64) float sums[4][kTile * kTile];
  const std::size_t row_bytes = w_stride * sizeof(bf16), tile = kTile * kDepth;
  const bf16* const below = w + kTile * w_stride;
  before_tiles_are_loaded();
  for (std::size_t m = 0; m < rows; m += 2 * kTile) {
    const bf16* const left = packed + m / kTile * tiles_deep * tile;
    const bool two = m + kTile < rows;
    const bf16* const right = left + tiles_deep * tile;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
      _tile_zero(2);
      _tile_zero(3);
      for (std::size_t k = 0; k < tiles_deep; ++k) {
        _tile_loadd(4, w + k * kDepth, row_bytes);
        _tile_loadd(6, left + k * tile, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, below + k * kDepth, row_bytes);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, right + k * tile, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    } else {
      for (std::size_t k = 0; k < tiles_deep; ++k) {
        if (ahead != nullptr)
          for (std::size_t n = 0; n < kWeightRows; ++n) _mm_prefetch(ahead + n * row_bytes + k * 64, _MM_HINT_T0);
        _tile_loadd(4, w + k * kDepth, row_bytes);
        _tile_loadd(6, left + k * tile, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, below + k * kDepth, row_bytes);
        _tile_dpbf16ps(1, 5, 6);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    for (std::size_t i = 0; i < (two ? 4u : 2u); ++i) {
      const std::size_t row = m + i / 2 * kTile, column = i % 2 * kTile;
      if (column >= weight_rows) continue;
      const std::size_t many = rows - row < kTile ? rows - row : kTile;
      const std::size_t wide = weight_rows - column < kTile ? weight_rows - column : kTile;
      put(sums[i], many, wide, y + row * y_stride + column, y_stride, onto);
    }
  }
}

// What a thread's scratch has of x in the tiles' order. The ranges of one product, and products of the same x, find it.
struct Packed {
  const float* scratch;
  const float* x;
  std::size_t rows, columns;
  std::uint64_t version;

  bool operator==(const Packed& other) const {
    return scratch == other.scratch && x == other.x && rows == other.rows && columns == other.columns &&
           version == other.version;
  }
};
thread_local Packed packed_last{};

const Kernels* in_fp32 = nullptr;

void multiply(const float* x, std::size_t x_stride, std::size_t rows, const Matrix& w, std::size_t begin,
              std::size_t end, float* y, std::size_t y_stride, bool onto, float* scratch, std::uint64_t version) {
  if (w.type == Type::i8) {  // needs the room that x would be kept in
    packed_last = Packed{};
    return in_fp32->multiply(x, x_stride, rows, w, begin, end, y, y_stride, onto, scratch, version);
  }
  configure_tiles();
  const bool whole = rows <= kAmxRows && w.columns <= kAmxSlice;
  const Packed wanted{scratch, x, rows, w.columns, version};
  const bool is_packed = whole && packed_last == wanted;
  packed_last = whole ? wanted : Packed{};
  auto* const packed = reinterpret_cast<bf16*>(scratch);
  bf16* const converted = packed + kAmxRows * kAmxSlice;
  for (std::size_t first = 0; first < rows; first += kAmxRows) {
    const std::size_t some = rows - first < kAmxRows ? rows - first : kAmxRows;
    for (std::size_t k = 0; k < w.columns; k += kAmxSlice) {
      const std::size_t depth = w.columns - k < kAmxSlice ? w.columns - k : kAmxSlice;
      const std::size_t tiles_deep = (depth + kDepth - 1) / kDepth, padded = tiles_deep * kDepth;
      for (std::size_t m = 0; m < some && !is_packed; m += kTile)
        pack(x + (first + m) * x_stride + k, x_stride, some - m < kTile ? some - m : kTile, depth, packed + m * padded);
      for (std::size_t n = begin; n < end; n += kWeightRows) {
        const std::size_t weight_rows = end - n < kWeightRows ? end - n : kWeightRows;
        const bf16* block = static_cast<const bf16*>(w.data) + n * w.columns + k;
        std::size_t stride = w.columns;
        if (w.type != Type::bf16 || padded != depth || n + kWeightRows > w.rows) {
          convert(w, n, weight_rows, k, depth, converted, padded);
          block = converted, stride = padded;
        }
        const bool follows = stride == w.columns && n + 2 * kWeightRows <= w.rows;
        multiply_block(block, stride, weight_rows, packed, some, tiles_deep, y + first * y_stride + n, y_stride,
                       onto || k > 0, follows ? reinterpret_cast<const char*>(block + kWeightRows * stride) : nullptr);
      }
    }
  }
  _tile_release();
}

// The kernel keeps room for tiles only for processes that ask.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_tiles() {
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool tiles = (d >> 24 & 1) != 0 && (d >> 22 & 1) != 0;  // amx-tile, amx-bf16
  a = 7, c = 1;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return tiles && (a >> 5 & 1) != 0;  // avx512-bf16
}

}  // namespace
#pragma GCC pop_options

const Kernels* amx_kernels(const Kernels& avx512) {
  static const Kernels kernels = [&avx512] {
    in_fp32 = &avx512;
    Kernels own = avx512;
    own.name = "amx";
    own.multiply = multiply;
    own.attention = [](const AttentionShape& shape) { return amx_attention(shape, in_fp32->attention(shape)); };
    own.scratch_floats =
        std::max(avx512.scratch_floats, (kAmxRows + kWeightRows) * kAmxSlice * sizeof(bf16) / sizeof(float));
    return own;
  }();
  static const bool usable = has_tiles() && may_use_tiles();
  return usable ? &kernels : nullptr;
}

}  // namespace fs
#else
namespace fs {
const Kernels* amx_kernels(const Kernels&) { return nullptr; }
}  // namespace fs
#endif
