#include "reader.hpp"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "../../memory/checksum.hpp"

namespace fs::rdma {

namespace {

// Reads under way at once, and the size of each: enough for a fast link at the length of a data centre, and small enough
// that a range which is no longer wanted holds nothing up.
constexpr std::uint32_t kDepth = 64;
constexpr std::uint64_t kReadBytes = 1 << 20;
constexpr std::size_t kOutstandingMax = 1 << 14;
constexpr double kWaitMaxS = 3600;
constexpr std::chrono::milliseconds kSignals{200};

std::optional<ReadStatus> refusal_of(Kind kind) {
  switch (kind) {
    case Kind::kNotReady: return ReadStatus::kNotReady;
    case Kind::kGone: return ReadStatus::kGone;
    case Kind::kRefused: return ReadStatus::kRefused;
    default: return std::nullopt;
  }
}

}  // namespace

Reader::Reader(int socket, std::shared_ptr<Memory> memory, Timing timing, double stall_s)
    : memory_(std::move(memory)), channel_(socket, timing), stall_(seconds_of(stall_s)) {
  pair_.emplace(*memory_, QueuePair::Role::kReads, kDepth);
  remote_ = channel_.reach_holder(*pair_);
  thread_ = std::thread(&Reader::run, this);
}

Reader::~Reader() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

void Reader::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  wakeup_.set();
}

std::optional<std::string> Reader::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Reader::submit(std::uint64_t request, std::uint64_t offset, std::uint64_t size_bytes, double wait_s) {
  memory_->part_of(offset, size_bytes);
  if (!(wait_s >= 0 && wait_s <= kWaitMaxS))
    throw std::invalid_argument("a peer waits for 0 to " + std::to_string(static_cast<int>(kWaitMaxS)) + " s");
  const auto wait_ms = static_cast<std::uint32_t>(std::ceil(wait_s * 1e3));
  const std::lock_guard lock(mutex_);
  if (error_) throw NativeError("the connection to the peer has failed: " + *error_);
  if (cancelled_) throw NativeError("the connection to the peer was cancelled");
  if (requests_.count(request) != 0)
    throw std::invalid_argument("request " + std::to_string(request) + " is outstanding already");
  if (requests_.size() == kOutstandingMax)
    throw NativeError(std::to_string(kOutstandingMax) + " requests are outstanding: poll first");
  requests_[request] = Request{offset, size_bytes, wait_ms, Clock::now() + seconds_of(wait_s) + stall_};
  to_ask_.push_back(request);
  wakeup_.set();
}

std::vector<Completion> Reader::poll(double timeout_s, const std::function<void()>& interrupted) {
  const auto until = Clock::now() + seconds_of(timeout_s);
  std::unique_lock lock(mutex_);
  while (done_.empty() && !requests_.empty() && Clock::now() < until) {
    finished_.wait_until(lock, std::min(until, Clock::now() + kSignals));
    if (!done_.empty()) break;
    lock.unlock();
    interrupted();
    lock.lock();
  }
  return std::exchange(done_, {});
}

// Under the mutex.
void Reader::finish(std::uint64_t request, ReadStatus status, std::uint64_t checksum) {
  requests_.erase(request);
  done_.push_back(Completion{request, status, checksum});
  finished_.notify_all();
}

void Reader::run() {
  progressed_ = Clock::now();
  try {
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        if (cancelled_) break;
      }
      step();
    }
    lose("cancelled");
  } catch (const std::exception& error) {
    lose(error.what());
  }
}

// The queue pair goes first: when the caller hears of it, no late answer can write where other bytes now go.
void Reader::lose(const std::string& reason) {
  pair_.reset();
  const std::lock_guard lock(mutex_);
  error_ = reason;
  while (!requests_.empty()) finish(requests_.begin()->first, ReadStatus::kFailed);
}

void Reader::step() {
  ask();
  post_reads();
  auto until = channel_.next_due();
  if (!flights_.empty()) until = std::min(until, progressed_ + stall_);
  const short events = channel_.wants_to_write() ? POLLIN | POLLOUT : POLLIN;
  await_socket(channel_.fd(), events, pair_->event_fd(), wakeup_.fd(), until, [] {});
  wakeup_.clear();
  channel_.pump([this](const Message& message) { heard(message); });
  pair_->drain([this](const ibv_wc& completion) { landed(completion); });
  check_progress();
  post_reads();  // before the checksums, which take a while
  finish_arrived();
}

void Reader::ask() {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t number : std::exchange(to_ask_, {})) {
    Request& request = requests_.at(number);
    request.asked = true;
    channel_.send(Message{Kind::kAsk, request.wait_ms, number, request.offset, request.size_bytes});
  }
}

