#pragma once

#include "kernels.hpp"

namespace fs {

// The kernels "amx", which are those of AVX-512 but for products; null where processor, kernel or compiler have no AMX.
const Kernels* amx_kernels(const Kernels& avx512);

}  // namespace fs
