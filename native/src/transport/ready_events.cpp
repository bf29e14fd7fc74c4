#include "ready_events.hpp"

namespace fs {
namespace {

// The thread looks so often whether it is to end.
constexpr std::int64_t kSliceNs = 50'000'000;

}  // namespace

ReadyEvents::~ReadyEvents() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ReadyEvents::watch() {
  event_.clear();
  const std::lock_guard lock(mutex_);
  if (watching_) return;
  watching_ = true;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

void ReadyEvents::sleep() {
  const std::lock_guard lock(mutex_);
  watching_ = false;
}

void ReadyEvents::run() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return watching_ || ending_; });
      if (ending_) return;
    }
    // Set first: between watch() and here something may have changed.
    const std::uint32_t seen = control_.event();
    event_.set();
    while (!control_.await_event(seen, kSliceNs)) {
      const std::lock_guard lock(mutex_);
      if (!watching_ || ending_) break;
    }
  }
}

}  // namespace fs
