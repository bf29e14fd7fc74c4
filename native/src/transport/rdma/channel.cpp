#include "channel.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <type_traits>

namespace fs::rdma {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

constexpr std::uint64_t kMagic = 0x31414d44522d5346;  // "FS-RDMA1"
constexpr std::uint32_t kVersion = 1, kPartsMax = 1 << 20;
constexpr std::size_t kReceiveBytes = 1 << 16, kBacklogMaxBytes = 1 << 24;
constexpr int kBeatsASilence = 4;
constexpr double kTimeMinS = 0.05, kTimeMaxS = 3600;

[[noreturn]] void throw_socket_error() {
  const int number = errno;
  const std::string reason = "side channel: " + std::generic_category().message(number);
  if (number == ECONNRESET || number == EPIPE) throw Closed(reason);
  throw Lost(reason);
}

std::string milliseconds(Clock::duration duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(duration).count()) + " ms";
}

}  // namespace

struct SideChannel::Hello {
  std::uint64_t magic;
  std::uint32_t version, number, first_packet;
  std::uint16_t lid;
  std::uint8_t mtu, ethernet;
  std::uint8_t gid[16];
  std::uint32_t part_count, silence_ms;
};

SideChannel::SideChannel(int fd, Timing timing) : socket_(fd, timing.connect_s), timing_(timing) {
  static_assert(sizeof(Hello) == 48 && std::is_trivially_copyable_v<Hello>);
  for (const double wanted_s : {timing.connect_s, timing.silence_s})
    if (!(wanted_s >= kTimeMinS && wanted_s <= kTimeMaxS))
      throw std::invalid_argument("times of an RDMA connection are 0.05 to 3600 s, not " + std::to_string(wanted_s));
  if (timing.packet_timeout < 1 || timing.packet_timeout > 31)
    throw std::invalid_argument("the packet timeout is a power of two from 1 to 31");
  silence_ = seconds_of(timing.silence_s);
  setup_ends_ = Clock::now() + seconds_of(timing.connect_s);
}

void SideChannel::write_all(const void* data, std::size_t size_bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  while (size_bytes > 0) {
    if (Clock::now() >= setup_ends_) throw Lost("the peer took nothing within the time to connect");
    const ssize_t count = ::send(fd(), from, size_bytes, MSG_NOSIGNAL);
    if (count > 0) {
      from += count;
      size_bytes -= static_cast<std::size_t>(count);
    } else if (count < 0 && errno == EAGAIN) {
      await_socket(fd(), POLLOUT, -1, -1, setup_ends_, [] {});
    } else if (count < 0 && errno != EINTR) {
      throw_socket_error();
    }
  }
}

void SideChannel::read_all(void* data, std::size_t size_bytes) {
  auto* to = static_cast<std::byte*>(data);
  while (size_bytes > 0) {
    if (Clock::now() >= setup_ends_) throw Lost("the peer did not set the connection up in time");
    const ssize_t count = ::recv(fd(), to, size_bytes, 0);
    if (count > 0) {
      to += count;
      size_bytes -= static_cast<std::size_t>(count);
    } else if (count == 0) {
      throw Closed("the peer closed the side channel");
    } else if (errno == EAGAIN) {
      await_socket(fd(), POLLIN, -1, -1, setup_ends_, [] {});
    } else if (errno != EINTR) {
      throw_socket_error();
    }
  }
}

Endpoint SideChannel::exchange(const QueuePair& pair, std::uint32_t part_count, Hello& peer) {
  const Endpoint mine = pair.endpoint();
  Hello hello{};
  hello.magic = kMagic;
  hello.version = kVersion;
  hello.number = mine.number;
  hello.first_packet = mine.first_packet;
  hello.lid = mine.lid;
  hello.mtu = static_cast<std::uint8_t>(mine.mtu);
  std::memcpy(hello.gid, mine.gid.raw, sizeof hello.gid);
  hello.part_count = part_count;
  hello.silence_ms = static_cast<std::uint32_t>(timing_.silence_s * 1e3);
  write_all(&hello, sizeof hello);
  read_all(&peer, sizeof peer);
  if (peer.magic != kMagic) throw Lost("the peer does not speak this protocol");
  if (peer.version != kVersion)
    throw Lost("the peer speaks version " + std::to_string(peer.version) + ", this is version " +
               std::to_string(kVersion));
  if (peer.mtu < IBV_MTU_256 || peer.mtu > IBV_MTU_4096 || peer.number > 0xffffff || peer.first_packet > 0xffffff ||
      peer.part_count > kPartsMax || peer.silence_ms < kTimeMinS * 1e3 || peer.silence_ms > kTimeMaxS * 1e3)
    throw Lost("the peer's hello holds a value that is none");
  beat_every_ = std::min<Clock::duration>(silence_, std::chrono::milliseconds(peer.silence_ms)) / kBeatsASilence;
  Endpoint other;
  other.number = peer.number;
  other.first_packet = peer.first_packet;
  other.lid = peer.lid;
  other.mtu = static_cast<ibv_mtu>(peer.mtu);
  std::memcpy(other.gid.raw, peer.gid, sizeof peer.gid);
  return other;
}

