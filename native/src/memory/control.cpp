#include "control.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "errors.hpp"

namespace fs {
namespace {

constexpr std::uint64_t kMagic = 0x314C525443534621;  // "!FSCTRL1" as bytes in memory
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kHeaderBytes = 4096;
constexpr std::uint64_t kCodeBytes = 64;
constexpr std::uint64_t kMessageBytes = 2048;
// One bit each: 2^32 chunks of 4 MiB are 16 PiB, and half a gigabyte of bits.
constexpr std::uint64_t kChunksMax = std::uint64_t{1} << 32;
constexpr std::uint64_t kManifestMaxBytes = std::uint64_t{1} << 32;
// A wait is cut into slices, so that Python's signal handlers run also when the signal went to another thread.
constexpr std::int64_t kSliceNs = 1'000'000'000;
// Between two looks where no wake-up comes: short beside what a chunk takes to come, long beside what a look costs.
constexpr std::int64_t kLookNs = 1'000'000;
constexpr double kTimeoutMaxS = 1e9;

template <typename Word>
Word load_acquire(const Word& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <typename Word>
void store_release(Word& word, Word value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

std::uint64_t words_for(std::uint64_t chunk_count) { return chunk_count / 64 + (chunk_count % 64 != 0); }

std::int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Shared, not private: the word lies in memory that other processes map too.
long futex(const std::uint32_t* word, int operation, std::uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

// As much of the text as fits, without half a UTF-8 character at the end.
std::uint32_t put_text(char* field, std::uint64_t field_bytes, std::string_view text) {
  std::size_t size = std::min<std::size_t>(text.size(), field_bytes);
  if (size < text.size())
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  std::memcpy(field, text.data(), size);
  return static_cast<std::uint32_t>(size);
}

std::string get_text(const char* field, std::uint64_t field_bytes, std::uint32_t size_bytes) {
  return std::string(field, std::min<std::uint64_t>(size_bytes, field_bytes));
}

std::string chunk_text(std::uint64_t first, std::uint64_t last) {
  if (first == last) return "chunk " + std::to_string(first);
  return "chunks " + std::to_string(first) + " to " + std::to_string(last);
}

}  // namespace

struct ControlBlock::Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint64_t generation;
  std::uint64_t chunk_count;
  std::uint64_t manifest_bytes;
  std::uint64_t reserved[3];
  // What changes has a cache line of its own.
  std::uint32_t state;
  std::uint32_t event;  // the futex word: bumped after each change
  std::uint64_t reserved_line[7];
  std::uint32_t code_bytes;
  std::uint32_t message_bytes;
  char code[kCodeBytes];
  char message[kMessageBytes];
};

ControlBlock::ControlBlock(Descriptor descriptor, std::unique_ptr<FileMapping> mapping, std::uint64_t chunk_count)
    : descriptor_(std::move(descriptor)), mapping_(std::move(mapping)), chunk_count_(chunk_count) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  static_assert(offsetof(Header, state) == 64);
}

std::unique_ptr<ControlBlock> ControlBlock::create(const std::string& name, std::uint64_t chunk_count,
                                                   std::string_view manifest, std::uint64_t generation) {
  if (chunk_count > kChunksMax || manifest.size() > kManifestMaxBytes)
    throw std::invalid_argument("control block of " + std::to_string(chunk_count) + " chunks and a manifest of " +
                                std::to_string(manifest.size()) + " bytes is too large");
  const std::uint64_t bit_bytes = words_for(chunk_count) * 8;
  const std::uint64_t size_bytes = kHeaderBytes + bit_bytes + manifest.size();
  Descriptor descriptor = create_memory(name, size_bytes);
  auto mapping = std::make_unique<FileMapping>(descriptor, size_bytes, Access::kOwner);
  seal(descriptor);
  if (!manifest.empty()) std::memcpy(mapping->data() + kHeaderBytes + bit_bytes, manifest.data(), manifest.size());
  std::unique_ptr<ControlBlock> block(new ControlBlock(std::move(descriptor), std::move(mapping), chunk_count));
  Header& header = block->header();
  header.version = kVersion;
  header.header_bytes = kHeaderBytes;
  header.generation = generation;
  header.chunk_count = chunk_count;
  header.manifest_bytes = manifest.size();
  header.state = static_cast<std::uint32_t>(chunk_count == 0 ? SegmentState::kReady : SegmentState::kFilling);
  store_release(header.magic, kMagic);
  return block;
}

std::unique_ptr<ControlBlock> ControlBlock::attach(Descriptor descriptor) {
  std::uint64_t size_bytes = 0;
  try {
    size_bytes = protected_size(descriptor);
  } catch (const OsError& error) {
    throw NativeError(std::string("not a control block: ") + error.what());
  }
  if (size_bytes < kHeaderBytes)
    throw NativeError("not a control block: " + std::to_string(size_bytes) + " bytes, at least 4096 needed");
  auto mapping = std::make_unique<FileMapping>(descriptor, size_bytes, Access::kReader);
  const auto& header = *reinterpret_cast<const Header*>(mapping->data());
  if (load_acquire(header.magic) != kMagic) throw NativeError("not a control block: wrong magic number");
  if (header.version != kVersion || header.header_bytes != kHeaderBytes)
    throw NativeError("control block of version " + std::to_string(header.version) + ", this is version " +
                      std::to_string(kVersion));
  // Read once: what was checked is what is used, whatever the owner writes later.
  const std::uint64_t chunk_count = load_acquire(header.chunk_count);
  const std::uint64_t manifest_bytes = load_acquire(header.manifest_bytes);
  if (chunk_count > kChunksMax || manifest_bytes > kManifestMaxBytes ||
      kHeaderBytes + words_for(chunk_count) * 8 + manifest_bytes != size_bytes)
    throw NativeError("broken control block: " + std::to_string(chunk_count) + " chunks and a manifest of " +
                      std::to_string(manifest_bytes) + " bytes do not make " + std::to_string(size_bytes) + " bytes");
  std::unique_ptr<ControlBlock> block(new ControlBlock(std::move(descriptor), std::move(mapping), chunk_count));
  block->state();
  return block;
}

ControlBlock::Header& ControlBlock::header() const { return *reinterpret_cast<Header*>(mapping_->data()); }

std::uint64_t* ControlBlock::words() const {
  return reinterpret_cast<std::uint64_t*>(mapping_->data() + kHeaderBytes);
}

std::string_view ControlBlock::manifest() const {
  const std::uint64_t begin = kHeaderBytes + words_for(chunk_count_) * 8;
  return {reinterpret_cast<const char*>(mapping_->data() + begin), mapping_->size_bytes() - begin};
}

std::uint64_t ControlBlock::generation() const { return header().generation; }

std::uint64_t ControlBlock::ready_count() const {
  std::uint64_t count = 0;
  for (std::uint64_t word = 0; word < words_for(chunk_count_); ++word)
    count += static_cast<std::uint64_t>(__builtin_popcountll(load_acquire(words()[word])));
  return count;
}

SegmentState ControlBlock::state() const {
  const std::uint32_t state = load_acquire(header().state);
  if (state > static_cast<std::uint32_t>(SegmentState::kFailed))
    throw NativeError("broken control block: state " + std::to_string(state));
  return static_cast<SegmentState>(state);
}

std::optional<std::pair<std::string, std::string>> ControlBlock::error() const {
  if (state() != SegmentState::kFailed) return std::nullopt;
  const Header& from = header();
  return std::pair(get_text(from.code, kCodeBytes, from.code_bytes),
                   get_text(from.message, kMessageBytes, from.message_bytes));
}

void ControlBlock::check_range(std::uint64_t first, std::uint64_t last) const {
  if (first > last || last >= chunk_count_)
    throw std::out_of_range(chunk_text(first, last) + " of a segment of " + std::to_string(chunk_count_) + " chunks");
}

void ControlBlock::check_owner(const char* what) const {
  if (mapping_->access() != Access::kOwner)
    throw NativeError(std::string(what) + ": only the owner of a control block writes it");
}

bool ControlBlock::is_ready(std::uint64_t chunk) const {
  check_range(chunk, chunk);
  return load_acquire(words()[chunk / 64]) >> (chunk % 64) & 1;
}

bool ControlBlock::all_ready(std::uint64_t first, std::uint64_t last) const {
  for (std::uint64_t word = first / 64; word <= last / 64; ++word) {
    std::uint64_t needed = ~std::uint64_t{0};
    if (word == first / 64) needed &= ~std::uint64_t{0} << (first % 64);
    if (word == last / 64) needed &= ~std::uint64_t{0} >> (63 - last % 64);
    if ((load_acquire(words()[word]) & needed) != needed) return false;
  }
  return true;
}

bool ControlBlock::mark_ready(std::uint64_t chunk) {
  check_owner("mark_ready");
  check_range(chunk, chunk);
  const std::lock_guard lock(writing_);
  const std::uint64_t bit = std::uint64_t{1} << (chunk % 64);
  if (__atomic_fetch_or(&words()[chunk / 64], bit, __ATOMIC_ACQ_REL) & bit) return false;
  if (state() == SegmentState::kFilling && all_ready(0, chunk_count_ - 1))
    store_release(header().state, static_cast<std::uint32_t>(SegmentState::kReady));
  wake();
  return true;
}

bool ControlBlock::fail(std::string_view code, std::string_view message) {
  check_owner("fail");
  const std::lock_guard lock(writing_);
  if (state() != SegmentState::kFilling) return false;
  Header& to = header();
  to.code_bytes = put_text(to.code, kCodeBytes, code);
  to.message_bytes = put_text(to.message, kMessageBytes, message);
  store_release(to.state, static_cast<std::uint32_t>(SegmentState::kFailed));
  wake();
  return true;
}

void ControlBlock::wake() const {
  std::uint32_t& event = header().event;
  __atomic_fetch_add(&event, 1, __ATOMIC_RELEASE);
  futex(&event, FUTEX_WAKE, INT_MAX, nullptr);
}

std::uint32_t ControlBlock::event() const { return load_acquire(header().event); }

bool ControlBlock::await_event(std::uint32_t seen, std::int64_t slice_ns) const {
  const timespec slice{slice_ns / 1'000'000'000, slice_ns % 1'000'000'000};
  if (futex(&header().event, FUTEX_WAIT, seen, &slice) == 0 || errno == EAGAIN) return true;
  if (errno != EINTR && errno != ETIMEDOUT) throw_errno("futex wait");
  return false;
}

void ControlBlock::wait(std::uint64_t first, std::uint64_t last, double timeout_s,
                        const std::function<void()>& between) const {
  check_range(first, last);
  if (!std::isfinite(timeout_s)) throw std::invalid_argument("timeout_s must be a number of seconds: every wait ends");
  const double bounded_s = std::clamp(timeout_s, 0.0, kTimeoutMaxS);
  const std::int64_t deadline_ns = monotonic_ns() + static_cast<std::int64_t>(bounded_s * 1e9);
  const std::int64_t most_ns = across_kernels() ? kLookNs : kSliceNs;
  std::int64_t between_ns = monotonic_ns() + kSliceNs;
  for (;;) {
    // Read before the condition: a change after this makes the kernel refuse to sleep.
    const std::uint32_t seen = event();
    if (all_ready(first, last)) return;
    if (auto failure = error()) throw SegmentFailed(std::move(failure->first), std::move(failure->second));
    const std::int64_t now_ns = monotonic_ns();
    const std::int64_t left_ns = deadline_ns - now_ns;
    if (left_ns <= 0)
      throw TimedOut(chunk_text(first, last) + " not ready after " + std::to_string(timeout_s) + " s; " +
                     std::to_string(ready_count()) + " of " + std::to_string(chunk_count_) + " chunks are");
    const std::int64_t slice_ns = std::min(left_ns, most_ns);
    if (await_event(seen, slice_ns)) continue;
    if (errno == EINTR || now_ns + slice_ns >= between_ns) {
      between();
      between_ns = now_ns + slice_ns + kSliceNs;
    }
  }
}

}  // namespace fs
