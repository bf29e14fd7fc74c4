// Shared memory of one segment: a sealed memfd, and a mapping that outlives whoever made it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fs {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();
  int get() const { return fd_; }
  int release();

 private:
  int fd_;
};

enum class Access {
  kOwner,   // shared and writable: what is written here is what everybody sees
  kReader,  // shared and read-only
  kCopier,  // private and writable: a write copies its page for this process alone
};

// Owns one mapping of a whole descriptor.
class Mapping {
 public:
  Mapping(const Descriptor& descriptor, std::size_t size_bytes, Access access);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }
  Access access() const { return access_; }

  // IndexError (std::out_of_range) unless [offset, offset + size_bytes) lies inside.
  std::byte* range(std::uint64_t offset, std::uint64_t size_bytes) const;

 private:
  std::byte* data_;
  std::size_t size_bytes_;
  Access access_;
};

// A memfd of that size, not sealed yet: its creator maps it, then seals it.
Descriptor create_memory(const std::string& name, std::uint64_t size_bytes);

// From here on nobody resizes it, nobody but the mappings that exist may write, and nobody unseals it.
void seal(const Descriptor& descriptor);

// Size of a sealed memfd. OsError if it is anything else: the owner of one that is not sealed could
// shrink it under its readers, who would die of SIGBUS.
std::uint64_t sealed_size(const Descriptor& descriptor);

class Region {
 public:
  static Region create(const std::string& name, std::uint64_t size_bytes);
  static Region attach(Descriptor descriptor);
  int fd() const { return descriptor_.get(); }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

  // Maps the pages of the range now, in one call, instead of one fault each at first touch. To a reader
  // only worth it for ranges that are filled: a hole would become a page of zeroes at its expense.
  void populate(std::uint64_t offset, std::uint64_t size_bytes) const;

 private:
  Region(Descriptor descriptor, std::shared_ptr<Mapping> mapping);
  Descriptor descriptor_;
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace fs
