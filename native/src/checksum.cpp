#include "checksum.hpp"

#include <unistd.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "errors.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "XXH64 reads little-endian words");

namespace fs {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr std::size_t kStripeBytes = 32;

// Small enough that what pread wrote is still in L2 when it is hashed; 64 to 512 KiB measure alike.
constexpr std::size_t kReadBlockBytes = 256 * 1024;

// How far ahead the next lines are asked for: 512 bytes gave 7 GB/s out of memory, 2 KiB 9.3, more no more.
constexpr std::size_t kPrefetchBytes = 2048;

// A copy of this size or more is a chunk on its way into a segment, not read again soon: keep it out of the
// caches. Out of memory this doubles the speed (no read before each write); inside the caches it is no loss.
constexpr std::size_t kStreamedBytes = 1024 * 1024;

template <typename Word>
Word load(const std::byte* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

constexpr std::uint64_t rotate_left(std::uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

constexpr std::uint64_t mix(std::uint64_t lane, std::uint64_t word) {
  return rotate_left(lane + word * kPrime2, 31) * kPrime1;
}

template <typename Word>
void store(std::byte* at, Word word) {
  std::memcpy(at, &word, sizeof word);
}

enum class Copy { kNone, kCached, kStreamed };

#if defined(__x86_64__)
// Past the caches: the line is not read before it is written, and what the caches hold stays there.
void store_streamed(std::byte* at, std::uint64_t word) {
  _mm_stream_si64(reinterpret_cast<long long*>(at), static_cast<long long>(word));
}
#endif

// Whole stripes only. The words that were hashed are the words that are stored, so the checksum is that of
// the copy even if somebody writes to the source meanwhile. The multiplications are what the loop waits
// for as long as the next lines are there already: hence the prefetch, and hence stores that cost nothing.
template <Copy kCopy>
void consume(std::uint64_t (&lanes)[4], const std::byte* data, std::size_t size_bytes, std::byte* copy) {
  std::uint64_t lane0 = lanes[0], lane1 = lanes[1], lane2 = lanes[2], lane3 = lanes[3];
  const auto take = [&](std::size_t at) {
    const std::uint64_t word = load<std::uint64_t>(data + at);
    if constexpr (kCopy == Copy::kCached) store(copy + at, word);
#if defined(__x86_64__)
    if constexpr (kCopy == Copy::kStreamed) store_streamed(copy + at, word);
#endif
    return word;
  };
  for (std::size_t at = 0; at < size_bytes; at += kStripeBytes) {
    __builtin_prefetch(data + at + kPrefetchBytes);
    lane0 = mix(lane0, take(at));
    lane1 = mix(lane1, take(at + 8));
    lane2 = mix(lane2, take(at + 16));
    lane3 = mix(lane3, take(at + 24));
  }
  lanes[0] = lane0, lanes[1] = lane1, lanes[2] = lane2, lanes[3] = lane3;
}

void begin(std::uint64_t (&lanes)[4], std::uint64_t seed) {
  lanes[0] = seed + kPrime1 + kPrime2;
  lanes[1] = seed + kPrime2;
  lanes[2] = seed;
  lanes[3] = seed - kPrime1;
}

// `tail` holds the total_bytes % 32 bytes after the last stripe.
std::uint64_t finish(const std::uint64_t (&lanes)[4], std::uint64_t seed, std::uint64_t total_bytes,
                     const std::byte* tail) {
  std::uint64_t hash = seed + kPrime5;
  if (total_bytes >= kStripeBytes) {
    hash = rotate_left(lanes[0], 1) + rotate_left(lanes[1], 7) + rotate_left(lanes[2], 12) + rotate_left(lanes[3], 18);
    for (const std::uint64_t lane : lanes) hash = (hash ^ mix(0, lane)) * kPrime1 + kPrime4;
  }
  hash += total_bytes;
  std::size_t left = total_bytes % kStripeBytes;
  for (; left >= 8; left -= 8, tail += 8)
    hash = rotate_left(hash ^ mix(0, load<std::uint64_t>(tail)), 27) * kPrime1 + kPrime4;
  for (; left >= 4; left -= 4, tail += 4)
    hash = rotate_left(hash ^ load<std::uint32_t>(tail) * kPrime1, 23) * kPrime2 + kPrime3;
  for (; left > 0; --left, ++tail)
    hash = rotate_left(hash ^ std::to_integer<std::uint64_t>(*tail) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace

Xxh64::Xxh64(std::uint64_t seed) : seed_(seed) { begin(lanes_, seed); }

void Xxh64::update(const std::byte* data, std::size_t size_bytes) {
  const std::size_t held = total_bytes_ % kStripeBytes;
  total_bytes_ += size_bytes;
  if (held > 0) {
    const std::size_t taken = std::min(kStripeBytes - held, size_bytes);
    std::memcpy(tail_ + held, data, taken);
    data += taken, size_bytes -= taken;
    if (held + taken < kStripeBytes) return;
    consume<Copy::kNone>(lanes_, tail_, kStripeBytes, nullptr);
  }
  const std::size_t left = size_bytes % kStripeBytes;
  consume<Copy::kNone>(lanes_, data, size_bytes - left, nullptr);
  if (left > 0) std::memcpy(tail_, data + (size_bytes - left), left);
}

std::uint64_t Xxh64::digest() const { return finish(lanes_, seed_, total_bytes_, tail_); }

std::uint64_t xxh64(const std::byte* data, std::size_t size_bytes, std::uint64_t seed) {
  std::uint64_t lanes[4];
  begin(lanes, seed);
  const std::size_t stripes = size_bytes - size_bytes % kStripeBytes;
  consume<Copy::kNone>(lanes, data, stripes, nullptr);
  return finish(lanes, seed, size_bytes, data + stripes);
}

std::uint64_t copy_checksum(std::byte* destination, const std::byte* source, std::size_t size_bytes) {
  std::uint64_t lanes[4];
  begin(lanes, 0);
  const std::size_t stripes = size_bytes - size_bytes % kStripeBytes;
#if defined(__x86_64__)
  if (size_bytes >= kStreamedBytes && reinterpret_cast<std::uintptr_t>(destination) % 8 == 0) {
    consume<Copy::kStreamed>(lanes, source, stripes, destination);
    _mm_sfence();  // before anybody is told that the bytes are there
  } else
#endif
    consume<Copy::kCached>(lanes, source, stripes, destination);
  if (stripes < size_bytes) std::memcpy(destination + stripes, source + stripes, size_bytes - stripes);
  return finish(lanes, 0, size_bytes, destination + stripes);
}

std::uint64_t read_checksum(int fd, std::int64_t file_offset, std::byte* destination, std::size_t size_bytes,
                            const std::function<void()>& interrupted) {
  if (file_offset < 0 ||
      size_bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max() - file_offset)) {
    errno = EINVAL;
    throw_errno("read of " + std::to_string(size_bytes) + " bytes at offset " + std::to_string(file_offset));
  }
  Xxh64 hash;
  std::size_t done = 0;
  while (done < size_bytes) {
    const std::size_t wanted = std::min(kReadBlockBytes, size_bytes - done);
    const ssize_t got = ::pread(fd, destination + done, wanted, file_offset + static_cast<std::int64_t>(done));
    if (got < 0 && errno == EINTR) {
      interrupted();
      continue;
    }
    if (got < 0) throw_errno("read at offset " + std::to_string(file_offset + static_cast<std::int64_t>(done)));
    if (got == 0)
      throw EndOfFile(std::to_string(size_bytes) + " bytes wanted at offset " + std::to_string(file_offset) +
                      ", the file has " + std::to_string(done) + " there");
    hash.update(destination + done, static_cast<std::size_t>(got));
    done += static_cast<std::size_t>(got);
  }
  return hash.digest();
}

}  // namespace fs
