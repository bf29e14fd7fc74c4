// Tiles of AMX: how they are set up, and how numbers come into their order. Only for files that are compiled for it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace fs {
namespace {

constexpr std::size_t kTile = 16;   // rows of a tile, and floats of one
constexpr std::size_t kDepth = 32;  // numbers in bf16 of a tile's row

using bf16 = std::uint16_t;

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};
constexpr TileConfig kWholeTiles{};

// All tiles are whole: ends are filled up with zeros.
inline void configure_tiles() { _tile_loadconfig(&kWholeTiles); }

// Has what was written before in memory: GCC does not know that loads of tiles, and of their configuration, read it.
inline void before_tiles_are_loaded() { __asm__ volatile("" : : : "memory"); }

// 32 numbers in bf16, rounded to the nearest.
inline __m512i narrowed(const float* from) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}
inline __m512i narrowed(const std::uint16_t* from, bool is_half) {
  const __m512i stored = _mm512_loadu_si512(from);
  if (!is_half) return stored;
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(stored, 1)),
                                      _mm512_cvtph_ps(_mm512_castsi512_si256(stored)));
}

// Transposes 16 rows of 16 words.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// Puts `rows` rows of x, at most kTile, into the order of tiles: each has kDepth numbers of every row, pairs of them
// under one another. What is not there is zero.
void pack(const float* x, std::size_t x_stride, std::size_t rows, std::size_t depth, bf16* to) {
  for (std::size_t k = 0; k < depth; k += kDepth, to += kTile * kDepth) {
    __m512i words[kTile];
    for (std::size_t row = 0; row < kTile; ++row) {
      if (row >= rows) {
        words[row] = _mm512_setzero_si512();
      } else if (k + kDepth <= depth) {
        words[row] = narrowed(x + row * x_stride + k);
      } else {  // half a tile: rows have a multiple of 16 numbers
        const __m512 half = _mm512_loadu_ps(x + row * x_stride + k);
        words[row] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), half);
      }
    }
    transpose(words);
    for (std::size_t pair = 0; pair < kTile; ++pair) _mm512_store_si512(to + pair * kDepth, words[pair]);
  }
}

}  // namespace
}  // namespace fs
#pragma GCC pop_options
