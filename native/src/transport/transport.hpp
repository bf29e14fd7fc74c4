// Reading ranges of a checkpoint out of a peer's memory, straight into our own: one protocol, whatever carries the bytes.
// Register a region and connect in the constructor; then submit, poll, cancel.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fs {

enum class ReadStatus : std::uint16_t {
  kOk = 0,
  kNotReady = 1,  // the peer does not have it yet, and its wait is over
  kGone = 2,      // the peer's segment failed
  kRefused = 3,   // the peer does not give it to us
  kFailed = 4,    // the connection is of no use any more; error() says why
};

struct Completion {
  std::uint64_t request;
  ReadStatus status;
  std::uint64_t checksum;  // XXH3-64 of the bytes as they arrived, if ok
};

class Reader {
 public:
  virtual ~Reader() = default;

  // Reads that range of the region from the peer, which may wait `wait_s` for chunks that it does not have yet.
  // NativeError if the connection has failed, or too much is outstanding; std::out_of_range unless the range lies in one
  // slab; std::invalid_argument for a number that is outstanding, or a size or wait outside of the bounds.
  virtual void submit(std::uint64_t request, std::uint64_t offset, std::uint64_t size_bytes, double wait_s) = 0;

  // What has completed, as soon as something has; nothing once `timeout_s` have passed, or if nothing is outstanding.
  // A connection that fails completes all that is outstanding. Calls `interrupted` after each signal; it may throw.
  virtual std::vector<Completion> poll(double timeout_s, const std::function<void()>& interrupted) = 0;

  // Fails what is outstanding, for ever; from any thread. Once poll() has returned too, nothing is written any more.
  virtual void cancel() = 0;

  // Why the connection failed; nothing while it has not.
  virtual std::optional<std::string> error() const = 0;
};

}  // namespace fs
