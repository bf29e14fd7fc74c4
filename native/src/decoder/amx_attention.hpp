#pragma once

#include "kernels.hpp"

namespace fs {

// Attention on the tiles of AMX for keys and values in bf16, and `otherwise` for shapes that tiles do not take. Only
// where `amx_kernels` are.
Attention amx_attention(const AttentionShape& shape, const Attention& otherwise);

}  // namespace fs
