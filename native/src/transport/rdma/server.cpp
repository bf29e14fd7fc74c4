#include "server.hpp"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "../ready_events.hpp"

namespace fs::rdma {

namespace {

constexpr std::size_t kWaitingMax = 1 << 16;

Clock::time_point from_unix_ms(std::int64_t unix_ms) {
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch());
  const std::int64_t left_ms = std::clamp<std::int64_t>(unix_ms - now.count(), 0, std::int64_t{1} << 40);
  return Clock::now() + std::chrono::milliseconds(left_ms);
}

}  // namespace

Server::Server(int socket, std::shared_ptr<Memory> memory, const ControlBlock& control, std::uint64_t chunk_bytes,
               ChunkRanges allowed, Timing timing)
    : memory_(std::move(memory)),
      control_(control),
      chunk_bytes_(chunk_bytes),
      allowed_(std::move(allowed)),
      channel_(socket, timing) {
  if (chunk_bytes == 0) throw std::invalid_argument("chunks of no bytes");
}

void Server::stop() {
  stopping_.store(true);
  wakeup_.set();
}

std::string Server::run(std::int64_t until_unix_ms, const std::function<void()>& interrupted) {
  const auto ends = from_unix_ms(until_unix_ms);
  try {
    QueuePair pair(*memory_, QueuePair::Role::kIsRead, 1);
    channel_.accept_reader(pair, *memory_);
    return serve(ends, interrupted);
  } catch (const Closed&) {
    return "closed";
  }
}

std::string Server::serve(Clock::time_point ends, const std::function<void()>& interrupted) {
  ReadyEvents events(control_);
  while (!stopping_.load()) {
    if (Clock::now() >= ends) return "expired";
    channel_.pump([this](const Message& message) { heard(message); });
    waiting_.empty() ? events.sleep() : events.watch();  // before the look at what is ready
    answer();
    auto until = std::min(channel_.next_due(), ends);
    for (const Waiting& waiting : waiting_) until = std::min(until, waiting.until);
    const short wanted = channel_.wants_to_write() ? POLLIN | POLLOUT : POLLIN;
    await_socket(channel_.fd(), wanted, wakeup_.fd(), waiting_.empty() ? -1 : events.fd(), until, interrupted);
  }
  return "stopped";
}

void Server::heard(const Message& message) {
  if (message.kind != Kind::kAsk)
    throw Lost("the reader sent a message of kind " + std::to_string(static_cast<std::uint32_t>(message.kind)));
  if (waiting_.size() >= kWaitingMax)
    throw Lost("the reader waits for more than " + std::to_string(kWaitingMax) + " ranges");
  const std::uint64_t end = memory_->end();
  if (message.size_bytes == 0 || message.offset >= end || message.size_bytes > end - message.offset)
    throw Lost("the reader asked for bytes that there are not");
  waiting_.push_back(Waiting{message, Clock::now() + std::chrono::milliseconds(message.wait_ms)});
}

bool Server::is_allowed(std::uint64_t first, std::uint64_t last) const {
  return std::any_of(allowed_.begin(), allowed_.end(),
                     [&](const auto& range) { return range.first <= first && last < range.second; });
}

std::optional<Kind> Server::answer_to(const Waiting& waiting, Clock::time_point now) const {
  const std::uint64_t first = waiting.asked.offset / chunk_bytes_;
  const std::uint64_t last = (waiting.asked.offset + waiting.asked.size_bytes - 1) / chunk_bytes_;
  if (last >= control_.chunk_count() || !is_allowed(first, last)) return Kind::kRefused;
  if (control_.all_ready(first, last)) return Kind::kReady;
  if (control_.state() == SegmentState::kFailed) return Kind::kGone;
  if (now >= waiting.until) return Kind::kNotReady;
  return std::nullopt;
}

void Server::answer() {
  const auto now = Clock::now();
  std::deque<Waiting> still;
  for (Waiting& waiting : waiting_) {
    if (const auto kind = answer_to(waiting, now)) {
      waiting.asked.kind = *kind;
      channel_.send(waiting.asked);
      if (*kind == Kind::kReady) ready_bytes_ += waiting.asked.size_bytes;
    } else {
      still.push_back(waiting);
    }
  }
  waiting_ = std::move(still);
}

}  // namespace fs::rdma
