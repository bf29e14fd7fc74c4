// Changes of a control block as an event that poll() sees beside a socket: futexes and sockets cannot be waited for together.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "../memory/control.hpp"
#include "sockets.hpp"

namespace fs {

// A thread waits on the block's futex, from the first wait on, and only while somebody waits.
class ReadyEvents {
 public:
  explicit ReadyEvents(const ControlBlock& control) : control_(control) {}
  ~ReadyEvents();
  ReadyEvents(const ReadyEvents&) = delete;

  // From here on each change sets the event, until sleep(). What was looked at before may have changed.
  void watch();
  void sleep();
  int fd() const { return event_.fd(); }

 private:
  void run();

  const ControlBlock& control_;
  const Wakeup event_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool watching_ = false, ending_ = false;
  std::thread thread_;
};

}  // namespace fs
