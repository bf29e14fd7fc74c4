#include "dlpack.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fs {
namespace {

constexpr std::int32_t kDeviceCpu = 1;
constexpr std::size_t kDimensionsMax = 64;  // what torch takes

enum Code : std::uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct NamedType {
  const char* name;
  Code code;
  std::uint8_t bits;
};

constexpr NamedType kTypes[] = {
    {"BOOL", kBool, 8},   {"U8", kUint, 8},    {"I8", kInt, 8},      {"F8_E4M3", kUint, 8}, {"F8_E5M2", kUint, 8},
    {"F8_E8M0", kUint, 8}, {"U16", kUint, 16}, {"I16", kInt, 16},    {"F16", kFloat, 16},   {"BF16", kBfloat, 16},
    {"U32", kUint, 32},   {"I32", kInt, 32},   {"F32", kFloat, 32},  {"U64", kUint, 64},    {"I64", kInt, 64},
    {"F64", kFloat, 64},  {"C64", kComplex, 64}, {"F8_E4M3FNUZ", kUint, 8}, {"F8_E5M2FNUZ", kUint, 8},
};

const NamedType& type_named(const std::string& name) {
  const auto has_name = [&](const NamedType& type) { return name == type.name; };
  const auto found = std::find_if(std::begin(kTypes), std::end(kTypes), has_name);
  if (found == std::end(kTypes)) throw std::invalid_argument("dtype " + name + " is not known");
  return *found;
}

std::uint64_t size_of(const std::vector<std::int64_t>& shape, std::uint64_t width_bytes) {
  if (shape.size() > kDimensionsMax)
    throw std::invalid_argument("shape has " + std::to_string(shape.size()) + " dimensions, 64 at most");
  const auto is_negative = [](std::int64_t dimension) { return dimension < 0; };
  if (std::any_of(shape.begin(), shape.end(), is_negative))
    throw std::invalid_argument("shape has a negative dimension");
  // Nothing there, however large the others are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t size_bytes = width_bytes;
  for (const std::int64_t dimension : shape)
    if (__builtin_mul_overflow(size_bytes, static_cast<std::uint64_t>(dimension), &size_bytes))
      throw std::out_of_range("shape has more bytes than there are addresses");
  return size_bytes;
}

struct Tensor {
  DLManagedTensor managed;
  std::shared_ptr<Mapping> mapping;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::uint64_t stride = 1;  // wraps only beside a zero dimension, where no stride is followed
  for (std::size_t at = shape.size(); at-- > 0;) {
    strides[at] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(shape[at], 1));
  }
  return strides;
}

}  // namespace

DLManagedTensor* make_dlpack(std::shared_ptr<Mapping> mapping, std::uint64_t offset,
                             const std::vector<std::int64_t>& shape, const std::string& dtype) {
  const NamedType& type = type_named(dtype);
  const std::uint64_t width_bytes = type.bits / 8;
  std::byte* const data = mapping->range(offset, size_of(shape, width_bytes));
  if (offset % width_bytes != 0)
    throw std::invalid_argument(dtype + " at offset " + std::to_string(offset) + ": not a multiple of " +
                                std::to_string(width_bytes) + " bytes");
  auto tensor = std::make_unique<Tensor>();
  tensor->mapping = std::move(mapping);
  tensor->shape = shape;
  tensor->strides = row_major(shape);
  tensor->managed.tensor = {data,
                            {kDeviceCpu, 0},
                            static_cast<std::int32_t>(shape.size()),
                            {type.code, type.bits, 1},
                            tensor->shape.data(),
                            tensor->strides.data(),
                            0};
  tensor->managed.context = tensor.get();
  tensor->managed.deleter = delete_dlpack;
  return &tensor.release()->managed;
}

void delete_dlpack(DLManagedTensor* tensor) { delete static_cast<Tensor*>(tensor->context); }

}  // namespace fs
