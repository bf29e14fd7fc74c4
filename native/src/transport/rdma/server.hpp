// Lets one reader read a region by RDMA READ, and says over the side channel what of it is ready.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../memory/control.hpp"
#include "channel.hpp"
#include "verbs.hpp"

namespace fs::rdma {

class Server {
 public:
  using ChunkRanges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // begin, end

  // The control block outlives this. `allowed`: the chunks that are called ready to this reader. The socket stays the
  // caller's. OsError, std::invalid_argument.
  Server(int socket, std::shared_ptr<Memory> memory, const ControlBlock& control, std::uint64_t chunk_bytes,
         ChunkRanges allowed, Timing timing);
  Server(const Server&) = delete;

  // Serves until the reader closes, the grant ends at `until_unix_ms`, or stop(): which of them, "closed", "expired" or
  // "stopped". Lost for a reader that is silent or off the protocol. Once only; when this ends nobody reads the memory
  // by this connection any more. Calls `interrupted` now and then; it may throw.
  std::string run(std::int64_t until_unix_ms, const std::function<void()>& interrupted);
  // Bytes of the ranges that were called ready: what the reader reads, as far as its end knows.
  std::uint64_t ready_bytes() const { return ready_bytes_.load(); }
  // From any thread, also before run().
  void stop();

 private:
  struct Waiting {
    Message asked;
    Clock::time_point until;
  };
  std::string serve(Clock::time_point ends, const std::function<void()>& interrupted);
  void heard(const Message& message);
  bool is_allowed(std::uint64_t first, std::uint64_t last) const;
  std::optional<Kind> answer_to(const Waiting& waiting, Clock::time_point now) const;
  void answer();

  std::shared_ptr<Memory> memory_;
  const ControlBlock& control_;
  std::uint64_t chunk_bytes_;
  ChunkRanges allowed_;
  SideChannel channel_;
  const Wakeup wakeup_;
  std::atomic<bool> stopping_{false};
  std::deque<Waiting> waiting_;
  std::atomic<std::uint64_t> ready_bytes_{0};
};

}  // namespace fs::rdma
