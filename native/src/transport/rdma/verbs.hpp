// libibverbs under RAII: a device, a region's memory registered with it, and a reliable queue pair.
//
// Where the device has memory windows, memory is registered without remote access, each slab of a pool once for as long
// as it lives, and a queue pair opens windows in the parts that its other end may read: their keys are of use over that
// pair alone. Elsewhere each registered memory has a protection domain of its own, in which its queue pairs work. Either
// way whoever holds the other end can read one region and nothing else, whatever keys it guesses.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../../memory/segment.hpp"

namespace fs::rdma {

// Calls the library's function that frees what it made.
template <auto free>
struct Freed {
  template <typename Thing>
  void operator()(Thing* thing) const {
    free(thing);
  }
};
using Context = std::unique_ptr<ibv_context, Freed<ibv_close_device>>;
using ProtectionDomain = std::unique_ptr<ibv_pd, Freed<ibv_dealloc_pd>>;
using MemoryRegion = std::unique_ptr<ibv_mr, Freed<ibv_dereg_mr>>;
using CompletionChannel = std::unique_ptr<ibv_comp_channel, Freed<ibv_destroy_comp_channel>>;
using CompletionQueue = std::unique_ptr<ibv_cq, Freed<ibv_destroy_cq>>;
using Window = std::unique_ptr<ibv_mw, Freed<ibv_dealloc_mw>>;
using Pair = std::unique_ptr<ibv_qp, Freed<ibv_destroy_qp>>;

// The port of a network card that reads go through, with the address that stands for it.
class Device {
 public:
  explicit Device(const std::string& name, std::uint8_t port = 1);
  // Names of the machine's devices, none where its kernel has no RDMA.
  static std::vector<std::string> names();

  ibv_context* context() const { return context_.get(); }
  const std::string& name() const { return name_; }
  std::uint8_t port() const { return port_; }
  bool active() const { return attributes_.state == IBV_PORT_ACTIVE; }
  bool ethernet() const { return attributes_.link_layer == IBV_LINK_LAYER_ETHERNET; }
  std::uint16_t lid() const { return attributes_.lid; }
  ibv_mtu mtu() const { return attributes_.active_mtu; }
  const ibv_gid& gid() const { return gid_; }
  std::uint8_t gid_index() const { return gid_index_; }
  // Reads that a queue pair may have under way, as who asks and as who answers.
  std::uint8_t reads_out() const { return reads_out_; }
  std::uint8_t reads_in() const { return reads_in_; }
  // The domain of all registered memory; none if the device has no memory windows.
  ibv_pd* domain() const { return domain_.get(); }
  bool has_windows() const { return domain_ != nullptr; }
  // Bytes that are registered with it now.
  std::uint64_t registered_bytes() const { return registered_bytes_.load(); }

 private:
  friend class Registration;
  void choose_gid();

  std::string name_;
  std::uint8_t port_;
  Context context_;
  ibv_port_attr attributes_{};
  ibv_gid gid_{};
  std::uint8_t gid_index_ = 0, reads_out_ = 1, reads_in_ = 1;
  ProtectionDomain domain_;
  std::atomic<std::uint64_t> registered_bytes_{0};
};

// Memory that the device may read and write: its pages stay until this is gone. Keeps the device, and a domain of its own.
class Registration {
 public:
  Registration(std::shared_ptr<Device> device, std::shared_ptr<ibv_pd> domain, MemoryRegion region);
  Registration(const Registration&) = delete;
  ~Registration();
  ibv_mr* region() const { return region_.get(); }
  bool is_with(const Device& device) const { return device_.get() == &device; }

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<ibv_pd> domain_;
  MemoryRegion region_;
};

// A range of a region that lies in one piece, as the device knows it.
struct Part {
  std::uint64_t offset, size_bytes;  // in the region
  std::uint64_t address;             // what work requests name
  ibv_mr* registered;
  const std::byte* host;  // where the processor sees it
};

// The memory of a region, registered in parts: the slabs that this node has of it.
class Memory {
 public:
  explicit Memory(std::shared_ptr<Device> device);
  // A range of the region that lies in one slab; keeps the region. Its pages come now, and stay until this is gone.
  // OsError, std::invalid_argument unless the region is its owner's: others' mappings cannot be registered.
  void add(const Region& region, std::uint64_t offset, std::uint64_t size_bytes);

  const std::vector<Part>& parts() const { return parts_; }
  // The part in which the range lies, in one piece. std::out_of_range if none has it.
  const Part& part_of(std::uint64_t offset, std::uint64_t size_bytes) const;
  std::uint64_t end() const { return parts_.empty() ? 0 : parts_.back().offset + parts_.back().size_bytes; }
  Device& device() const { return *device_; }
  ibv_pd* domain() const { return domain_.get(); }

 private:
  void check(std::uint64_t offset, std::uint64_t size_bytes) const;
  int access() const;
  std::shared_ptr<Registration> register_host(Mapping& mapping, std::uint64_t offset, std::byte* data,
                                              std::uint64_t size_bytes) const;

  std::shared_ptr<Device> device_;
  std::shared_ptr<ibv_pd> domain_;
  std::vector<std::shared_ptr<Mapping>> mappings_;  // outlive what is registered of them
  std::vector<Part> parts_;  // by offset
  std::vector<std::shared_ptr<Registration>> registrations_;
};

// What the two ends of a queue pair tell each other.
struct Endpoint {
  std::uint32_t number = 0, first_packet = 0;
  std::uint16_t lid = 0;
  ibv_mtu mtu = IBV_MTU_256;
  ibv_gid gid{};
};

// A reliable connection, of the end that reads or of the end that is read.
class QueuePair {
 public:
  enum class Role { kReads, kIsRead };
  QueuePair(Memory& memory, Role role, std::uint32_t depth);
  QueuePair(const QueuePair&) = delete;
  ~QueuePair();

  Endpoint endpoint() const;
  void connect(const Endpoint& peer, std::uint8_t timeout);
  // Lets the other end of the connected pair read the memory: the key of each part. OsError, also after `until`.
  std::vector<std::uint32_t> open(std::chrono::steady_clock::time_point until);
  // Becomes readable when completions have come since `drain` was last called.
  int event_fd() const { return channel_->fd; }
  // Takes completions, `most` at a time, until there is none; arms the event first.
  template <typename Each>
  void drain(Each each) {
    take_events();
    ibv_wc completions[kBatch];
    while (const int count = poll(completions, kBatch))
      for (int i = 0; i < count; ++i) each(completions[i]);
  }
  // One call for a chain of work requests.
  void post(ibv_send_wr* first);

 private:
  static constexpr int kBatch = 32;
  void bind(Window& window, const Part& part);
  void await_bound(std::chrono::steady_clock::time_point until);
  void take_events();
  int poll(ibv_wc* completions, int most);

  Memory& memory_;
  CompletionChannel channel_;
  CompletionQueue queue_;
  Pair pair_;
  std::vector<Window> windows_;
  std::uint32_t first_packet_;
};

}  // namespace fs::rdma
