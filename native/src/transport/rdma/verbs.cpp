#include "verbs.hpp"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "../../memory/errors.hpp"

namespace fs::rdma {

namespace {

constexpr unsigned kWindows = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
constexpr const char* kWindow = "memory window";
constexpr std::uint8_t kMostReads = 16, kRetries = 7, kHops = 64, kMinRnrTimer = 12;

[[noreturn]] void fail(int number, const std::string& what) {
  errno = number;
  throw_errno(what);
}

// Functions of libibverbs that return an error number.
void check_code(int number, const std::string& what) {
  if (number != 0) fail(number, what);
}

template <typename Thing>
Thing* check_made(Thing* thing, const std::string& what) {
  if (thing == nullptr) throw_errno(what);
  return thing;
}

bool is_ipv4(const ibv_gid& gid) {
  static constexpr std::uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

struct DeviceList {
  DeviceList() : devices(ibv_get_device_list(&count)) {}
  DeviceList(const DeviceList&) = delete;
  ~DeviceList() {
    if (devices != nullptr) ibv_free_device_list(devices);
  }
  int count = 0;
  ibv_device** devices;
};

std::string range_text(std::uint64_t offset, std::uint64_t size_bytes) {
  return "bytes " + std::to_string(offset) + " to " + std::to_string(offset + size_bytes);
}

}  // namespace

std::vector<std::string> Device::names() {
  const DeviceList list;  // none: a kernel without RDMA is no error here
  std::vector<std::string> names;
  for (int i = 0; list.devices != nullptr && i < list.count; ++i)
    names.emplace_back(ibv_get_device_name(list.devices[i]));
  return names;
}

Device::Device(const std::string& name, std::uint8_t port) : name_(name), port_(port) {
  const DeviceList list;
  for (int i = 0; list.devices != nullptr && i < list.count; ++i)
    if (name == ibv_get_device_name(list.devices[i]))
      context_.reset(check_made(ibv_open_device(list.devices[i]), "RDMA device " + name + " cannot be opened"));
  if (!context_) fail(ENODEV, "RDMA device " + name);
  check_code(ibv_query_port(context_.get(), port, &attributes_), "port " + std::to_string(port) + " of " + name);
  ibv_device_attr limits{};
  check_code(ibv_query_device(context_.get(), &limits), "limits of " + name);
  reads_out_ = static_cast<std::uint8_t>(std::clamp<int>(limits.max_qp_init_rd_atom, 1, kMostReads));
  reads_in_ = static_cast<std::uint8_t>(std::clamp<int>(limits.max_qp_rd_atom, 1, kMostReads));
  choose_gid();
  if ((limits.device_cap_flags & kWindows) != 0)
    domain_.reset(check_made(ibv_alloc_pd(context_.get()), "protection domain of " + name));
}

// On Ethernet the RoCEv2 address of an IPv4 one, which routers carry, else another RoCEv2 address.
void Device::choose_gid() {
  std::vector<ibv_gid_entry> entries(static_cast<std::size_t>(std::max(attributes_.gid_tbl_len, 1)));
  const ssize_t count = ibv_query_gid_table(context_.get(), entries.data(), entries.size(), 0);
  int best = -1;
  for (ssize_t i = 0; i < count; ++i) {
    const ibv_gid_entry& entry = entries[static_cast<std::size_t>(i)];
    if (entry.port_num != port_) continue;
    int worth = 0;
    if (ethernet()) {
      if (entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
      worth = is_ipv4(entry.gid) ? 2 : 1;
    }
    if (worth <= best) continue;
    best = worth;
    gid_ = entry.gid;
    gid_index_ = static_cast<std::uint8_t>(entry.gid_index);
  }
  if (best < 0) fail(EADDRNOTAVAIL, "RDMA device " + name_ + " has no address that reads could go to");
}

Registration::Registration(std::shared_ptr<Device> device, std::shared_ptr<ibv_pd> domain, MemoryRegion region)
    : device_(std::move(device)), domain_(std::move(domain)), region_(std::move(region)) {
  device_->registered_bytes_ += region_->length;
}

Registration::~Registration() { device_->registered_bytes_ -= region_->length; }

Memory::Memory(std::shared_ptr<Device> device)
    : device_(std::move(device)),
      domain_(device_->has_windows()
                  ? std::shared_ptr<ibv_pd>(device_, device_->domain())
                  : std::shared_ptr<ibv_pd>(check_made(ibv_alloc_pd(device_->context()),
                                                       "protection domain of " + device_->name()),
                                            ibv_dealloc_pd)) {}

int Memory::access() const {
  return IBV_ACCESS_LOCAL_WRITE | (device_->has_windows() ? IBV_ACCESS_MW_BIND : IBV_ACCESS_REMOTE_READ);
}

void Memory::check(std::uint64_t offset, std::uint64_t size_bytes) const {
  if (size_bytes == 0 || offset > UINT64_MAX - size_bytes) throw std::invalid_argument("no bytes to register");
  if (offset < end())
    throw std::invalid_argument(range_text(offset, size_bytes) + " come before what is registered, or again");
}

// With windows, the whole slab around the range, once for all segments that use it; else the range.
std::shared_ptr<Registration> Memory::register_host(Mapping& mapping, std::uint64_t offset, std::byte* data,
                                                    std::uint64_t size_bytes) const {
  const auto piece = device_->has_windows() ? mapping.piece(offset) : std::nullopt;
  if (piece && *piece->kept != nullptr) {
    auto known = std::static_pointer_cast<Registration>(*piece->kept);  // nothing else is ever kept there
    if (known->is_with(*device_)) return known;
  }
  std::byte* const begin = piece ? piece->begin : data;
  const std::size_t length = piece ? piece->size_bytes : size_bytes;
  MemoryRegion region(check_made(ibv_reg_mr(domain_.get(), begin, length, access()),
                                 range_text(offset, size_bytes) + " cannot be registered with " + device_->name() +
                                     " (is the limit of locked memory high enough?)"));
  auto made = std::make_shared<Registration>(device_, domain_, std::move(region));
  if (piece) *piece->kept = made;
  return made;
}

void Memory::add(const Region& region, std::uint64_t offset, std::uint64_t size_bytes) {
  check(offset, size_bytes);
  Mapping& mapping = *region.mapping();
  if (mapping.access() != Access::kOwner) throw std::invalid_argument("only the owner of a region can register it");
  std::byte* const data = mapping.range(offset, size_bytes);
  auto registered = register_host(mapping, offset, data, size_bytes);
  if (mappings_.empty() || mappings_.back() != region.mapping()) mappings_.push_back(region.mapping());
  parts_.push_back(Part{offset, size_bytes, reinterpret_cast<std::uint64_t>(data), registered->region(), data});
  registrations_.push_back(std::move(registered));
}

const Part& Memory::part_of(std::uint64_t offset, std::uint64_t size_bytes) const {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), offset,
                                      [](std::uint64_t value, const Part& part) { return value < part.offset; });
  if (after != parts_.begin()) {
    const Part& part = *std::prev(after);
    const std::uint64_t begin = offset - part.offset;
    if (begin <= part.size_bytes && size_bytes <= part.size_bytes - begin && size_bytes > 0) return part;
  }
  throw std::out_of_range(range_text(offset, size_bytes) + " are in no registered part, or in two");
}

QueuePair::QueuePair(Memory& memory, Role role, std::uint32_t depth)
    : memory_(memory), first_packet_(std::random_device{}() & 0xffffff) {
  const Device& device = memory.device();
  channel_.reset(check_made(ibv_create_comp_channel(device.context()), "completion channel"));
  const int flags = fcntl(channel_->fd, F_GETFL);
  if (flags < 0 || fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK) != 0) throw_errno("completion channel");
  queue_.reset(check_made(ibv_create_cq(device.context(), static_cast<int>(depth), nullptr, channel_.get(), 0),
                          "completion queue of " + std::to_string(depth)));
  check_code(ibv_req_notify_cq(queue_.get(), 0), "completion event");
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = queue_.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = depth;
  wanted.cap.max_recv_wr = wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  pair_.reset(check_made(ibv_create_qp(memory.domain(), &wanted), "queue pair"));
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device.port();
  attributes.qp_access_flags = role == Role::kIsRead ? IBV_ACCESS_REMOTE_READ : 0;
  check_code(ibv_modify_qp(pair_.get(), &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
             "queue pair to INIT");
}

// Once the pair is gone nothing more is written into the memory; the queue must not be freed before. The windows go
// first: the kernel's device in software waits for them.
QueuePair::~QueuePair() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  ibv_modify_qp(pair_.get(), &attributes, IBV_QP_STATE);
  windows_.clear();
  pair_.reset();
}

