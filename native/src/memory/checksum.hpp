// XXH3-64 with seed 0, alone and along with reading. Written from the published algorithm description
// (xxHash fast digest algorithm, version 0.2.0), little-endian machines only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace fs {

// Hashes bytes that arrive in order at one place whose size is known: each piece while the caches hold it.
class Xxh3 {
 public:
  Xxh3(const std::byte* data, std::size_t size_bytes);
  // The first `ready_bytes` are there by now.
  void advance(std::size_t ready_bytes);
  // All are.
  std::uint64_t digest() const;

 private:
  const std::byte* data_;
  std::size_t size_bytes_;
  std::size_t block_ = 0;  // of 1024 bytes; those before it are in the lanes
  alignas(64) std::uint64_t lanes_[8];
};

std::uint64_t xxh3(const std::byte* data, std::size_t size_bytes);

// Exactly size_bytes from the file and their hash, or OsError, or EndOfFile. A read that a signal cut short
// calls `interrupted`, which may throw, and goes on.
std::uint64_t read_checksum(int fd, std::int64_t file_offset, std::byte* destination, std::size_t size_bytes,
                            const std::function<void()>& interrupted);

// The same past the page cache, from a descriptor with O_DIRECT: offset, destination and room_bytes are multiples
// of 4096, and what the file has between size_bytes and room_bytes is read and cleared again.
std::uint64_t read_direct(int fd, std::int64_t file_offset, std::byte* destination, std::size_t size_bytes,
                          std::size_t room_bytes, const std::function<void()>& interrupted);

// Fills `destination` from a socket, from byte `begin` on, and hashes each piece while the cache holds it. Returns how many
// bytes are there: all, or fewer once `slice_s` have passed. OsError, EndOfFile if the peer has closed, TimedOut if no
// byte came within the socket's own SO_RCVTIMEO.
std::size_t receive(int fd, Xxh3& hash, std::byte* destination, std::size_t begin, std::size_t size_bytes,
                    double slice_s, const std::function<void()>& interrupted);

// How many bytes of the range the page cache holds; nothing where the kernel (before 6.5) cannot tell.
std::uint64_t cached_bytes(int fd, std::uint64_t file_offset, std::uint64_t size_bytes);

}  // namespace fs
