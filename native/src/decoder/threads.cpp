#include "threads.hpp"

#include <sched.h>

namespace fs {
namespace {

constexpr std::uint32_t kClosed = 0xFFFFFFFFu;  // no index of this generation can be claimed
constexpr int kSpins = 1000;                    // of `pause`, some 50 ns each

std::uint32_t generation_of(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket >> 32); }
std::uint64_t ticket_of(std::uint32_t generation, std::uint32_t index) {
  return (static_cast<std::uint64_t>(generation) << 32) | index;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard<std::mutex> held(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadTeam::share(std::uint32_t count, Call work, const void* body) {
  if (helpers_.empty())
    for (unsigned thread = 1; thread < threads_; ++thread) helpers_.emplace_back(&ThreadTeam::help, this, thread);
  const std::uint32_t generation = generation_of(ticket_.load(std::memory_order_relaxed));
  // Closed before the run is described: a claim under the old ticket fails from here on.
  ticket_.store(ticket_of(generation, kClosed));
  count_.store(count, std::memory_order_relaxed);
  call_.store(work, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(ticket_of(generation + 1, 0));
  if (sleepers_.load() != 0) {
    { const std::lock_guard<std::mutex> held(mutex_); }
    wake_.notify_all();
  }
  while (work_once(0)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) {
    if (spins < kSpins)
      pause();
    else
      sched_yield();  // whoever holds the last index may need this very core
  }
}

bool ThreadTeam::work_once(unsigned thread) {
  std::uint64_t ticket = ticket_.load();
  for (;;) {
    const auto index = static_cast<std::uint32_t>(ticket);
    if (index == kClosed || index >= count_.load(std::memory_order_relaxed)) return false;
    const Call work = call_.load(std::memory_order_relaxed);
    const void* const body = body_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
    work(body, index, thread);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }
}

void ThreadTeam::help(unsigned thread) {
  std::uint32_t seen = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    int spins = 0;
    while (spins < kSpins) {
      const std::uint32_t generation = generation_of(ticket_.load(std::memory_order_acquire));
      if (generation != seen) {
        seen = generation;
        while (work_once(thread)) {
        }
        spins = 0;
      }
      pause();
      ++spins;
    }
    sleep(seen);
  }
}

void ThreadTeam::sleep(std::uint32_t generation) {
  std::unique_lock<std::mutex> held(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(held, [&] { return stopping_.load() || generation_of(ticket_.load()) != generation; });
  sleepers_.fetch_sub(1);
}

}  // namespace fs
