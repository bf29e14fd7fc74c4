// Text of one instruction set's kernels; included by kernels.cpp with FS_ISA and FS_ISA_BITS set.
// Deliberately without an include guard.

namespace fs {
namespace {
namespace FS_ISA {

// ── vectors ─────────────────────────────────────────────────────────────────────────────────────

#if FS_ISA_BITS == 512

using V = __m512;
constexpr std::size_t L = 16;
constexpr std::size_t kTileRows = 6;     // 6 x 4 sums, 4 weights and an activation: 29 of 32 registers
constexpr std::size_t kFewTileRows = 8;  // 8 x 3: eight decodes read each weight once
constexpr std::size_t kWideRows = 3;     // up to so many rows, tiles are 8 columns wide,
constexpr std::size_t kSquareRows = 6;   // and up to so many, 4

inline V zero() { return _mm512_setzero_ps(); }
inline V all(float x) { return _mm512_set1_ps(x); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline V load(const bfloat* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline V load(const byte* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline void store(half* p, V v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V power_of_two(V n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }

// Sums of four vectors' lanes, to four neighbouring floats.
inline __m128 sum4(V a, V b, V c, V d) {
  const V ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  const V cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
  V sums = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  sums = add(sums, _mm512_permute_ps(sums, 0x4E));
  sums = add(sums, _mm512_permute_ps(sums, 0xB1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums));
}
inline void store4(float* p, __m128 sums, bool onto) {
  _mm_storeu_ps(p, onto ? _mm_add_ps(_mm_loadu_ps(p), sums) : sums);
}
inline void store4(float* p, __m128 sums, const float* scales, bool onto) {
  const __m128 by = _mm_loadu_ps(scales);
  _mm_storeu_ps(p, onto ? _mm_fmadd_ps(sums, by, _mm_loadu_ps(p)) : _mm_mul_ps(sums, by));
}
inline float first(__m128 sums) { return _mm_cvtss_f32(sums); }

#elif FS_ISA_BITS == 256

using V = __m256;
constexpr std::size_t L = 8;
constexpr std::size_t kTileRows = 3;
constexpr std::size_t kFewTileRows = 3;
constexpr std::size_t kWideRows = 1;
constexpr std::size_t kSquareRows = 8;

inline V zero() { return _mm256_setzero_ps(); }
inline V all(float x) { return _mm256_set1_ps(x); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline V load(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline V load(const bfloat* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline V load(const byte* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline void store(half* p, V v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V power_of_two(V n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

inline __m128 sum4(V a, V b, V c, V d) {
  const V sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}
inline void store4(float* p, __m128 sums, bool onto) {
  _mm_storeu_ps(p, onto ? _mm_add_ps(_mm_loadu_ps(p), sums) : sums);
}
inline void store4(float* p, __m128 sums, const float* scales, bool onto) {
  const __m128 by = _mm_loadu_ps(scales);
  _mm_storeu_ps(p, onto ? _mm_fmadd_ps(sums, by, _mm_loadu_ps(p)) : _mm_mul_ps(sums, by));
}
inline float first(__m128 sums) { return _mm_cvtss_f32(sums); }

#else

struct V {
  float lane[4];
};
constexpr std::size_t L = 4;
constexpr std::size_t kTileRows = 2;
constexpr std::size_t kFewTileRows = 2;
constexpr std::size_t kWideRows = 0;
constexpr std::size_t kSquareRows = 8;

inline float widened(half h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (h.bits >> 10) & 31u, fraction = h.bits & 1023u;
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -small : small;
  }
  const std::uint32_t bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline half narrowed(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return {static_cast<std::uint16_t>(sign | 0x7E00u)};
  if (bits >= 0x477FF000u) return {static_cast<std::uint16_t>(sign | 0x7C00u)};
  if (bits < 0x38800000u) {  // below the smallest normal half: adding rounds at the right bit
    float small;
    __builtin_memcpy(&small, &bits, 4);
    small += 0.5f;
    std::uint32_t sum;
    __builtin_memcpy(&sum, &small, 4);
    return {static_cast<std::uint16_t>(sign | (sum - 0x3F000000u))};
  }
  bits += 0xFFFu + ((bits >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((bits >> 13) - (112u << 10)))};
}
inline V zero() { return {{0, 0, 0, 0}}; }
inline V all(float x) { return {{x, x, x, x}}; }
inline V load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline V load(const half* p) { return {{widened(p[0]), widened(p[1]), widened(p[2]), widened(p[3])}}; }
inline V load(const bfloat* p) {
  V v;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(p[i].bits) << 16;
    __builtin_memcpy(&v.lane[i], &bits, 4);
  }
  return v;
}
inline V load(const byte* p) {
  V v;
  for (std::size_t i = 0; i < 4; ++i) v.lane[i] = static_cast<float>(p[i].value);
  return v;
}
inline void store(float* p, V v) { __builtin_memcpy(p, v.lane, 16); }
inline void store(half* p, V v) {
  for (std::size_t i = 0; i < 4; ++i) p[i] = narrowed(v.lane[i]);
}
#define FS_LANEWISE(name, expression)                                  \
  inline V name(V a, V b) {                                            \
    V r;                                                               \
    for (std::size_t i = 0; i < 4; ++i) r.lane[i] = (expression);      \
    return r;                                                          \
  }
FS_LANEWISE(add, a.lane[i] + b.lane[i])
FS_LANEWISE(sub, a.lane[i] - b.lane[i])
FS_LANEWISE(mul, a.lane[i] * b.lane[i])
FS_LANEWISE(div, a.lane[i] / b.lane[i])
FS_LANEWISE(max, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i])
FS_LANEWISE(min, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i])
#undef FS_LANEWISE
inline V fma(V a, V b, V c) { return add(mul(a, b), c); }
inline V round(V a) {
  for (float& lane : a.lane) lane = ::nearbyintf(lane);
  return a;
}
inline V power_of_two(V n) {
  for (float& lane : n.lane) lane = ::ldexpf(1.0f, static_cast<int>(lane));
  return n;
}
inline float lanes_sum(V v) { return (v.lane[0] + v.lane[1]) + (v.lane[2] + v.lane[3]); }
inline V sum4(V a, V b, V c, V d) { return {{lanes_sum(a), lanes_sum(b), lanes_sum(c), lanes_sum(d)}}; }
inline void store4(float* p, V sums, bool onto) { store(p, onto ? add(load(p), sums) : sums); }
inline void store4(float* p, V sums, const float* scales, bool onto) {
  store(p, onto ? fma(sums, load(scales), load(p)) : mul(sums, load(scales)));
}
inline float first(V sums) { return sums.lane[0]; }

#endif

inline float sum(V v) { return first(sum4(v, zero(), zero(), zero())); }

inline void store(bfloat* p, V v) {  // round to nearest even; a NaN stays one
  float lanes[L];
  store(lanes, v);
  for (std::size_t i = 0; i < L; ++i) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &lanes[i], 4);
    if (lanes[i] != lanes[i])
      p[i].bits = static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    else
      p[i].bits = static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
}

// e^x to about two units in the last place: Cody and Waite's reduction, the polynomial of Cephes' expf.
inline V exponential(V x) {
  x = min(max(x, all(-87.3f)), all(88.3f));
  const V n = round(mul(x, all(1.44269504088896341f)));
  V r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  V p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  return mul(add(fma(p, mul(r, r), r), all(1.0f)), power_of_two(n));
}

// ── matrix product ──────────────────────────────────────────────────────────────────────────────

// How far columns go on in one tile of `rows`.
constexpr std::size_t tile_columns(std::size_t rows) { return rows <= kWideRows ? 8 : rows <= kSquareRows ? 4 : 3; }

// N results of a row, N at most 4, whose sums have `scales` as factors if there are any.
template <std::size_t N, class Sums>
inline void put(float* row, Sums sums, const float* scales, bool onto) {
  if constexpr (N == 4) {
    if (scales != nullptr)
      store4(row, sums, scales, onto);
    else
      store4(row, sums, onto);
  } else {
    float results[4] = {}, factors[4] = {};
    for (std::size_t n = 0; n < N; ++n) results[n] = row[n];
    for (std::size_t n = 0; scales != nullptr && n < N; ++n) factors[n] = scales[n];
    put<4>(results, sums, scales == nullptr ? nullptr : factors, onto);
    for (std::size_t n = 0; n < N; ++n) row[n] = results[n];
  }
}

// M rows of x with N rows of w, over columns [from, to) of both; N is 1, 3 or a multiple of 4. With
// `ahead`, w streams from memory: while a tile is computed the lines of the next one are asked for.
template <std::size_t M, std::size_t N, bool ahead, class W>
inline void tile(const float* x, std::size_t x_stride, const W* w, const float* scales, std::size_t columns,
                 std::size_t from, std::size_t to, float* y, std::size_t y_stride, bool onto) {
  V sums[M][N];
#pragma GCC unroll 8
  for (std::size_t m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; ++n) sums[m][n] = zero();
  for (std::size_t k = from; k < to; k += L) {
    if (ahead && k * sizeof(W) % 64 == 0) {
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; ++n) __builtin_prefetch(w + (N + n) * columns + k);
    }
    V weights[N];
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; ++n) weights[n] = load(w + n * columns + k);
#pragma GCC unroll 8
    for (std::size_t m = 0; m < M; ++m) {
      const V activations = load(x + m * x_stride + k);
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; ++n) sums[m][n] = fma(activations, weights[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (std::size_t m = 0; m < M; ++m) {
    float* const row = y + m * y_stride;
    if constexpr (N == 1) {
      put<1>(row, sum4(sums[m][0], zero(), zero(), zero()), scales, onto);
    } else if constexpr (N == 3) {
      put<3>(row, sum4(sums[m][0], sums[m][1], sums[m][2], zero()), scales, onto);
    } else {
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; n += 4)
        put<4>(row + n, sum4(sums[m][n], sums[m][n + 1], sums[m][n + 2], sums[m][n + 3]),
               scales == nullptr ? nullptr : scales + n, onto);
    }
  }
}

// M rows of x with rows [begin, end) of w. Long rows go in slices of kSlice, whose sums are added one
// after the other: M slices of x and a tile's of w then fit L1 together.
template <std::size_t M, bool ahead, class W>
inline void strip(const float* x, std::size_t x_stride, const W* w, const float* scales, std::size_t columns,
                  std::size_t begin, std::size_t end, float* y, std::size_t y_stride, bool onto) {
  const auto scales_at = [scales](std::size_t n) { return scales == nullptr ? nullptr : scales + n; };
  constexpr std::size_t N = tile_columns(M);
  for (std::size_t from = 0; from < columns; from += kSlice) {
    const std::size_t to = from + kSlice < columns ? from + kSlice : columns;
    const bool sliced_onto = onto || from != 0;
    std::size_t n = begin;
    for (; n + N <= end; n += N)
      tile<M, N, ahead, W>(x, x_stride, w + n * columns, scales_at(n), columns, from, to, y + n, y_stride, sliced_onto);
    for (; n < end; ++n)
      tile<M, 1, ahead, W>(x, x_stride, w + n * columns, scales_at(n), columns, from, to, y + n, y_stride, sliced_onto);
  }
}

// Any number of rows, R at a time. Only the first of them that passes finds w in memory, the others in cache.
template <std::size_t R, bool ahead, class W>
inline void strips(const float* x, std::size_t x_stride, std::size_t rows, const W* w, const float* scales,
                   std::size_t columns, std::size_t begin, std::size_t end, float* y, std::size_t y_stride, bool onto) {
  std::size_t m = 0;
  if (ahead && R <= rows) {
    strip<R, true, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    m = R;
  }
  for (; m + R <= rows; m += R)
    strip<R, false, W>(x + m * x_stride, x_stride, w, scales, columns, begin, end, y + m * y_stride, y_stride, onto);
  x += m * x_stride;
  y += m * y_stride;
  switch (rows - m) {
    case 1: return strip<1, ahead, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    case 2: return strip<2, ahead, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    case 3: return strip<3, ahead, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    case 4: return strip<4, ahead, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    case 5: return strip<5, ahead, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    case 6: return strip<6, ahead, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    case 7: return strip<7, ahead, W>(x, x_stride, w, scales, columns, begin, end, y, y_stride, onto);
    default: return;
  }
}

// Few rows: weights come from memory once and are widened in registers, kFewPanel of their rows at a time
// so that a second strip finds them in cache. Many rows: a panel is widened once, then every strip reads
// it from L2.
template <class W>
inline void multiply_as(const float* x, std::size_t x_stride, std::size_t rows, const W* w, const float* scales,
                        std::size_t columns, std::size_t begin, std::size_t end, float* y, std::size_t y_stride,
                        bool onto, float* scratch) {
  constexpr std::size_t kFewRows = 16, kFewPanel = 24;
  if (rows <= kFewRows) {
    for (std::size_t n = begin; n < end; n += kFewPanel) {
      const std::size_t stop = n + kFewPanel < end ? n + kFewPanel : end;
      strips<kFewTileRows, true, W>(x, x_stride, rows, w, scales, columns, n, stop, y, y_stride, onto);
    }
    return;
  }
  std::size_t panel = kPanelFloats / columns / 8 * 8;
  if (panel == 0) panel = 1;
  for (std::size_t n = begin; n < end; n += panel) {
    const std::size_t stop = n + panel < end ? n + panel : end;
    if constexpr (sizeof(W) < sizeof(float)) {
      for (std::size_t i = 0; i < (stop - n) * columns; i += L) store(scratch + i, load(w + n * columns + i));
      const float* const factors = scales == nullptr ? nullptr : scales + n;
      strips<kTileRows, false, float>(x, x_stride, rows, scratch, factors, columns, 0, stop - n, y + n, y_stride, onto);
    } else {
      strips<kTileRows, false, W>(x, x_stride, rows, w, scales, columns, n, stop, y, y_stride, onto);
    }
  }
}

void multiply(const float* x, std::size_t x_stride, std::size_t rows, const Matrix& w, std::size_t begin,
              std::size_t end, float* y, std::size_t y_stride, bool onto, float* scratch, std::uint64_t) {
  const auto as = [&](const auto* stored) {
    multiply_as(x, x_stride, rows, stored, w.scales, w.columns, begin, end, y, y_stride, onto, scratch);
  };
  switch (w.type) {
    case Type::f32: return as(static_cast<const float*>(w.data));
    case Type::f16: return as(static_cast<const half*>(w.data));
    case Type::bf16: return as(static_cast<const bfloat*>(w.data));
    case Type::i8: return as(static_cast<const byte*>(w.data));
  }
}

// ── rows ────────────────────────────────────────────────────────────────────────────────────────

template <class W>
inline void norm_as(const float* x, const W* weight, std::size_t count, float epsilon, float* y) {
  V squares = zero();
  for (std::size_t i = 0; i < count; i += L) {
    const V v = load(x + i);
    squares = fma(v, v, squares);
  }
  const V scale = all(1.0f / ::sqrtf(sum(squares) / static_cast<float>(count) + epsilon));
  for (std::size_t i = 0; i < count; i += L) store(y + i, mul(load(weight + i), mul(load(x + i), scale)));
}

void norm(const float* x, const Matrix& weight, float epsilon, float* y) {
  switch (weight.type) {
    case Type::f32: return norm_as(x, static_cast<const float*>(weight.data), weight.columns, epsilon, y);
    case Type::f16: return norm_as(x, static_cast<const half*>(weight.data), weight.columns, epsilon, y);
    case Type::bf16: return norm_as(x, static_cast<const bfloat*>(weight.data), weight.columns, epsilon, y);
    case Type::i8: return;  // of matrices alone, as the decoder checks
  }
}

void rotate(float* heads, std::size_t count, std::size_t head_dim, const float* cosines, const float* sines) {
  const std::size_t half_dim = head_dim / 2;
  for (std::size_t head = 0; head < count; ++head) {
    float* const low = heads + head * head_dim;
    float* const high = low + half_dim;
    for (std::size_t i = 0; i < half_dim; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cosines[i] - b * sines[i];
      high[i] = b * cosines[i] + a * sines[i];
    }
  }
}

inline V silu(V g) { return div(g, add(all(1.0f), exponential(sub(zero(), g)))); }

// (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3).
inline V gelu(V g) {
  const V twice = mul(mul(g, all(1.5957691216f)), fma(mul(g, all(0.044715f)), g, all(1.0f)));
  return div(g, add(all(1.0f), exponential(sub(zero(), twice))));
}

template <V (*activation)(V)>
void gate_as(float* gates, const float* up, std::size_t count) {
  std::size_t i = 0;
  for (; i + L <= count; i += L) store(gates + i, mul(activation(load(gates + i)), load(up + i)));
  if (i < count) {  // the end through a whole vector, so that it is the same arithmetic
    float g[L] = {}, u[L] = {};
    for (std::size_t j = 0; i + j < count; ++j) g[j] = gates[i + j], u[j] = up[i + j];
    store(g, mul(activation(load(g)), load(u)));
    for (std::size_t j = 0; i + j < count; ++j) gates[i + j] = g[j];
  }
}

void gate(float* gates, const float* up, std::size_t count) { gate_as<silu>(gates, up, count); }
void gate_gelu(float* gates, const float* up, std::size_t count) { gate_as<gelu>(gates, up, count); }

template <class From, class To>
inline void convert(const From* from, std::size_t count, To* to) {
  for (std::size_t i = 0; i < count; i += L) store(to + i, load(from + i));
}

void widen(const void* from, Type type, std::size_t count, float* to) {
  switch (type) {
    case Type::f32: return convert(static_cast<const float*>(from), count, to);
    case Type::f16: return convert(static_cast<const half*>(from), count, to);
    case Type::bf16: return convert(static_cast<const bfloat*>(from), count, to);
    case Type::i8: return;
  }
}

void narrow(const float* from, Type type, std::size_t count, void* to) {
  switch (type) {
    case Type::f32: return convert(from, count, static_cast<float*>(to));
    case Type::f16: return convert(from, count, static_cast<half*>(to));
    case Type::bf16: return convert(from, count, static_cast<bfloat*>(to));
    case Type::i8: return;
  }
}

// ── attention ───────────────────────────────────────────────────────────────────────────────────

constexpr std::size_t kQueryRows = 6;  // of one tile

// Floats from one row's scores to the next one's.
inline std::size_t score_stride(std::size_t context) { return (context + kLanes - 1) / kLanes * kLanes; }
std::size_t attention_floats(std::size_t, std::size_t context) { return kQueryRows * score_stride(context); }

// scores = cap * tanh(scores / cap); tanh(x) is 1 - 2 / (exp(2 x) + 1).
inline void cap_scores(float* scores, std::size_t padded, float cap) {
  for (std::size_t i = 0; i < padded; i += L) {
    const V grown = exponential(mul(load(scores + i), all(2.0f / cap)));
    store(scores + i, sub(all(cap), div(all(2.0f * cap), add(grown, all(1.0f)))));
  }
}

// Scores of one row become weights that add up to `1 / scale`; those outside of [begin, limit) become 0.
inline float soften(float* scores, std::size_t begin, std::size_t limit, std::size_t padded) {
  for (std::size_t i = 0; i < begin; ++i) scores[i] = -__builtin_huge_valf();
  for (std::size_t i = limit; i < padded; ++i) scores[i] = -__builtin_huge_valf();
  V largest = load(scores);
  for (std::size_t i = L; i < padded; i += L) largest = max(largest, load(scores + i));
  float lanes[L];
  store(lanes, largest);
  float top = lanes[0];
  for (std::size_t i = 1; i < L; ++i) top = lanes[i] > top ? lanes[i] : top;
  V total = zero();
  for (std::size_t i = 0; i < padded; i += L) {
    const V weight = exponential(sub(load(scores + i), all(top)));
    store(scores + i, weight);
    if (i >= begin && i + L <= limit) total = add(total, weight);
  }
  // exponential() is never quite 0, and a row's sum must not know how far its neighbours in the tile see.
  for (std::size_t i = 0; i < begin; ++i) scores[i] = 0.0f;
  for (std::size_t i = limit; i < padded; ++i) scores[i] = 0.0f;
  if (limit % L != 0) total = add(total, load(scores + limit / L * L));
  if (begin % L != 0 && begin / L != limit / L) total = add(total, load(scores + begin / L * L));
  return 1.0f / sum(total);
}

// Weighted sums of N vectors of the values' columns, for R rows, over keys [0, context).
template <std::size_t R, std::size_t N, class W>
inline void mix(const AttentionTile& t, std::size_t context, std::size_t stride, std::size_t column,
                const float* scales) {
  V sums[R][N];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; ++n) sums[r][n] = zero();
  for (std::size_t begin = 0, block = 0; begin < context; begin += t.block_tokens, ++block) {
    const std::size_t count = context - begin < t.block_tokens ? context - begin : t.block_tokens;
    const W* value = static_cast<const W*>(t.values[block]) + column;
    for (std::size_t token = 0; token < count; ++token, value += t.head_dim) {
      V values[N];
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; ++n) values[n] = load(value + n * L);
#pragma GCC unroll 8
      for (std::size_t r = 0; r < R; ++r) {
        const V weight = all(t.scratch[r * stride + begin + token]);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < N; ++n) sums[r][n] = fma(weight, values[n], sums[r][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; ++n) store(t.outputs[r] + column + n * L, mul(sums[r][n], all(scales[r])));
}

template <std::size_t R, class W>
inline void attend_rows(const AttentionTile& t) {
  const std::size_t context = t.limits[t.rows - 1];
  const std::size_t stride = score_stride((context + t.block_tokens - 1) / t.block_tokens * t.block_tokens);
  for (std::size_t begin = 0, block = 0; begin < context; begin += t.block_tokens, ++block)
    strips<kTileRows, false, W>(t.queries, t.head_dim, t.rows, static_cast<const W*>(t.keys[block]), nullptr, t.head_dim,
                                0, t.block_tokens, t.scratch + begin, stride, false);
  const std::size_t padded = (context + kLanes - 1) / kLanes * kLanes;
  float scales[R];
  for (std::size_t r = 0; r < R; ++r) {
    if (t.softcap != 0.0f) cap_scores(t.scratch + r * stride, padded, t.softcap);
    scales[r] = soften(t.scratch + r * stride, t.begins[r], t.limits[r], padded);
  }
  std::size_t column = 0;
  for (; column + 4 * L <= t.head_dim; column += 4 * L) mix<R, 4, W>(t, context, stride, column, scales);
  for (; column < t.head_dim; column += L) mix<R, 1, W>(t, context, stride, column, scales);
}

template <class W>
inline void attend_as(const AttentionTile& t) {
  switch (t.rows) {
    case 1: return attend_rows<1, W>(t);
    case 2: return attend_rows<2, W>(t);
    case 3: return attend_rows<3, W>(t);
    case 4: return attend_rows<4, W>(t);
    case 5: return attend_rows<5, W>(t);
    default: return attend_rows<6, W>(t);
  }
}

void attend(const AttentionTile& t) {
  switch (t.type) {
    case Type::f32: return attend_as<float>(t);
    case Type::f16: return attend_as<half>(t);
    case Type::bf16: return attend_as<bfloat>(t);
    case Type::i8: return;
  }
}

Attention attention(const AttentionShape&) { return {kQueryRows, kLanes, attention_floats, attend}; }

#define FS_TEXT_(name) #name
#define FS_TEXT(name) FS_TEXT_(name)
const Kernels kernels = {FS_TEXT(FS_ISA), kPanelFloats, multiply, norm, rotate, gate, gate_gelu, widen, narrow, attention};
#undef FS_TEXT
#undef FS_TEXT_

}  // namespace FS_ISA
}  // namespace
}  // namespace fs