void Reader::heard(const Message& message) {
  const std::lock_guard lock(mutex_);
  const auto found = requests_.find(message.request);
  if (found == requests_.end() || !found->second.asked || found->second.reading)
    throw Lost("the holder answered what nobody asked");
  if (const auto status = refusal_of(message.kind)) {
    finish(message.request, *status);
    return;
  }
  if (message.kind != Kind::kReady)
    throw Lost("the holder sent a message of kind " + std::to_string(static_cast<std::uint32_t>(message.kind)));
  found->second.reading = true;
  to_read_.push_back(message.request);
}

const RemotePart& Reader::remote_part(std::uint64_t offset) const {
  const auto after = std::upper_bound(remote_.begin(), remote_.end(), offset,
                                      [](std::uint64_t value, const RemotePart& part) { return value < part.offset; });
  if (after != remote_.begin() && offset - std::prev(after)->offset < std::prev(after)->size_bytes)
    return *std::prev(after);
  throw Lost("the holder called byte " + std::to_string(offset) + " ready, and has not registered it");
}

// Cuts what is ready into reads, as many as may be under way.
void Reader::plan_reads(std::vector<ibv_sge>& places, std::vector<ibv_send_wr>& reads) {
  const std::lock_guard lock(mutex_);
  while (!to_read_.empty() && flights_.size() < kDepth) {
    const std::uint64_t id = to_read_.front();
    Request& request = requests_.at(id);
    const std::uint64_t offset = request.offset + request.posted;
    const RemotePart& remote = remote_part(offset);
    const Part& local = memory_->part_of(offset, 1);
    const std::uint64_t size_bytes = std::min({request.size_bytes - request.posted, kReadBytes,
                                               remote.offset + remote.size_bytes - offset});
    const std::uint64_t place = local.address + (offset - local.offset);
    places.push_back(ibv_sge{place, static_cast<std::uint32_t>(size_bytes), local.registered->lkey});
    ibv_send_wr read{};
    read.num_sge = 1;
    read.opcode = IBV_WR_RDMA_READ;
    read.send_flags = IBV_SEND_SIGNALED;
    read.wr.rdma.remote_addr = remote.address + (offset - remote.offset);
    read.wr.rdma.rkey = remote.rkey;
    reads.push_back(read);
    flights_.push_back(Flight{id, size_bytes});
    request.posted += size_bytes;
    if (request.posted == request.size_bytes) to_read_.pop_front();
  }
}

void Reader::post_reads() {
  std::vector<ibv_sge> places;
  std::vector<ibv_send_wr> reads;
  if (flights_.empty()) progressed_ = Clock::now();
  plan_reads(places, reads);
  if (reads.empty()) return;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    reads[i].sg_list = &places[i];
    reads[i].next = i + 1 < reads.size() ? &reads[i + 1] : nullptr;
  }
  pair_->post(reads.data());
}

// Completions of a reliable connection come in the order of their requests.
void Reader::landed(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS)
    throw Lost(std::string("RDMA READ: ") + ibv_wc_status_str(completion.status));
  if (flights_.empty()) throw Lost("a completion came that nothing was posted for");
  progressed_ = Clock::now();
  const Flight flight = flights_.front();
  flights_.pop_front();
  const std::lock_guard lock(mutex_);
  Request& request = requests_.at(flight.request);
  request.arrived += flight.size_bytes;
  if (request.arrived == request.size_bytes) arrived_.push_back(flight.request);
}

void Reader::check_progress() const {
  const auto now = Clock::now();
  if (!flights_.empty() && now - progressed_ >= stall_) throw Lost("reads make no progress");
  const std::lock_guard lock(mutex_);
  for (const auto& [number, request] : requests_)
    if (!request.reading && now >= request.answer_by)
      throw Lost("the holder lives, and does not answer request " + std::to_string(number));
}

void Reader::finish_arrived() {
  for (const std::uint64_t number : std::exchange(arrived_, {})) {
    std::uint64_t offset = 0, size_bytes = 0;
    {
      const std::lock_guard lock(mutex_);
      offset = requests_.at(number).offset;
      size_bytes = requests_.at(number).size_bytes;
    }
    const Part& part = memory_->part_of(offset, size_bytes);
    const std::uint64_t checksum = xxh3(part.host + (offset - part.offset), size_bytes);
    const std::lock_guard lock(mutex_);
    finish(number, ReadStatus::kOk, checksum);
  }
}

}  // namespace fs::rdma
