// Tensors over a mapping in the DLPack form (the unversioned structures, ABI of DLPack before 1.0),
// which hold the mapping: a tensor, or a slice of one, outlives the Region that it came from.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "segment.hpp"

namespace fs {

struct DLDevice {
  std::int32_t type;
  std::int32_t id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t dimensions;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

// Contiguous, at `offset`; dtype by its safetensors name, except that 8-bit floats come as U8: DLPack of
// this form has no names for them. std::out_of_range, std::invalid_argument.
DLManagedTensor* make_dlpack(std::shared_ptr<Mapping> mapping, std::uint64_t offset,
                             const std::vector<std::int64_t>& shape, const std::string& dtype);
void delete_dlpack(DLManagedTensor* tensor);

}  // namespace fs
