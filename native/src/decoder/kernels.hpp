// The arithmetic of a decoder for one kind of processor each, behind one table of functions.
//
// Everything accumulates in fp32, and in an order that depends on the length of a row alone: lanes along
// a slice of the row, a fixed tree over the lanes, slice after slice. So a row's result is the same bits
// in whatever batch it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fs {

enum class Type { f32, f16, bf16, i8 };

inline std::size_t width_bytes(Type type) { return type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; }

// Weights as they are stored, row-major and without gaps; `columns` is a multiple of kLanes. Those of type i8 are whole
// numbers, of which each row has a factor of its own.
struct Matrix {
  const void* data = nullptr;
  Type type = Type::f32;
  std::size_t rows = 0;
  std::size_t columns = 0;
  const float* scales = nullptr;  // [rows], of i8 alone
};

constexpr std::size_t kLanes = 16;       // the widest vector, in floats
constexpr std::size_t kMostQueryRows = 64;  // of one attention tile, in any way to compute it
constexpr std::size_t kSlice = 768;      // of a row are summed before they join its result
constexpr std::size_t kPanelFloats = 64 * 1024;  // of weights widened at a time: 256 KiB, well inside L2

// Queries of one key-value head over one sequence's blocks.
struct AttentionTile {
  const float* queries;      // [rows][head_dim], already scaled
  std::size_t rows;          // 1 to those of `Attention`
  const std::size_t* begins; // the first key that each row sees
  const std::size_t* limits; // and the one behind the last; not falling
  float softcap;             // scores become softcap * tanh(score / softcap); 0: they stay
  std::size_t head_dim;
  const void* const* keys;   // per block [block_tokens][head_dim]
  const void* const* values;
  Type type;
  std::size_t block_tokens;  // a multiple of 4
  float* scratch;            // in lines of 64 bytes, as much as `Attention` says
  float* const* outputs;     // per row, [head_dim]
};

// What is the same for all attention tiles of a decoder.
struct AttentionShape {
  std::size_t head_dim, block_tokens;
  Type type;  // of keys and values
  float softcap;
};

// A way to compute attention.
struct Attention {
  std::size_t rows;  // of a tile, at most
  std::size_t keys;  // are taken together, a multiple of kLanes: a tile's first key is a multiple of them
  std::size_t (*scratch_floats)(std::size_t head_dim, std::size_t context);  // the context in whole blocks
  void (*attend)(const AttentionTile& tile);
};

struct Kernels {
  const char* name;
  std::size_t scratch_floats;  // of `multiply`, or one row of w if that is more
  // y[m][n] (+)= sum over k of x[m][k] * w[n][k], times the row's factor, for n in [begin, end). `scratch`: in lines of 64 bytes, a thread's own
  // and left to this between calls. `version`: of the numbers in x, another one for others.
  void (*multiply)(const float* x, std::size_t x_stride, std::size_t rows, const Matrix& w, std::size_t begin,
                   std::size_t end, float* y, std::size_t y_stride, bool add, float* scratch, std::uint64_t version);
  void (*norm)(const float* x, const Matrix& weight, float epsilon, float* y);
  // Turns `count` heads, one after the other; a head's first half pairs with its second.
  void (*rotate)(float* heads, std::size_t count, std::size_t head_dim, const float* cosines, const float* sines);
  // gate = gate / (1 + exp(-gate)) * up
  void (*gate)(float* gate, const float* up, std::size_t count);
  // gate = gelu(gate) * up, by the approximation with tanh
  void (*gate_gelu)(float* gate, const float* up, std::size_t count);
  void (*widen)(const void* from, Type type, std::size_t count, float* to);
  void (*narrow)(const float* from, Type type, std::size_t count, void* to);
  Attention (*attention)(const AttentionShape& shape);
};

// "auto" (the best that this processor has), "avx512", "avx2" or "generic", all of which compute in fp32; "amx", whose
// products, and attention over keys in bf16, are of numbers rounded to bf16; "bf16" (amx, and "auto" without it). std::invalid_argument if the processor
// lacks it.
const Kernels& kernels_named(const std::string& name);

}  // namespace fs
