// XXH64, alone and fused with a copy or a read. Written from the published algorithm description
// (xxHash fast digest algorithm, version 0.1.1), little-endian machines only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace fs {

// Feed it bytes in any pieces; digest() may be asked at any time.
class Xxh64 {
 public:
  explicit Xxh64(std::uint64_t seed = 0);
  void update(const std::byte* data, std::size_t size_bytes);
  std::uint64_t digest() const;

 private:
  std::uint64_t lanes_[4];
  std::uint64_t seed_;
  std::uint64_t total_bytes_ = 0;
  std::byte tail_[32];  // the total_bytes_ % 32 bytes that do not fill a stripe yet
};

std::uint64_t xxh64(const std::byte* data, std::size_t size_bytes, std::uint64_t seed);

// The ranges must not overlap.
std::uint64_t copy_checksum(std::byte* destination, const std::byte* source, std::size_t size_bytes);

// Exactly size_bytes from the file, or OsError, or EndOfFile. A read that a signal cut short calls
// `interrupted`, which may throw, and goes on.
std::uint64_t read_checksum(int fd, std::int64_t file_offset, std::byte* destination, std::size_t size_bytes,
                            const std::function<void()>& interrupted);

}  // namespace fs
