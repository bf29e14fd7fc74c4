#include "kernels.hpp"

#include "kernels_amx.hpp"

#include <cmath>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fs {
namespace {

struct half {
  std::uint16_t bits;
};
struct bfloat {
  std::uint16_t bits;
};
struct byte {
  std::int8_t value;
};

}  // namespace
}  // namespace fs

// GCC 12 takes the "undefined" operand of its own AVX-512 intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// The same text three times, for three sets of instructions. Nothing of the standard library is used
// inside: an inline function of it, compiled there, might be the copy that the linker keeps for all.
#define FS_ISA generic
#define FS_ISA_BITS 128
#include "kernels_isa.hpp"
#undef FS_ISA
#undef FS_ISA_BITS

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define FS_ISA avx2
#define FS_ISA_BITS 256
#include "kernels_isa.hpp"
#undef FS_ISA
#undef FS_ISA_BITS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define FS_ISA avx512
#define FS_ISA_BITS 512
#include "kernels_isa.hpp"
#undef FS_ISA
#undef FS_ISA_BITS
#pragma GCC pop_options
#endif

namespace fs {
namespace {

const Kernels* find(const std::string& name) {
#if defined(__x86_64__)
  if (name == "avx512" || name == "amx") {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!has) return nullptr;
    return name == "amx" ? amx_kernels(avx512::kernels) : &avx512::kernels;
  }
  if (name == "avx2")
    // f16c came before avx2 in every processor that has the latter.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kernels : nullptr;
#endif
  return name == "generic" ? &generic::kernels : nullptr;
}

}  // namespace

const Kernels& kernels_named(const std::string& name) {
  if (name == "bf16")
    if (const Kernels* found = find("amx")) return *found;
  if (name == "auto" || name == "bf16") {
    for (const char* best : {"avx512", "avx2"})
      if (const Kernels* found = find(best)) return *found;
    return generic::kernels;
  }
  if (const Kernels* found = find(name)) return *found;
  throw std::invalid_argument("this processor has no " + name + " kernels");
}

}  // namespace fs
