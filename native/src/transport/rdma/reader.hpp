// Reads ranges of a holder's region into the same ranges of one's own by RDMA READ. The holder's processor has no work
// with the bytes; it only says when a range is ready.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "../transport.hpp"
#include "channel.hpp"
#include "verbs.hpp"

namespace fs::rdma {

class Reader : public fs::Reader {
 public:
  // `memory`: where the ranges go. Connects over the socket, which stays the caller's. `stall_s`: how long reads may make
  // no progress. Lost, OsError, std::invalid_argument.
  Reader(int socket, std::shared_ptr<Memory> memory, Timing timing, double stall_s);
  Reader(const Reader&) = delete;
  // Once this has returned nothing writes into the memory any more.
  ~Reader() override;

  // A range must lie in one part of the memory.
  void submit(std::uint64_t request, std::uint64_t offset, std::uint64_t size_bytes, double wait_s) override;
  std::vector<Completion> poll(double timeout_s, const std::function<void()>& interrupted) override;
  void cancel() override;
  std::optional<std::string> error() const override;

 private:
  struct Request {
    std::uint64_t offset, size_bytes;
    std::uint32_t wait_ms;
    Clock::time_point answer_by;
    std::uint64_t posted = 0, arrived = 0;
    bool asked = false, reading = false;
  };
  struct Flight {
    std::uint64_t request, size_bytes;
  };

  void run();
  void step();
  void ask();
  void heard(const Message& message);
  void post_reads();
  void plan_reads(std::vector<ibv_sge>& places, std::vector<ibv_send_wr>& reads);
  void landed(const ibv_wc& completion);
  void finish_arrived();
  void check_progress() const;
  void finish(std::uint64_t request, ReadStatus status, std::uint64_t checksum = 0);
  void lose(const std::string& reason);
  const RemotePart& remote_part(std::uint64_t offset) const;

  std::shared_ptr<Memory> memory_;
  SideChannel channel_;
  std::optional<QueuePair> pair_;
  std::vector<RemotePart> remote_;
  const Wakeup wakeup_;
  Clock::duration stall_;

  // The thread's.
  std::deque<Flight> flights_;  // in the order of their completions
  std::deque<std::uint64_t> to_read_, arrived_;
  Clock::time_point progressed_;

  mutable std::mutex mutex_;  // of what follows, up to the empty line
  std::condition_variable finished_;
  std::unordered_map<std::uint64_t, Request> requests_;
  std::deque<std::uint64_t> to_ask_;
  std::vector<Completion> done_;
  std::optional<std::string> error_;
  bool cancelled_ = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fs::rdma
