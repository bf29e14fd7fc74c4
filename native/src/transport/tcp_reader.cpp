#include "tcp_reader.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "../memory/errors.hpp"

namespace fs {
namespace {

// Received at once, then hashed while the caches hold it. Each call tells the peer of the room that it made, so that pieces
// of 128 KiB cost a tenth more processor time than these at both ends; those of 1 MiB cost about as much.
constexpr std::size_t kPieceBytes = 512 * 1024;
// A wait ends when so much is there: earlier would be often, later would let the peer's buffer run full.
constexpr std::size_t kExpectedBytes = 256 * 1024;
// A peer that brings less than this (or the rest of an answer) within `stall_s` is as bad as one that brings nothing.
constexpr std::size_t kProgressBytes = 64 * 1024;

// What is wrong with the peer, as a reason for the connection's end.
class PeerFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One thread at a time.
class Polling {
 public:
  explicit Polling(std::atomic<bool>& polling) : polling_(polling) {
    if (polling.exchange(true)) throw NativeError("another thread polls this connection");
  }
  ~Polling() { polling_ = false; }
  Polling(const Polling&) = delete;

 private:
  std::atomic<bool>& polling_;
};

}  // namespace

TcpReader::TcpReader(int fd, std::shared_ptr<Mapping> region, double stall_s)
    : socket_(fd, stall_s),
      mapping_(std::move(region)),
      stall_(seconds_of(stall_s)),
      progress_at_(Clock::now()) {
  if (mapping_ != nullptr && mapping_->access() != Access::kOwner)
    throw std::invalid_argument("only the owner of a region can receive into it");
}

void TcpReader::submit(std::uint64_t request, std::uint64_t offset, std::uint64_t size_bytes, double wait_s) {
  if (mapping_ == nullptr) throw std::invalid_argument("a reader without a region is told where the bytes go");
  submit_to(mapping_->range(offset, size_bytes), request, offset, size_bytes, wait_s);
}

void TcpReader::submit_to(std::byte* destination, std::uint64_t request, std::uint64_t offset, std::uint64_t size_bytes,
                          double wait_s) {
  if (size_bytes == 0 || size_bytes > kRequestMaxBytes)
    throw std::invalid_argument(std::to_string(size_bytes) + " bytes: a request is for 1 to " +
                                std::to_string(kRequestMaxBytes));
  const std::chrono::nanoseconds wait = seconds_of(wait_s);
  const auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
  if (wait_ms > kWaitMaxMs) throw std::invalid_argument("a peer waits for " + std::to_string(kWaitMaxMs / 1000) + " s at most");
  const std::lock_guard lock(mutex_);
  check_usable();
  if (pending_.count(request) != 0)
    throw std::invalid_argument("request " + std::to_string(request) + " is outstanding already");
  if (pending_.size() == kOutstandingMax)
    throw NativeError(std::to_string(kOutstandingMax) + " requests are outstanding: poll first");
  const Clock::time_point now = Clock::now();
  if (pending_.empty()) progress_at_ = now;
  RequestFrame frame;
  frame.request = request;
  frame.offset = offset;
  frame.size_bytes = size_bytes;
  frame.wait_ms = static_cast<std::uint32_t>(wait_ms);
  send(frame);
  pending_.emplace(request, Pending{destination, static_cast<std::size_t>(size_bytes), now + wait});
}

void TcpReader::check_usable() const {
  if (error_) throw NativeError("the connection to the peer has failed: " + *error_);
  if (cancelled_) throw NativeError("the connection to the peer was cancelled");
  if (released_) throw NativeError("the connection to the peer was released");
}

// All that may be outstanding fits into the socket's buffer, so that this never waits. What fails here shows in poll().
void TcpReader::send(RequestFrame frame) {
  frame.outstanding = static_cast<std::uint32_t>(pending_.size());
  ssize_t sent = 0;
  do sent = ::send(socket_.fd(), &frame, sizeof frame, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  if (sent == sizeof frame) return;
  // A frame that was cut off cannot be mended. The peer's last bytes, which say more, may still be received.
  socket_.shut_down();
}

std::vector<Completion> TcpReader::poll(double timeout_s, const std::function<void()>& interrupted) {
  const Clock::time_point until = Clock::now() + seconds_of(timeout_s);
  const Polling polling(polling_);
  std::vector<Completion> completed;
  if (released_) return completed;
  try {
    for (;;) {
      const bool idle = receive(completed);
      if (!completed.empty()) break;
      const auto stalls = stalls_at();
      if (!idle || !stalls) break;  // failed, or nothing is outstanding
      const Clock::time_point now = Clock::now();
      if (now >= *stalls) throw PeerFault("it brought nothing for " + seconds_text(stall_) + ", or next to nothing");
      if (now >= until) break;
      socket_.expect(body_ ? std::min(body_->size_bytes - body_->done, kExpectedBytes) : frame_.missing_bytes());
      await_socket(socket_.fd(), POLLIN, wakeup_.fd(), -1, std::min(until, *stalls), interrupted);
    }
  } catch (const PeerFault& fault) {
    fail(fault.what(), completed);
  }
  return completed;
}

// Receives until an answer is complete, or until nothing more is there now: true.
bool TcpReader::receive(std::vector<Completion>& completed) {
  while (completed.empty()) {
    if (cancelled_) throw PeerFault("it was cancelled");
    if (!(body_ ? receive_body(completed) : receive_frame(completed))) return true;
  }
  return false;
}

bool TcpReader::receive_frame(std::vector<Completion>& completed) {
  const std::size_t got = receive_some(frame_.free(), frame_.missing_bytes());
  if (got > 0 && frame_.empty()) restart_stall();
  frame_.add(got);
  if (frame_.missing_bytes() == 0) begin_answer(frame_.take(), completed);
  return got > 0;
}

void TcpReader::begin_answer(const AnswerFrame& answer, std::vector<Completion>& completed) {
  if (answer.magic != kAnswerMagic || answer.version != kFrameVersion)
    throw PeerFault("it sent no answer of version " + std::to_string(kFrameVersion));
  const std::string what = "its answer to request " + std::to_string(answer.request);
  Pending pending{};
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(answer.request);
    if (found == pending_.end()) throw PeerFault(what + ", which is not outstanding");
    pending = found->second;
  }
  if (answer.status > static_cast<std::uint16_t>(ReadStatus::kRefused))
    throw PeerFault(what + " has the status " + std::to_string(answer.status));
  const auto status = static_cast<ReadStatus>(answer.status);
  const std::size_t expected = status == ReadStatus::kOk ? pending.size_bytes : 0;
  if (answer.size_bytes != expected)
    throw PeerFault(what + " has " + std::to_string(answer.size_bytes) + " bytes, expected are " +
                    std::to_string(expected));
  if (status != ReadStatus::kOk) return finish({answer.request, status, 0}, completed);
  body_.emplace(answer.request, pending);
  restart_stall();
}

bool TcpReader::receive_body(std::vector<Completion>& completed) {
  Body& body = *body_;
  const std::size_t got =
      receive_some(body.destination + body.done, std::min(kPieceBytes, body.size_bytes - body.done));
  if (got == 0) return false;
  body.done += got;
  body.hash.advance(body.done);
  note_progress(got);
  if (body.done == body.size_bytes) finish({body.request, ReadStatus::kOk, body.hash.digest()}, completed);
  return true;
}

void TcpReader::finish(const Completion& completion, std::vector<Completion>& completed) {
  completed.push_back(completion);
  body_.reset();
  fresh_bytes_ = 0;
  const std::lock_guard lock(mutex_);
  progress_at_ = Clock::now();
  pending_.erase(completion.request);
  if (!pending_.empty()) return;  // the next request will say so
  RequestFrame frame;
  frame.kind = kReceived;
  send(frame);
}

// Nothing if nothing is there now.
std::size_t TcpReader::receive_some(std::byte* to, std::size_t size_bytes) {
  for (;;) {
    const ssize_t got = ::recv(socket_.fd(), to, size_bytes, MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    std::string reason = got == 0 ? "it closed the connection" : std::generic_category().message(errno);
    if (cancelled_) reason = "it was cancelled";
    if (body_)
      reason += " after " + std::to_string(body_->done) + " of " + std::to_string(body_->size_bytes) + " bytes of request " +
                std::to_string(body_->request);
    throw PeerFault(reason);
  }
}

void TcpReader::note_progress(std::size_t size_bytes) {
  fresh_bytes_ += size_bytes;
  if (fresh_bytes_ >= kProgressBytes) restart_stall();
}

void TcpReader::restart_stall() {
  fresh_bytes_ = 0;
  const std::lock_guard lock(mutex_);
  progress_at_ = Clock::now();
}

// When the peer must have brought something; nothing if nothing is outstanding.
std::optional<Clock::time_point> TcpReader::stalls_at() const {
  const std::lock_guard lock(mutex_);
  if (pending_.empty()) return std::nullopt;
  Clock::time_point since = progress_at_;
  if (!body_ && frame_.empty()) {  // it may be waiting, for us, for chunks of its own
    Clock::time_point first = pending_.begin()->second.answer_by;
    for (const auto& [request, pending] : pending_) first = std::min(first, pending.answer_by);
    since = std::max(since, first);
  }
  return since + stall_;
}

void TcpReader::fail(const std::string& reason, std::vector<Completion>& completed) {
  body_.reset();
  socket_.shut_down();
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = reason;
  for (const auto& [request, pending] : pending_) completed.push_back({request, ReadStatus::kFailed, 0});
  pending_.clear();
}

void TcpReader::release() {
  const Polling polling(polling_);
  const std::lock_guard lock(mutex_);
  check_usable();
  if (!pending_.empty()) throw NativeError(std::to_string(pending_.size()) + " requests are outstanding: poll first");
  socket_.give_back();
  released_ = true;
}

void TcpReader::cancel() {
  const std::lock_guard lock(mutex_);
  if (released_) return;
  cancelled_ = true;
  wakeup_.set();
  socket_.shut_down();
}

std::optional<std::string> TcpReader::error() const {
  const std::lock_guard lock(mutex_);
  if (!error_ && cancelled_) return "it was cancelled";
  return error_;
}

}  // namespace fs
