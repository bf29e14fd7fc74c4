// The control block of a segment: which chunks are there, whether it failed, and a futex to wait on.
//
// Layout of its own sealed memfd, native byte order, one machine:
//   0      Header, one page; its fields up to `manifest_bytes` never change
//   4096   ready bits, one a chunk, in 64-bit words
//   ...    manifest bytes, to the end of the file
//
// The owner publishes with release stores and then bumps the futex word; readers map the file read-only.
// How many chunks are ready is counted from the bits: there is no counter that could disagree with them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "segment.hpp"

namespace fs {

enum class SegmentState : std::uint32_t { kFilling = 0, kReady = 1, kFailed = 2 };

class ControlBlock {
 public:
  static std::unique_ptr<ControlBlock> create(const std::string& name, std::uint64_t chunk_count,
                                              std::string_view manifest, std::uint64_t generation);
  // NativeError unless the descriptor holds a control block of this version, whole.
  static std::unique_ptr<ControlBlock> attach(Descriptor descriptor);
  ControlBlock(const ControlBlock&) = delete;
  ControlBlock& operator=(const ControlBlock&) = delete;

  int fd() const { return descriptor_.get(); }
  std::string_view manifest() const;
  std::uint64_t generation() const;
  std::uint64_t chunk_count() const { return chunk_count_; }
  std::uint64_t ready_count() const;
  SegmentState state() const;
  std::optional<std::pair<std::string, std::string>> error() const;
  bool is_ready(std::uint64_t chunk) const;
  // Of chunks first..last, which must exist.
  bool all_ready(std::uint64_t first, std::uint64_t last) const;

  // True if the chunk was not ready before: whoever brings it second is not counted.
  bool mark_ready(std::uint64_t chunk);
  // True if this made it fail: the first failure stands, and a ready segment stays ready.
  bool fail(std::string_view code, std::string_view message);

  // Returns once chunks first..last are ready, also of a segment that failed elsewhere. SegmentFailed,
  // TimedOut, std::out_of_range. Calls `between` after each signal and each second; it may throw.
  void wait(std::uint64_t first, std::uint64_t last, double timeout_s, const std::function<void()>& between) const;
  // A number that each change changes; and a wait until it is another one: false if it is not after `slice_ns`, or after
  // a signal.
  std::uint32_t event() const;
  bool await_event(std::uint32_t seen, std::int64_t slice_ns) const;

 private:
  struct Header;
  ControlBlock(Descriptor descriptor, std::unique_ptr<FileMapping> mapping, std::uint64_t chunk_count);
  Header& header() const;
  std::uint64_t* words() const;
  void check_range(std::uint64_t first, std::uint64_t last) const;
  void check_owner(const char* what) const;
  void wake() const;

  Descriptor descriptor_;
  std::unique_ptr<FileMapping> mapping_;
  std::uint64_t chunk_count_;
  std::mutex writing_;  // the owner's threads, one at a time
};

}  // namespace fs
