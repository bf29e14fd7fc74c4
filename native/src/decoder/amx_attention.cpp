// Attention in bf16 on the tiles of AMX: weights of keys and sums of values are fp32, what is multiplied is bf16.
//
// Scores are computed as k q^T, with keys read where they lie in the cache: a vector then holds 16 queries, and maxima
// and sums go along the keys without shuffles. kKeys keys are taken at a time, and what a query has so far is scaled
// when its largest score grows (FlashAttention, Dao et al. 2022, 3.1). They begin at multiples of kKeys from the
// sequence's first key on, and keys that a query does not see change nothing: a row's result is the same bits in
// whatever batch it is.
#include "amx_attention.hpp"

#include "kernels_amx.hpp"

#if defined(FS_AMX)
#include "amx_tiles.hpp"

#include <limits>

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace fs {
namespace {

constexpr std::size_t kQueries = kMostQueryRows;  // of one call
constexpr std::size_t kQueryTiles = kQueries / kTile;
constexpr std::size_t kAtOnce = 4;              // tiles of scores, of the eight tiles that there are
constexpr std::size_t kKeys = kAtOnce * kTile;  // are taken at a time: what they need fits L1
constexpr std::size_t kTileNumbers = kTile * kDepth;  // in bf16
constexpr std::size_t kTileFloats = kTile * kTile;
constexpr float kNever = -std::numeric_limits<float>::infinity();

static_assert(kQueries % kTile == 0 && kKeys == 2 * kDepth);

// What a call keeps between its steps, in the order of its scratch.
struct Room {
  bf16* queries;  // [query tiles][head_dim / kDepth] tiles
  bf16* values;   // [kKeys / kDepth][head_dim / kTile] tiles
  bf16* weights;  // [kKeys / kDepth] tiles, of 16 queries
  float* scores;  // [kKeys][16 queries]
  float* sums;    // [query tiles][head_dim / kTile] tiles
};

std::size_t scratch_floats(std::size_t head_dim, std::size_t) {
  return (kQueries * head_dim + kKeys * head_dim + kKeys * kTile) / 2 + kKeys * kTile + kQueries * head_dim;
}

Room room_in(float* scratch, std::size_t head_dim) {
  Room room{};
  room.queries = reinterpret_cast<bf16*>(scratch);
  room.values = room.queries + kQueries * head_dim;
  room.weights = room.values + kKeys * head_dim;
  room.scores = reinterpret_cast<float*>(room.weights + kKeys * kTile);
  room.sums = room.scores + kKeys * kTile;
  return room;
}

// 16 queries: which keys they see, and what they have of them so far.
struct Progress {
  __m512i begins, limits;
  __m512 largest, total;
};

// 2 to the power of x, at most 0, to 4e-6 of it; -126 is the least power.
inline __m512 power(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(0.009676037098f);
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.05592203565f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.2402210736f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.693121034f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.000000075f));
  return _mm512_scalef_ps(p, whole);
}

const bf16* row_of(const void* const* blocks, const AttentionTile& t, std::size_t key) {
  return static_cast<const bf16*>(blocks[key / t.block_tokens]) + key % t.block_tokens * t.head_dim;
}

