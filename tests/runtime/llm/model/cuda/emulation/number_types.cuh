// What the kernels' header of this name has, in C++: the numbers of one type, and the products of tensor cores as the
// PTX ISA describes m16n8k16.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "device.hpp"

inline float float_of_bits(std::uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

#if defined(FS_FP32)
typedef float Stored;
inline float loaded(Stored value) { return value; }
inline Stored stored(float value) { return value; }
#elif defined(FS_FP16)
typedef unsigned short Stored;
inline float loaded(Stored value) {
  const int exponent = value >> 10 & 31, mantissa = value & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                    : std::ldexp(static_cast<float>(mantissa), -24);
  return value >> 15 ? -size : size;
}
inline Stored stored(float value) {
  const int sign = std::signbit(value) << 15;
  const float size = std::fabs(value);
  if (std::isnan(size)) return 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < std::ldexp(1.0f, -25)) return sign;
  const int exponent = std::max(std::ilogb(size), -14);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // rounds halves to even
  return sign | (units < 1024 ? units : ((exponent + 15) << 10) + units - 1024);
}
#else
typedef unsigned short Stored;
inline float loaded(Stored value) { return float_of_bits(static_cast<std::uint32_t>(value) << 16); }
inline Stored stored(float value) {
  if (std::isnan(value)) return 0x7fc0;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif

#if !defined(FS_FP32)
#define FS_TENSOR_CORES

inline void multiply_and_add(float* sums, unsigned left_low, unsigned left_high, unsigned right_low,
                             unsigned right_high) {
  const Registers all = exchanged({left_low, left_high, right_low, right_high});
  const int own_row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
  for (int column = 2 * pair; column < 2 * pair + 2; ++column)
    for (int at = 0; at < 16; ++at) {
      const int half = at / 8, lane = at % 8 / 2, shift = at % 2 * 16;
      const unsigned left = all[4 * own_row + lane][half] >> shift, right = all[4 * column + lane][2 + half] >> shift;
      sums[column % 2] += loaded(static_cast<Stored>(left)) * loaded(static_cast<Stored>(right));
    }
}
#endif
