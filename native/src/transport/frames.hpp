// Frames of a connection between peers. The reader sends requests, the holder answers each of them once, in any order.
// `runtime/contract/node/peer_frames.py` has the same for connections inside TLS. All fields are little-endian.
//
// Request, 40 bytes:
//   0   u32  magic       0x51505346, "FSPQ"
//   4   u16  version     1
//   6   u16  kind        1 read; 2 received: nothing is asked, only `outstanding` counts; 3 leave: the same, it is 0,
//                        and what follows belongs to the handshake of the next grant
//   8   u64  request     the reader's number for it, unlike those that are outstanding
//   16  u64  offset      of the range in the checkpoint's region
//   24  u64  size_bytes  of the range: 1 to 64 MiB
//   32  u32  wait_ms     how long the holder waits for chunks that it does not have yet: at most 600,000
//   36  u32  outstanding how many requests before this one have not been answered whole. The holder does not use the
//                        memory of an answer for something else before it has arrived.
//
// Answer, 24 bytes, and the bytes of the range after it if it is ok:
//   0   u32  magic       0x41505346, "FSPA"
//   4   u16  version     1
//   6   u16  status      0 ok; 1 not ready after the wait; 2 gone: the holder's segment failed; 3 refused: outside
//                        of what the reader was granted
//   8   u64  request
//   16  u64  size_bytes  as requested if ok, otherwise zero
//
// At most 64 requests are outstanding. An end that receives anything else closes the connection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fs {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are copied as they are");

constexpr std::uint32_t kRequestMagic = 0x51505346, kAnswerMagic = 0x41505346;
constexpr std::uint16_t kFrameVersion = 1;
constexpr std::uint16_t kRead = 1, kReceived = 2, kLeave = 3;
constexpr std::size_t kOutstandingMax = 64;
constexpr std::uint64_t kRequestMaxBytes = std::uint64_t{64} << 20;
constexpr std::uint32_t kWaitMaxMs = 600'000;

struct RequestFrame {
  std::uint32_t magic = kRequestMagic;
  std::uint16_t version = kFrameVersion;
  std::uint16_t kind = kRead;
  std::uint64_t request = 0;
  std::uint64_t offset = 0;
  std::uint64_t size_bytes = 0;
  std::uint32_t wait_ms = 0;
  std::uint32_t outstanding = 0;
};

struct AnswerFrame {
  std::uint32_t magic = kAnswerMagic;
  std::uint16_t version = kFrameVersion;
  std::uint16_t status = 0;
  std::uint64_t request = 0;
  std::uint64_t size_bytes = 0;
};

static_assert(sizeof(RequestFrame) == 40 && offsetof(RequestFrame, outstanding) == 36);
static_assert(sizeof(AnswerFrame) == 24 && offsetof(AnswerFrame, size_bytes) == 16);

// A frame that may arrive in pieces.
template <typename Frame>
class FrameBuffer {
 public:
  std::byte* free() { return bytes_.data() + filled_; }
  std::size_t missing_bytes() const { return sizeof(Frame) - filled_; }
  bool empty() const { return filled_ == 0; }
  void add(std::size_t size_bytes) { filled_ += size_bytes; }
  // The frame, once none of its bytes is missing; then empty again.
  Frame take() {
    Frame frame;
    std::memcpy(&frame, bytes_.data(), sizeof frame);
    filled_ = 0;
    return frame;
  }

 private:
  std::array<std::byte, sizeof(Frame)> bytes_;
  std::size_t filled_ = 0;
};

}  // namespace fs
