// Sockets of peers: their options, and a wake-up for who waits on one.
#pragma once

#include <chrono>
#include <functional>

#include "../memory/segment.hpp"

namespace fs {

using Clock = std::chrono::steady_clock;

std::chrono::nanoseconds seconds_of(double seconds);

// A duplicate of a connected stream socket, non-blocking, which notices a peer whose machine is gone: within some
// seconds while nothing is sent, within `stall_s` while something is. OsError. Whoever else has the socket no longer uses it.
Descriptor own_socket(int fd, double stall_s);

// Whether both ends have one address, or are no internet sockets at all: what is sent never leaves this machine.
bool is_local(int fd);

// An event that one thread sets and another one's poll() sees.
class Wakeup {
 public:
  Wakeup();
  int fd() const { return descriptor_.get(); }
  void set() const;
  void clear() const;

 private:
  Descriptor descriptor_;
};

// Waits for `events` on the socket, or for one of the wake-ups (-1: none), until then; true if the socket is ready.
// Calls `interrupted` after a signal; it may throw. OsError.
bool await_socket(int fd, short events, int wakeup, int other_wakeup, Clock::time_point until,
                  const std::function<void()>& interrupted);

}  // namespace fs
