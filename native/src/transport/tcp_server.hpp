// Serves ranges of a segment to one peer, over one TCP connection, whether their chunks are there yet or still arrive.
#pragma once

#include <atomic>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "../memory/control.hpp"
#include "../memory/segment.hpp"
#include "frames.hpp"
#include "ready_events.hpp"
#include "sockets.hpp"
#include "transport.hpp"

namespace fs {

class TcpServer {
 public:
  using ChunkRanges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // begin, end

  // `fd`: a connected socket whose reader has shown its grant; it is duplicated. The control block outlives this. `allowed`:
  // the chunks that it may read. `stall_s`: how long it may take nothing. OsError, std::invalid_argument.
  TcpServer(int fd, const Region& region, const ControlBlock& control, std::uint64_t chunk_bytes, ChunkRanges allowed,
            double stall_s);
  TcpServer(const TcpServer&) = delete;

  // Serves until the reader leaves or closes, the grant ends at `until_unix_ms`, or stop(): which of them, "left",
  // "closed", "expired" or "stopped"; or until it has asked for nothing for `idle_s` and has received everything: "idle",
  // and a later server may go on with the connection. NativeError for what no reader sends, TimedOut for one that takes nothing. Once only;
  // the connection is closed then, unless it was left or is idle. Calls `interrupted` after each
  // signal; it may throw.
  std::string run(std::int64_t until_unix_ms, double idle_s, const std::function<void()>& interrupted);
  // From any thread, also before run().
  void stop();
  std::uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Waiting {
    std::uint64_t request, offset, size_bytes;
    Clock::time_point until;
  };
  struct End {
    std::string reason;
  };

  [[noreturn]] void serve(ReadyEvents& events);
  void receive_requests();
  void accept(const RequestFrame& frame);
  bool is_allowed(const Waiting& waiting) const;
  std::optional<ReadStatus> status_of(const Waiting& waiting, Clock::time_point now) const;
  bool answer_one();
  void answer(const Waiting& waiting, ReadStatus status);
  std::size_t send_piece(std::uint64_t offset, std::size_t size_bytes, bool more);
  std::size_t send_bytes(const void* data, std::size_t size_bytes, bool more);
  void check_end() const;
  Clock::time_point check_idle();
  void await_room(int error);

  PeerSocket socket_;
  const std::shared_ptr<Mapping> mapping_;
  const std::vector<int> slabs_;
  std::uint64_t slab_bytes_;
  const ControlBlock& control_;
  const std::uint64_t chunk_bytes_;
  const ChunkRanges allowed_;
  const std::chrono::nanoseconds stall_;
  bool copies_;
  const Wakeup wakeup_;
  std::atomic<bool> stopped_{false}, ran_{false};
  std::atomic<std::uint64_t> sent_bytes_{0};

  // The running thread's.
  Clock::time_point until_;
  std::function<void()> interrupted_;
  FrameBuffer<RequestFrame> frame_;
  std::deque<Waiting> waiting_;
  bool goes_on_ = false;           // the connection, without us
  std::uint64_t unreceived_ = 0;   // answers that the reader may not have, at most
  std::chrono::nanoseconds idle_{};
  Clock::time_point progress_at_;  // of sending, and of requests
};

}  // namespace fs
