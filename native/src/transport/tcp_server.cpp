#include "tcp_server.hpp"

#include <poll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "../memory/errors.hpp"

namespace fs {
namespace {

// Between two looks whether to stop.
constexpr std::size_t kPieceBytes = 1024 * 1024;

bool is_end(int error) { return error == EPIPE || error == ECONNRESET; }

// Slabs are of one size.
std::uint64_t slab_size(const Region& region) {
  if (region.fds().empty()) return region.mapping()->size_bytes();
  struct stat status {};
  if (::fstat(region.fds().front(), &status) < 0) throw_errno("fstat of a slab");
  return static_cast<std::uint64_t>(status.st_size);
}

}  // namespace

// Sending out of the slabs' files saves the copy into the socket's buffers. Where the bytes stay on this machine the
// reader then copies them from memory page by page, and finds nothing in a cache: dearer on an EPYC (0.53 against 0.40 s
// of processor time for a GB, both ends), on a Xeon a little cheaper (0.33 against 0.35). And it keeps the pages for as
// long as it likes, in its own queue.
TcpServer::TcpServer(int fd, const Region& region, const ControlBlock& control, std::uint64_t chunk_bytes,
                     ChunkRanges allowed, double stall_s)
    : socket_(fd, stall_s),
      mapping_(region.mapping()),
      slabs_(region.fds()),
      slab_bytes_(slab_size(region)),
      control_(control),
      chunk_bytes_(chunk_bytes),
      allowed_(std::move(allowed)),
      stall_(seconds_of(stall_s)),
      copies_(slabs_.empty() || is_local(socket_.fd())) {
  if (chunk_bytes == 0) throw std::invalid_argument("chunk_bytes must not be 0");
  for (const auto& [begin, end] : allowed_)
    if (begin > end || end > control.chunk_count())
      throw std::invalid_argument("chunks " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                                  std::to_string(control.chunk_count()));
}

std::string TcpServer::run(std::int64_t until_unix_ms, double idle_s, const std::function<void()>& interrupted) {
  if (ran_.exchange(true)) throw NativeError("a connection is served once");
  const auto now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::system_clock::now().time_since_epoch()).count();
  // An hour or a year are the same to what is bounded by a connection; sums must not wrap.
  const std::int64_t left_ms = until_unix_ms <= now_ms ? 0 : std::min<std::int64_t>(until_unix_ms - now_ms, 1'000'000'000);
  until_ = Clock::now() + std::chrono::milliseconds(left_ms);
  idle_ = seconds_of(idle_s);
  progress_at_ = Clock::now();
  interrupted_ = interrupted;
  struct Closing {
    TcpServer& server;
    ~Closing() {
      // What the reader has not received is still read from these pages, by the kernel; and a reader may say that it has
      // received what is in the socket's queue yet.
      if (!server.copies_ && (server.unreceived_ > 0 || !server.socket_.has_sent_all()))
        server.mapping_->never_reuse();
      if (server.goes_on_)
        server.socket_.give_back();
      else
        server.socket_.shut_down();
    }
  } closing{*this};
  try {
    ReadyEvents events(control_);
    serve(events);
  } catch (const End& end) {
    return end.reason;
  }
}

void TcpServer::serve(ReadyEvents& events) {
  for (;;) {
    check_end();
    receive_requests();
    if (answer_one()) continue;
    Clock::time_point until = until_;
    if (waiting_.empty()) {
      events.sleep();
      until = std::min(until, check_idle());
    } else {
      events.watch();
      if (answer_one()) continue;  // ready since the first look
      for (const Waiting& waiting : waiting_) until = std::min(until, waiting.until);
    }
    const int ready = waiting_.empty() ? -1 : events.fd();
    await_socket(socket_.fd(), POLLIN, wakeup_.fd(), ready, until, interrupted_);
  }
}

void TcpServer::check_end() const {
  if (stopped_) throw End{"stopped"};
  if (Clock::now() >= until_) throw End{"expired"};
}

// With nothing to answer: when that becomes too long.
Clock::time_point TcpServer::check_idle() {
  const bool received = unreceived_ == 0 && frame_.empty();
  const Clock::time_point until = progress_at_ + (received ? idle_ : stall_);
  if (Clock::now() < until) return until;
  if (!received) throw TimedOut("the reader has not received what was sent to it for " + seconds_text(stall_));
  goes_on_ = true;
  throw End{"idle"};
}

void TcpServer::receive_requests() {
  for (;;) {
    const ssize_t got = ::recv(socket_.fd(), frame_.free(), frame_.missing_bytes(), MSG_DONTWAIT);
    if (got == 0) throw End{"closed"};
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      if (is_end(errno)) throw End{"closed"};
      throw_errno("receiving from a reader");
    }
    frame_.add(static_cast<std::size_t>(got));
    if (frame_.missing_bytes() == 0) accept(frame_.take());
  }
}