void SideChannel::await_connected() {
  const Message mine{Kind::kConnected};
  write_all(&mine, sizeof mine);
  Message peers;
  read_all(&peers, sizeof peers);
  if (peers.kind != Kind::kConnected) throw Lost("the peer sent something before it was connected");
  heard_ = spoke_ = Clock::now();
}

void SideChannel::accept_reader(QueuePair& pair, const Memory& memory) {
  Hello peer{};
  const Endpoint reader = exchange(pair, static_cast<std::uint32_t>(memory.parts().size()), peer);
  if (peer.part_count != 0) throw Lost("the peer offers memory, and came to read");
  pair.connect(reader, timing_.packet_timeout);
  const std::vector<std::uint32_t> keys = pair.open(setup_ends_);
  std::vector<RemotePart> parts;
  for (const Part& part : memory.parts())
    parts.push_back(RemotePart{part.offset, part.size_bytes, part.address, keys[parts.size()], 0});
  write_all(parts.data(), parts.size() * sizeof(RemotePart));
  await_connected();
}

std::vector<RemotePart> SideChannel::reach_holder(QueuePair& pair) {
  Hello peer{};
  const Endpoint holder = exchange(pair, 0, peer);
  std::vector<RemotePart> parts(peer.part_count);
  read_all(parts.data(), parts.size() * sizeof(RemotePart));
  std::uint64_t end = 0;
  for (const RemotePart& part : parts) {
    if (part.size_bytes == 0 || part.offset < end || part.offset > UINT64_MAX - part.size_bytes ||
        part.address > UINT64_MAX - part.size_bytes)
      throw Lost("the peer's parts overlap, or are none");
    end = part.offset + part.size_bytes;
  }
  pair.connect(holder, timing_.packet_timeout);
  await_connected();
  return parts;
}

void SideChannel::send(const Message& message) {
  if (out_.size() - sent_ > kBacklogMaxBytes) throw Lost("the peer takes no messages");
  const auto* bytes = reinterpret_cast<const std::byte*>(&message);
  out_.insert(out_.end(), bytes, bytes + sizeof message);
}

void SideChannel::flush() {
  while (wants_to_write()) {
    const ssize_t count = ::send(fd(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (count > 0) {
      sent_ += static_cast<std::size_t>(count);
      spoke_ = Clock::now();
    } else if (count < 0 && errno == EAGAIN) {
      return;
    } else if (count < 0 && errno != EINTR) {
      throw_socket_error();
    }
  }
  out_.clear();
  sent_ = 0;
}

void SideChannel::receive(const std::function<void(const Message&)>& each) {
  const std::size_t had = in_.size();
  in_.resize(had + kReceiveBytes);
  const ssize_t count = ::recv(fd(), in_.data() + had, kReceiveBytes, 0);
  in_.resize(had + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  if (count == 0) throw Closed("the peer closed the side channel");
  if (count < 0 && errno != EAGAIN && errno != EINTR) throw_socket_error();
  if (count > 0) heard_ = Clock::now();
  std::size_t begin = 0;
  for (; in_.size() - begin >= sizeof(Message); begin += sizeof(Message)) {
    Message message;
    std::memcpy(&message, in_.data() + begin, sizeof message);
    if (message.kind != Kind::kBeat) each(message);
  }
  in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(begin));
}

void SideChannel::pump(const std::function<void(const Message&)>& each) {
  receive(each);
  const auto now = Clock::now();
  if (now - heard_ >= silence_) throw Lost("nothing came from the peer for " + milliseconds(now - heard_));
  if (now - spoke_ >= beat_every_ && !wants_to_write()) send(Message{});
  flush();
}

// While something waits to be written, the next beat is no reason to wake: the socket is.
Clock::time_point SideChannel::next_due() const {
  const auto dead = heard_ + silence_;
  return wants_to_write() ? dead : std::min(dead, spoke_ + beat_every_);
}

}  // namespace fs::rdma