// Values of kKeys keys in the tiles' order: pairs of keys side by side. A pair of tiles has 32 columns of the values
// in the order in which vectors are interleaved, which `put` undoes. Keys behind the last one are zero.
void pack_values(const AttentionTile& t, std::size_t first, std::size_t context, bf16* to) {
  const std::size_t tiles_wide = t.head_dim / kTile;
  const __m512i nothing = _mm512_setzero_si512();
  for (std::size_t key = first; key < first + kKeys; key += 2) {
    bf16* at = to + (key - first) / kDepth * tiles_wide * kTileNumbers + (key - first) % kDepth / 2 * kDepth;
    const bf16* const even = key < context ? row_of(t.values, t, key) : nullptr;
    const bf16* const odd = key + 1 < context ? even + t.head_dim : nullptr;
    for (std::size_t column = 0; column < t.head_dim; column += kDepth, at += 2 * kTileNumbers) {
      const __m512i a = even != nullptr ? _mm512_loadu_si512(even + column) : nothing;
      const __m512i b = odd != nullptr ? _mm512_loadu_si512(odd + column) : nothing;
      _mm512_store_si512(at, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(at + kTileNumbers, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// scores[key][query] of kKeys keys from `first` on; those behind `end` are of keys before it.
void score(const AttentionTile& t, std::size_t first, std::size_t end, const bf16* queries, float* scores) {
  const std::size_t row_bytes = t.head_dim * sizeof(bf16);
  const bf16* rows[kAtOnce];
  for (std::size_t i = 0; i < kAtOnce; ++i)
    rows[i] = first + i * kTile < end ? row_of(t.keys, t, first + i * kTile) : rows[0];
  before_tiles_are_loaded();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::size_t k = 0; k < t.head_dim; k += kDepth) {
    _tile_loadd(4, queries + k * kTile, 64);
    _tile_loadd(5, rows[0] + k, row_bytes);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, rows[1] + k, row_bytes);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, rows[2] + k, row_bytes);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, rows[3] + k, row_bytes);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + kTileFloats, 64);
  _tile_stored(2, scores + 2 * kTileFloats, 64);
  _tile_stored(3, scores + 3 * kTileFloats, 64);
}

// Makes weights of scores, in tiles; returns by what the queries' sums so far are multiplied. `partly`: not every query
// sees every key.
template <bool partly>
__m512 weigh(Progress& progress, std::size_t first, std::size_t keys, const float* scores, bf16* to) {
  const auto seen = [&](std::size_t key) -> __mmask16 {
    if (!partly) return 0xffff;
    const __m512i at = _mm512_set1_epi32(static_cast<int>(first + key));
    return _mm512_cmplt_epi32_mask(at, progress.limits) & _mm512_cmpge_epi32_mask(at, progress.begins);
  };
  __m512 largest[4], totals[4];
  for (int i = 0; i < 4; ++i) largest[i] = _mm512_set1_ps(kNever), totals[i] = _mm512_setzero_ps();
  for (std::size_t key = 0; key < keys; key += 4)
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i)
      largest[i] =
          _mm512_mask_max_ps(largest[i], seen(key + i), largest[i], _mm512_load_ps(scores + (key + i) * kTile));
  const __m512 before = progress.largest;
  progress.largest = _mm512_max_ps(
      before, _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3])));
  const __m512 log2_e = _mm512_set1_ps(1.44269504088896341f);
  const __mmask16 grown = _mm512_cmp_ps_mask(progress.largest, before, _CMP_GT_OQ);
  // A query that has seen no key yet scales nothing, and has no weights.
  const __mmask16 any = _mm512_cmp_ps_mask(progress.largest, _mm512_set1_ps(kNever), _CMP_GT_OQ);
  const __m512 top = _mm512_maskz_mul_ps(any, progress.largest, log2_e);
  const __m512 scale = _mm512_mask_blend_ps(grown, _mm512_set1_ps(1.0f), power(_mm512_fmsub_ps(before, log2_e, top)));
  const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (std::size_t key = 0; key < keys; key += kDepth, to += kTileNumbers) {
    __m512i words[kTile];
#pragma GCC unroll 16
    for (std::size_t pair = 0; pair < kTile; ++pair) {
      __m512 two[2];
      for (std::size_t i = 0; i < 2; ++i) {
        const std::size_t at = key + 2 * pair + i;
        const __m512 weight = power(_mm512_fmsub_ps(_mm512_load_ps(scores + at * kTile), log2_e, top));
        two[i] = _mm512_maskz_mov_ps(seen(at), weight);
        __m512& total = totals[2 * (pair % 2) + i];
        total = _mm512_add_ps(total, two[i]);
      }
      words[pair] = _mm512_permutexvar_epi16(side_by_side, (__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
    }
    transpose(words);
    for (std::size_t query = 0; query < kTile; ++query) _mm512_store_si512(to + query * kDepth, words[query]);
  }
  progress.total = _mm512_fmadd_ps(
      progress.total, scale, _mm512_add_ps(_mm512_add_ps(totals[0], totals[1]), _mm512_add_ps(totals[2], totals[3])));
  return scale;
}

void scale_sums(__m512 scale, std::size_t tiles_wide, float* sums) {
  if (_mm512_cmp_ps_mask(scale, _mm512_set1_ps(1.0f), _CMP_NEQ_OQ) == 0) return;
  alignas(64) float scales[kTile];
  _mm512_store_ps(scales, scale);
  for (std::size_t row = 0; row < tiles_wide * kTile; ++row)
    _mm512_store_ps(sums + row * kTile,
                    _mm512_mul_ps(_mm512_load_ps(sums + row * kTile), _mm512_set1_ps(scales[row % kTile])));
}

// sums[query][column] += weights x values, two columns of tiles at a time.
void mix(const bf16* weights, const bf16* values, std::size_t keys, std::size_t tiles_wide, float* sums) {
  before_tiles_are_loaded();
  for (std::size_t column = 0; column < tiles_wide; column += 2, sums += 2 * kTileFloats) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTileFloats, 64);
    for (std::size_t chunk = 0; chunk * kDepth < keys; ++chunk) {
      const bf16* const value = values + (chunk * tiles_wide + column) * kTileNumbers;
      _tile_loadd(4, weights + chunk * kTileNumbers, 64);
      _tile_loadd(5, value, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, value + kTileNumbers, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileFloats, 64);
  }
}

