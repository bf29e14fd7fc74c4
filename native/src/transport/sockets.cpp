#include "sockets.hpp"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
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
  sockaddr_storage theirs{};
  size = sizeof theirs;
  if (kind != SOCK_STREAM || ::getpeername(fd(), reinterpret_cast<sockaddr*>(&theirs), &size) < 0) {
    errno = ENOTCONN;
    throw_errno("a peer's socket");
  }
  flags_ = ::fcntl(fd(), F_GETFL);
  if (flags_ < 0 || ::fcntl(fd(), F_SETFL, flags_ | O_NONBLOCK) < 0) throw_errno("a peer's socket");
  if (theirs.ss_family != AF_INET && theirs.ss_family != AF_INET6) return;
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

bool PeerSocket::has_sent_all() const {
  int queued_bytes = 0;
  return ::ioctl(fd(), SIOCOUTQ, &queued_bytes) == 0 && queued_bytes == 0;
}

std::string seconds_text(std::chrono::nanoseconds time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  return text.substr(0, text.find('.') + 2) + " s";
}

// Only an address of this machine can be bound.
bool is_local(int fd) {
  sockaddr_storage theirs{};
  socklen_t size = sizeof theirs;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &size) < 0) return true;
  if (theirs.ss_family == AF_INET)
    reinterpret_cast<sockaddr_in&>(theirs).sin_port = 0;
  else if (theirs.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6&>(theirs).sin6_port = 0;
  else
    return true;
  const Descriptor tried(::socket(theirs.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (tried.get() < 0) return true;
  return ::bind(tried.get(), reinterpret_cast<const sockaddr*>(&theirs), size) == 0 || errno != EADDRNOTAVAIL;
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