Endpoint QueuePair::endpoint() const {
  const Device& device = memory_.device();
  return Endpoint{pair_->qp_num, first_packet_, device.lid(), device.mtu(), device.gid()};
}

void QueuePair::connect(const Endpoint& peer, std::uint8_t timeout) {
  const Device& device = memory_.device();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(device.mtu(), peer.mtu);
  attributes.dest_qp_num = peer.number;
  attributes.rq_psn = peer.first_packet;
  attributes.max_dest_rd_atomic = device.reads_in();
  attributes.min_rnr_timer = kMinRnrTimer;
  attributes.ah_attr.port_num = device.port();
  attributes.ah_attr.dlid = peer.lid;
  attributes.ah_attr.is_global = device.ethernet() ? 1 : 0;
  attributes.ah_attr.grh.dgid = peer.gid;
  attributes.ah_attr.grh.sgid_index = device.gid_index();
  attributes.ah_attr.grh.hop_limit = kHops;
  check_code(ibv_modify_qp(pair_.get(), &attributes,
                           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
             "queue pair to RTR");
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = timeout;
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRetries;
  attributes.sq_psn = first_packet_;
  attributes.max_rd_atomic = device.reads_out();
  check_code(ibv_modify_qp(pair_.get(), &attributes,
                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                               IBV_QP_MAX_QP_RD_ATOMIC),
             "queue pair to RTS");
}

void QueuePair::bind(Window& window, const Part& part) {
  ibv_send_wr wanted{};
  wanted.opcode = IBV_WR_BIND_MW;
  wanted.send_flags = IBV_SEND_SIGNALED;
  wanted.bind_mw.mw = window.get();
  wanted.bind_mw.rkey = ibv_inc_rkey(window->rkey);
  wanted.bind_mw.bind_info.mr = part.registered;
  wanted.bind_mw.bind_info.addr = part.address;
  wanted.bind_mw.bind_info.length = part.size_bytes;
  wanted.bind_mw.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_READ;
  post(&wanted);
  window->rkey = wanted.bind_mw.rkey;
}

// One after the other: a bind takes microseconds, and a region has some hundreds of slabs at most.
std::vector<std::uint32_t> QueuePair::open(std::chrono::steady_clock::time_point until) {
  std::vector<std::uint32_t> keys;
  for (const Part& part : memory_.parts()) {
    if (memory_.device().has_windows()) {
      windows_.emplace_back(check_made(ibv_alloc_mw(memory_.domain(), IBV_MW_TYPE_2), kWindow));
      bind(windows_.back(), part);
      await_bound(until);
      keys.push_back(windows_.back()->rkey);
    } else {
      keys.push_back(part.registered->rkey);
    }
  }
  return keys;
}

void QueuePair::await_bound(std::chrono::steady_clock::time_point until) {
  for (bool bound = false; !bound;) {
    drain([&](const ibv_wc& completion) {
      if (completion.status != IBV_WC_SUCCESS)
        fail(EIO, std::string(kWindow) + ": " + ibv_wc_status_str(completion.status));
      bound = true;
    });
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (!bound && left.count() <= 0) fail(ETIMEDOUT, kWindow);
    pollfd event{channel_->fd, POLLIN, 0};
    if (!bound) ::poll(&event, 1, static_cast<int>(left.count()));
  }
}

void QueuePair::take_events() {
  ibv_cq* queue = nullptr;
  void* unused = nullptr;
  unsigned count = 0;
  while (ibv_get_cq_event(channel_.get(), &queue, &unused) == 0) ++count;
  if (count == 0) return;
  ibv_ack_cq_events(queue_.get(), count);
  check_code(ibv_req_notify_cq(queue_.get(), 0), "completion event");
}

int QueuePair::poll(ibv_wc* completions, int most) {
  const int count = ibv_poll_cq(queue_.get(), most, completions);
  if (count < 0) fail(EIO, "completion queue");
  return count;
}

void QueuePair::post(ibv_send_wr* first) {
  ibv_send_wr* refused = nullptr;
  check_code(ibv_post_send(pair_.get(), first, &refused), "a work request");
}

}  // namespace fs::rdma
