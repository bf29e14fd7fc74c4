#include "sockets.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "../memory/errors.hpp"

namespace fs {
namespace {

// A peer that is idle is asked after so long, so often; a machine that is gone is noticed after the sum.
constexpr int kIdleS = 2, kIntervalS = 2, kProbes = 3;
constexpr double kSecondsMax = 1e6;
// Between two looks at the clock of a wait that has longer.
constexpr std::chrono::milliseconds kPollMost{1000};

void set_option(int fd, int level, int name, int value) {
  if (::setsockopt(fd, level, name, &value, sizeof value) < 0) throw_errno("options of a peer's socket");
}

struct Ends {
  sockaddr_storage ours{}, theirs{};
};

bool ends_of(int fd, Ends& ends) {
  socklen_t ours = sizeof ends.ours, theirs = sizeof ends.theirs;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&ends.ours), &ours) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&ends.theirs), &theirs) == 0;
}

}  // namespace

std::chrono::nanoseconds seconds_of(double seconds) {
  if (!std::isfinite(seconds)) throw std::invalid_argument("a number of seconds is needed: every wait ends");
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(seconds, 0.0, kSecondsMax) * 1e9));
}

PeerSocket::PeerSocket(int fd_, double stall_s) : descriptor_(::fcntl(fd_, F_DUPFD_CLOEXEC, 0)) {
  if (fd() < 0) throw_errno("a peer's socket");
  const auto stall = std::chrono::duration_cast<std::chrono::milliseconds>(seconds_of(stall_s));
  if (stall.count() <= 0) throw std::invalid_argument("stall_s must be more than nothing");
  int kind = 0;
  socklen_t size = sizeof kind;
  if (::getsockopt(fd(), SOL_SOCKET, SO_TYPE, &kind, &size) < 0) throw_errno("a peer's socket");
  Ends ends;
  if (kind != SOCK_STREAM || !ends_of(fd(), ends)) {
    errno = ENOTCONN;
    throw_errno("a peer's socket");
  }
  flags_ = ::fcntl(fd(), F_GETFL);
  if (flags_ < 0 || ::fcntl(fd(), F_SETFL, flags_ | O_NONBLOCK) < 0) throw_errno("a peer's socket");
  if (ends.ours.ss_family != AF_INET && ends.ours.ss_family != AF_INET6) return;
  set_option(fd(), IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd(), IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
  set_option(fd(), IPPROTO_TCP, TCP_KEEPINTVL, kIntervalS);
  set_option(fd(), IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set_option(fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(stall.count()));
}

void PeerSocket::expect(std::size_t size_bytes) {
  if (size_bytes == expected_) return;
  const int least = static_cast<int>(size_bytes);
  if (::setsockopt(fd(), SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least) == 0) expected_ = size_bytes;
}

void PeerSocket::give_back() {
  expect(1);
  ::fcntl(fd(), F_SETFL, flags_);
}

void PeerSocket::shut_down() const { ::shutdown(fd(), SHUT_RDWR); }

std::string seconds_text(std::chrono::nanoseconds time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  return text.substr(0, text.find('.') + 2) + " s";
}

bool is_local(int fd) {
  Ends ends;
  if (!ends_of(fd, ends)) return false;
  if (ends.ours.ss_family == AF_INET) {
    const auto& ours = reinterpret_cast<const sockaddr_in&>(ends.ours);
    return ours.sin_addr.s_addr == reinterpret_cast<const sockaddr_in&>(ends.theirs).sin_addr.s_addr;
  }
  if (ends.ours.ss_family == AF_INET6) {
    const auto& ours = reinterpret_cast<const sockaddr_in6&>(ends.ours);
    const auto& theirs = reinterpret_cast<const sockaddr_in6&>(ends.theirs);
    return std::memcmp(&ours.sin6_addr, &theirs.sin6_addr, sizeof ours.sin6_addr) == 0;
  }
  return true;
}

Wakeup::Wakeup() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd() < 0) throw_errno("an eventfd");
}

void Wakeup::set() const {
  const std::uint64_t one = 1;
  while (::write(fd(), &one, sizeof one) < 0 && errno == EINTR) continue;
}

void Wakeup::clear() const {
  std::uint64_t count = 0;
  while (::read(fd(), &count, sizeof count) < 0 && errno == EINTR) continue;
}

bool await_socket(int fd, short events, int wakeup, int other_wakeup, Clock::time_point until,
                  const std::function<void()>& interrupted) {
  pollfd waited[] = {{fd, events, 0}, {wakeup, POLLIN, 0}, {other_wakeup, POLLIN, 0}};
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    const auto slice = std::clamp(left, std::chrono::milliseconds(0), kPollMost);
    const int ready = ::poll(waited, 3, static_cast<int>(slice.count()));
    if (ready > 0) return waited[0].revents != 0;
    if (ready < 0 && errno != EINTR) throw_errno("waiting for a peer");
    if (ready < 0 || slice == kPollMost) interrupted();
    if (left.count() <= 0 || (ready == 0 && left == slice)) return false;
  }
}

}  // namespace fs
