#pragma once

#include "kernels.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define FS_AMX 1
#endif

namespace fs {

// The kernels "amx", which are those of AVX-512 but for products and attention; null where processor, kernel or compiler
// have no AMX.
const Kernels* amx_kernels(const Kernels& avx512);

}  // namespace fs
