// Reads ranges from a peer over one TCP connection, into the region that it was made with.
#pragma once

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "../memory/checksum.hpp"
#include "../memory/segment.hpp"
#include "frames.hpp"
#include "sockets.hpp"
#include "transport.hpp"

namespace fs {

// submit(), cancel() and error() may be called while another thread polls; one thread polls at a time.
class TcpReader : public Reader {
 public:
  // `fd`: a connected socket whose peer knows who we are; it is duplicated. `stall_s`: how long the peer may bring nothing.
  // OsError, std::invalid_argument unless the region is its owner's.
  // Without a region only submit_to() is of use.
  TcpReader(int fd, std::shared_ptr<Mapping> region, double stall_s);
  TcpReader(const TcpReader&) = delete;

  // The same, to memory that stays where it is until the request has completed, or until cancel() and poll() have returned.
  void submit_to(std::byte* destination, std::uint64_t request, std::uint64_t offset, std::uint64_t size_bytes,
                 double wait_s);
  void submit(std::uint64_t request, std::uint64_t offset, std::uint64_t size_bytes, double wait_s) override;
  std::vector<Completion> poll(double timeout_s, const std::function<void()>& interrupted) override;
  void cancel() override;
  // Leaves the connection, which is sound and has nothing outstanding, to who uses it next: this reads no more. NativeError.
  void release();
  std::optional<std::string> error() const override;

 private:
  struct Pending {
    std::byte* destination;
    std::size_t size_bytes;
    Clock::time_point answer_by;  // when the peer's wait is over
  };
  // An answer whose bytes are arriving.
  struct Body {
    Body(std::uint64_t number, const Pending& pending)
        : request(number), destination(pending.destination), size_bytes(pending.size_bytes), hash(destination, size_bytes) {}
    std::uint64_t request;
    std::byte* destination;
    std::size_t size_bytes;
    std::size_t done = 0;
    Xxh3 hash;
  };

  void send(RequestFrame frame);
  void check_usable() const;
  bool receive(std::vector<Completion>& completed);
  bool receive_frame(std::vector<Completion>& completed);
  bool receive_body(std::vector<Completion>& completed);
  void begin_answer(const AnswerFrame& answer, std::vector<Completion>& completed);
  void finish(const Completion& completion, std::vector<Completion>& completed);
  std::size_t receive_some(std::byte* to, std::size_t size_bytes);
  void note_progress(std::size_t size_bytes);
  void restart_stall();
  std::optional<Clock::time_point> stalls_at() const;
  void fail(const std::string& reason, std::vector<Completion>& completed);

  PeerSocket socket_;
  const std::shared_ptr<Mapping> mapping_;
  const std::chrono::nanoseconds stall_;
  const Wakeup wakeup_;
  std::atomic<bool> cancelled_{false}, released_{false}, polling_{false};

  mutable std::mutex mutex_;  // of what follows, up to the empty line
  std::unordered_map<std::uint64_t, Pending> pending_;
  std::optional<std::string> error_;
  Clock::time_point progress_at_;

  // The polling thread's.
  FrameBuffer<AnswerFrame> frame_;
  std::optional<Body> body_;
  std::size_t fresh_bytes_ = 0;  // since progress was noted
};

}  // namespace fs
