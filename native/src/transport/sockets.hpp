// Sockets of peers: their options, and a wake-up for who waits on one.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

#include "../memory/segment.hpp"

namespace fs {

using Clock = std::chrono::steady_clock;

std::chrono::nanoseconds seconds_of(double seconds);
std::string seconds_text(std::chrono::nanoseconds time);

// A duplicate of a connected stream socket, non-blocking, which notices a peer whose machine is gone: within some
// seconds while nothing is sent, within `stall_s` while something is. Whoever else has the socket does not use it meanwhile.
class PeerSocket {
 public:
  // OsError, std::invalid_argument.
  PeerSocket(int fd, double stall_s);
  int fd() const { return descriptor_.get(); }
  // From how many bytes on a wait ends: one for each few of them would cost more than the bytes.
  void expect(std::size_t size_bytes);
  // As others like it.
  void give_back();
  void shut_down() const;
  // Whether the peer's machine has acknowledged all bytes; asked before shut_down(), whose end counts as one.
  bool has_sent_all() const;

 private:
  Descriptor descriptor_;
  int flags_ = 0;
  std::size_t expected_ = 1;
};

// Whether the peer has an address of this machine, or none: what is sent then stays here, and pages that are sent without
// a copy are the peer's queue's, too, after it acknowledged them. True where it cannot be told; false for another network
// namespace of this machine, which looks like another machine from here.
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