// One query's sums, over the weights' total.
void put(const float* sums, std::size_t query, std::size_t head_dim, float total, float* to) {
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  const __m512 over = _mm512_set1_ps(1.0f / total);
  for (std::size_t column = 0; column < head_dim; column += kDepth) {
    const float* const from = sums + column / kTile * kTileFloats + query * kTile;
    const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + kTileFloats);
    _mm512_storeu_ps(to + column, _mm512_mul_ps(_mm512_permutex2var_ps(a, low, b), over));
    _mm512_storeu_ps(to + column + kTile, _mm512_mul_ps(_mm512_permutex2var_ps(a, high, b), over));
  }
}

// Queries that there are not see no key.
Progress start_of(const AttentionTile& t, std::size_t first) {
  alignas(64) std::int32_t begins[kTile] = {}, limits[kTile] = {};
  for (std::size_t i = 0; i < kTile && first + i < t.rows; ++i) {
    begins[i] = static_cast<std::int32_t>(t.begins[first + i]);
    limits[i] = static_cast<std::int32_t>(t.limits[first + i]);
  }
  return {_mm512_load_si512(begins), _mm512_load_si512(limits), _mm512_set1_ps(kNever), _mm512_setzero_ps()};
}

void attend(const AttentionTile& t) {
  configure_tiles();
  const std::size_t tiles_wide = t.head_dim / kTile, context = t.limits[t.rows - 1];
  const Room room = room_in(t.scratch, t.head_dim);
  Progress progress[kQueryTiles];
  for (std::size_t first = 0; first < t.rows; first += kTile) {
    const std::size_t some = t.rows - first < kTile ? t.rows - first : kTile;
    pack(t.queries + first * t.head_dim, t.head_dim, some, t.head_dim, room.queries + first * t.head_dim);
    progress[first / kTile] = start_of(t, first);
  }
  for (std::size_t i = 0; i < (t.rows + kTile - 1) / kTile * kTile * t.head_dim; i += kTile)
    _mm512_store_ps(room.sums + i, _mm512_setzero_ps());
  for (std::size_t key = 0; key < context; key += kKeys) {
    pack_values(t, key, context, room.values);
    for (std::size_t first = 0; first < t.rows; first += kTile) {
      const std::size_t last = (t.rows - first < kTile ? t.rows : first + kTile) - 1;
      if (t.limits[last] <= key || key + kKeys <= t.begins[first]) continue;
      const std::size_t keys = t.limits[last] - key <= kDepth ? kDepth : kKeys;
      score(t, key, t.limits[last], room.queries + first * t.head_dim, room.scores);
      const bool partly = t.limits[first] < key + keys || t.begins[last] > key;
      const auto weights_of = partly ? weigh<true> : weigh<false>;
      float* const sums = room.sums + first * t.head_dim;
      scale_sums(weights_of(progress[first / kTile], key, keys, room.scores, room.weights), tiles_wide, sums);
      mix(room.weights, room.values, keys, tiles_wide, sums);
    }
  }
  _tile_release();
  for (std::size_t row = 0; row < t.rows; ++row) {
    alignas(64) float totals[kTile];
    _mm512_store_ps(totals, progress[row / kTile].total);
    put(room.sums + row / kTile * kTile * t.head_dim, row % kTile, t.head_dim, totals[row % kTile], t.outputs[row]);
  }
}

}  // namespace
#pragma GCC pop_options

Attention amx_attention(const AttentionShape& shape, const Attention& otherwise) {
  const bool fits = shape.type == Type::bf16 && shape.head_dim % kDepth == 0 && shape.block_tokens % kTile == 0;
  return fits && shape.softcap == 0.0f ? Attention{kQueries, kKeys, scratch_floats, attend} : otherwise;
}

}  // namespace fs
#endif
