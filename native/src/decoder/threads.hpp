// A few threads that share the rows of a matrix, hundreds of times a step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace fs {

// The caller is thread 0; helpers begin with the first run that needs them, which is after any fork of
// the process. A helper that the system does not run is not waited for: the others take its share.
// Helpers look out for work for some 50 us, about the longest pause within a step, then sleep.
class ThreadTeam {
 public:
  explicit ThreadTeam(unsigned threads) : threads_(threads == 0 ? 1 : threads) {}
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  unsigned threads() const { return threads_; }

  // body(index, thread) for each index below `count`, in any order; returns when all are done. The body
  // must not throw. One run at a time.
  template <class Body>
  void run(std::size_t count, const Body& body) {
    if (threads_ == 1 || count < 2) {
      for (std::size_t index = 0; index < count; ++index) body(index, 0u);
      return;
    }
    share(static_cast<std::uint32_t>(count), &invoke<Body>, &body);
  }

 private:
  using Call = void (*)(const void* body, std::size_t index, unsigned thread);
  template <class Body>
  static void invoke(const void* body, std::size_t index, unsigned thread) {
    (*static_cast<const Body*>(body))(index, thread);
  }

  void share(std::uint32_t count, Call work, const void* body);
  bool work_once(unsigned thread);
  void help(unsigned thread);
  void sleep(std::uint32_t generation);

  const unsigned threads_;
  std::vector<std::thread> helpers_;

  // Generation of the run in the upper half, next index in the lower. An index is claimed by compare
  // and swap of both, so a helper that comes late cannot claim from a run that it knows nothing of.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<std::uint32_t> done_{0};
  std::atomic<std::uint32_t> count_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> body_{nullptr};

  alignas(64) std::atomic<unsigned> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace fs