void TcpServer::accept(const RequestFrame& frame) {
  if (frame.magic != kRequestMagic || frame.version != kFrameVersion)
    throw NativeError("the reader sent no request of version " + std::to_string(kFrameVersion));
  if (frame.outstanding < waiting_.size() || frame.outstanding - waiting_.size() > unreceived_)
    throw NativeError("the reader has " + std::to_string(frame.outstanding) + " requests outstanding, it says; " +
                      std::to_string(waiting_.size()) + " wait, and " + std::to_string(unreceived_) +
                      " answers are on their way");
  unreceived_ = frame.outstanding - waiting_.size();
  progress_at_ = Clock::now();
  if (frame.kind == kReceived) return;
  goes_on_ = frame.kind == kLeave && frame.outstanding == 0;
  if (goes_on_) throw End{"left"};
  const std::string what = "the reader's request " + std::to_string(frame.request);
  if (frame.kind != kRead || frame.wait_ms > kWaitMaxMs || frame.size_bytes == 0 ||
      frame.size_bytes > kRequestMaxBytes)
    throw NativeError(what + " is none: kind " + std::to_string(frame.kind) + ", " + std::to_string(frame.size_bytes) +
                      " bytes, a wait of " + std::to_string(frame.wait_ms) + " ms");
  if (waiting_.size() == kOutstandingMax)
    throw NativeError(what + " is one more than the " + std::to_string(kOutstandingMax) + " that may be outstanding");
  waiting_.push_back({frame.request, frame.offset, frame.size_bytes,
                      Clock::now() + std::chrono::milliseconds(frame.wait_ms)});
}

bool TcpServer::is_allowed(const Waiting& waiting) const {
  const std::uint64_t whole = mapping_->size_bytes();
  if (waiting.offset >= whole || waiting.size_bytes > whole - waiting.offset) return false;
  const std::uint64_t first = waiting.offset / chunk_bytes_;
  const std::uint64_t last = (waiting.offset + waiting.size_bytes - 1) / chunk_bytes_;
  if (last >= control_.chunk_count()) return false;
  for (std::uint64_t chunk = first; chunk <= last;) {
    const auto range = std::find_if(allowed_.begin(), allowed_.end(), [&](const auto& one) {
      return one.first <= chunk && chunk < one.second;
    });
    if (range == allowed_.end()) return false;
    chunk = range->second;
  }
  return true;
}

// Nothing: it goes on waiting.
std::optional<ReadStatus> TcpServer::status_of(const Waiting& waiting, Clock::time_point now) const {
  if (!is_allowed(waiting)) return ReadStatus::kRefused;
  const std::uint64_t last = (waiting.offset + waiting.size_bytes - 1) / chunk_bytes_;
  if (control_.all_ready(waiting.offset / chunk_bytes_, last)) return ReadStatus::kOk;
  if (control_.state() == SegmentState::kFailed) return ReadStatus::kGone;
  if (now >= waiting.until) return ReadStatus::kNotReady;
  return std::nullopt;
}

// The first request that needs to wait no longer.
bool TcpServer::answer_one() {
  const Clock::time_point now = Clock::now();
  for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
    const auto status = status_of(*at, now);
    if (!status) continue;
    const Waiting waiting = *at;
    waiting_.erase(at);
    answer(waiting, *status);
    return true;
  }
  return false;
}

void TcpServer::answer(const Waiting& waiting, ReadStatus status) {
  const bool ok = status == ReadStatus::kOk;
  AnswerFrame frame;
  frame.status = static_cast<std::uint16_t>(status);
  frame.request = waiting.request;
  frame.size_bytes = ok ? waiting.size_bytes : 0;
  ++unreceived_;
  progress_at_ = Clock::now();
  const auto* const header = reinterpret_cast<const std::byte*>(&frame);
  for (std::size_t done = 0; done < sizeof frame;) done += send_bytes(header + done, sizeof frame - done, ok);
  for (std::uint64_t done = 0; done < frame.size_bytes;) {
    check_end();
    const std::uint64_t offset = waiting.offset + done;
    const std::uint64_t left = std::min(frame.size_bytes - done, slab_bytes_ - offset % slab_bytes_);
    const std::size_t size_bytes = std::min<std::uint64_t>(left, kPieceBytes);
    const std::size_t sent = send_piece(offset, size_bytes, size_bytes < frame.size_bytes - done);
    done += sent;
    sent_bytes_ += sent;
  }
}

std::size_t TcpServer::send_piece(std::uint64_t offset, std::size_t size_bytes, bool more) {
  if (copies_) return send_bytes(mapping_->range(offset, size_bytes), size_bytes, more);
  auto inside = static_cast<off_t>(offset % slab_bytes_);
  const ssize_t sent = ::sendfile(socket_.fd(), slabs_[offset / slab_bytes_], &inside, size_bytes);
  if (sent < 0 && (errno == EINVAL || errno == ENOSYS)) {  // reserved huge pages are a file that cannot be sent
    copies_ = true;
    return 0;
  }
  if (sent > 0) {
    progress_at_ = Clock::now();
    return static_cast<std::size_t>(sent);
  }
  await_room(sent < 0 ? errno : EIO);
  return 0;
}

std::size_t TcpServer::send_bytes(const void* data, std::size_t size_bytes, bool more) {
  const int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0);
  const ssize_t sent = ::send(socket_.fd(), data, size_bytes, flags);
  if (sent > 0) {
    progress_at_ = Clock::now();
    return static_cast<std::size_t>(sent);
  }
  await_room(errno);
  return 0;
}

// After a send that ended with that error.
void TcpServer::await_room(int error) {
  if (is_end(error)) throw End{"closed"};
  if (error != EAGAIN && error != EWOULDBLOCK && error != EINTR) {
    errno = error;
    throw_errno("sending to a reader");
  }
  const Clock::time_point stalls = progress_at_ + stall_;
  await_socket(socket_.fd(), POLLOUT, wakeup_.fd(), -1, std::min(until_, stalls), interrupted_);
  check_end();
  if (Clock::now() >= stalls)
    throw TimedOut("the reader took nothing for " + seconds_text(stall_));
}

void TcpServer::stop() {
  stopped_ = true;
  wakeup_.set();
}

}  // namespace fs
