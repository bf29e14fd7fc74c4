// A device that runs one thread block after the other: each of its threads is a context of its own, which runs until it
// waits for the others of its warp or block.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(threads, blocks)
#define __shared__ static

using std::max;
using std::min;

struct Index {
  int x, y, z;
};
inline Index threadIdx, blockIdx, gridDim, blockDim;

typedef std::array<unsigned, 4> Registers4;
typedef std::array<Registers4, 32> Registers;

class Block {
 public:
  enum State { kRuns, kAtWarp, kAtBlock, kEnded };

  Block(int threads, std::function<void()> kernel) : kernel_(std::move(kernel)), threads_(threads) {
    while (stacks_.size() < threads_.size()) stacks_.emplace_back(new char[kStackBytes]);
    for (std::size_t at = 0; at < threads_.size(); ++at) {
      ucontext_t& context = threads_[at].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_[at].get();
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = nullptr;
      makecontext(&context, &Block::begin, 0);
    }
  }

  void run() {
    present_ = this;
    while (any(kRuns)) {
      for (std::size_t first = 0; first < threads_.size(); first += 32)
        while (threads_[first].state == kRuns) run_warp(first, std::min(first + 32, threads_.size()));
      release_block();
    }
  }

  // Waits for the other threads.
  void wait(State state) {
    threads_[threadIdx.x].state = state;
    swapcontext(&threads_[threadIdx.x].context, &scheduler_);
  }

  // Registers of all lanes of the warp.
  Registers exchange(const Registers4& own) {
    const int lane = threadIdx.x % 32, first = threadIdx.x - lane;
    threads_[threadIdx.x].registers = own;
    wait(kAtWarp);
    Registers all{};
    for (int other = 0; other < 32; ++other) all[other] = threads_[first + other].registers;
    wait(kAtWarp);
    return all;
  }

  static Block& present() { return *present_; }

 private:
  static constexpr std::size_t kStackBytes = 1 << 16;

  struct Thread {
    ucontext_t context;
    State state = kRuns;
    Registers4 registers;
  };

  static void begin() {
    present_->kernel_();
    present_->wait(kEnded);
  }

  bool any(State state) const {
    return std::any_of(threads_.begin(), threads_.end(), [&](const Thread& one) { return one.state == state; });
  }

  void run_warp(std::size_t first, std::size_t end) {
    for (std::size_t at = first; at < end; ++at) {
      threadIdx = {static_cast<int>(at), 0, 0};
      swapcontext(&scheduler_, &threads_[at].context);
      if (threads_[at].state != threads_[first].state) {
        std::fprintf(stderr, "threads of one warp wait at different places\n");
        std::abort();
      }
    }
    for (std::size_t at = first; at < end; ++at)
      if (threads_[at].state == kAtWarp) threads_[at].state = kRuns;
  }

  void release_block() {
    for (Thread& thread : threads_)
      if (thread.state == kAtBlock) thread.state = kRuns;
  }

  inline static Block* present_ = nullptr;
  inline static std::vector<std::unique_ptr<char[]>> stacks_;  // of one block after the other
  std::function<void()> kernel_;
  std::vector<Thread> threads_;
  ucontext_t scheduler_;
};

inline Registers exchanged(const Registers4& own) { return Block::present().exchange(own); }

inline void __syncthreads() { Block::present().wait(Block::kAtBlock); }

inline void __syncwarp() { Block::present().wait(Block::kAtWarp); }

template <typename Number>
Number __shfl_sync(unsigned, Number number, int lane) {
  static_assert(sizeof(Number) == 4);
  Registers4 own{};
  std::memcpy(own.data(), &number, 4);
  const Registers all = exchanged(own);
  std::memcpy(&number, all[lane % 32].data(), 4);
  return number;
}

template <typename Number>
Number __shfl_xor_sync(unsigned all, Number number, int other) {
  return __shfl_sync(all, number, (threadIdx.x % 32) ^ other);
}

inline bool __any_sync(unsigned, bool here) {
  for (const Registers4& one : exchanged({here, 0, 0, 0}))
    if (one[0]) return true;
  return false;
}

#define __expf std::exp

inline float rsqrtf(float number) { return 1.0f / std::sqrt(number); }
