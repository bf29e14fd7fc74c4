// The side channel of an RDMA connection: the socket over which both ends set it up, say what is ready, and notice that
// the other one is gone. RDMA itself notices a dead peer after many seconds only.
//
// On the wire (little-endian): each end sends a Hello, the holder then its parts, each then `connected`; from there on
// messages of one size. Who has nothing to say sends a beat; who hears nothing for `silence_s` takes the peer for dead.
// The socket is connected and authenticated by whoever hands it over.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../../memory/errors.hpp"
#include "../../memory/segment.hpp"
#include "../sockets.hpp"
#include "verbs.hpp"

namespace fs::rdma {

// The connection is of no more use; what() is the reason.
class Lost : public NativeError {
 public:
  using NativeError::NativeError;
};

// The peer has closed it, or its process is gone.
class Closed : public Lost {
 public:
  using Lost::Lost;
};

enum class Kind : std::uint32_t {
  kBeat = 1,
  kConnected = 2,  // my queue pair is ready
  kAsk = 3,        // reader: tell me when this range is ready, within `wait_ms`
  kReady = 4,      // holder: it is
  kNotReady = 5,   // holder: it is not yet, and the wait is over
  kGone = 6,       // holder: it will never be
  kRefused = 7,    // holder: it is not for you
};

struct Message {
  Kind kind = Kind::kBeat;
  std::uint32_t wait_ms = 0;
  std::uint64_t request = 0, offset = 0, size_bytes = 0;
};
static_assert(sizeof(Message) == 32);

// What a reader learns of a part of the holder's memory.
struct RemotePart {
  std::uint64_t offset, size_bytes, address;
  std::uint32_t rkey, zero;
};
static_assert(sizeof(RemotePart) == 32);

struct Timing {
  double connect_s = 5, silence_s = 0.8;
  // As queue pairs count it: 4.096 us times 2 to this power, before a packet is sent again. Short ones send again what is
  // only late; deaths are noticed here.
  std::uint8_t packet_timeout = 19;
};

class SideChannel {
 public:
  // Duplicates the descriptor. OsError.
  SideChannel(int fd, Timing timing);
  int fd() const { return socket_.fd(); }

  // Both set the pair up; from here on nothing blocks. Lost, also after `connect_s`.
  void accept_reader(QueuePair& pair, const Memory& memory);
  std::vector<RemotePart> reach_holder(QueuePair& pair);

  // What is not sent at once goes out with `pump`.
  void send(const Message& message);
  bool wants_to_write() const { return sent_ < out_.size(); }
  // Moves bytes both ways, calls `each` for what came, and beats. Lost if the peer is gone, silent or off the protocol.
  void pump(const std::function<void(const Message&)>& each);
  // Until when a thread may sleep if nothing comes.
  Clock::time_point next_due() const;

 private:
  struct Hello;
  Endpoint exchange(const QueuePair& pair, std::uint32_t part_count, Hello& peer);
  void write_all(const void* data, std::size_t size_bytes);
  void read_all(void* data, std::size_t size_bytes);
  void await_connected();
  void flush();
  void receive(const std::function<void(const Message&)>& each);

  PeerSocket socket_;
  Timing timing_;
  Clock::duration silence_, beat_every_;
  Clock::time_point setup_ends_, heard_, spoke_;
  std::vector<std::byte> out_, in_;
  std::size_t sent_ = 0;
};

}  // namespace fs::rdma
