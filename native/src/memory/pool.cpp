#include "pool.hpp"

#include <unistd.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "errors.hpp"

namespace fs {
namespace {

constexpr std::size_t kHugePageBytes = 2 * 1024 * 1024;

// Past the caches, which hold what others are working on.
void clear_streamed(std::byte* at, std::size_t size_bytes) {
#if defined(__x86_64__)
  const __m128i zero = _mm_setzero_si128();
  for (std::byte* const end = at + size_bytes; at < end; at += 64)
    for (int part = 0; part < 4; ++part) _mm_stream_si128(reinterpret_cast<__m128i*>(at) + part, zero);
  _mm_sfence();
#else
  std::memset(at, 0, size_bytes);
#endif
}

}  // namespace

// Slabs that go back to the pool when nobody uses the memory any more.
class SlabPool::SlabMapping : public Mapping {
 public:
  SlabMapping(std::shared_ptr<SlabPool> pool, std::vector<Slab> slabs, std::size_t size_bytes)
      : Mapping(size_bytes, Access::kOwner), pool_(std::move(pool)), slabs_(std::move(slabs)) {}

  ~SlabMapping() override {
    const auto granted = std::count_if(slabs_.begin(), slabs_.end(), [](const Slab& slab) { return slab.granted; });
    // A sparse one may lack pages that the reserve no longer has: nobody could clear it.
    slabs_.erase(std::remove_if(slabs_.begin(), slabs_.end(), [](const Slab& slab) { return slab.sparse; }),
                 slabs_.end());
    // The kernel keeps pages that are in a socket's queue, and their content, when the slab is gone.
    if (tainted_) slabs_.clear();
    for (Slab& slab : slabs_) slab.populated = true;
    pool_->put_back(std::move(slabs_), static_cast<std::size_t>(granted));
  }

  std::optional<Piece> piece(std::uint64_t offset) override {
    Slab& slab = slabs_.at(offset / pool_->slab_bytes_);
    return Piece{slab.addresses.data(), pool_->slab_bytes_, &slab.kept};
  }

  void never_reuse() override { tainted_ = true; }
  bool belongs_to(const SlabPool* pool) const { return pool_.get() == pool; }
  std::vector<Slab>& slabs() { return slabs_; }

  std::vector<int> fds() const {
    std::vector<int> found;
    for (const Slab& slab : slabs_) found.push_back(slab.descriptor.get());
    return found;
  }

 private:
  std::byte* address(std::uint64_t offset, std::uint64_t size_bytes) const override {
    const std::uint64_t slab = std::min<std::uint64_t>(offset / pool_->slab_bytes_, slabs_.size() - 1);
    const std::uint64_t inside = offset - slab * pool_->slab_bytes_;
    if (size_bytes > pool_->slab_bytes_ - inside)
      throw std::out_of_range("offset " + std::to_string(offset) + " and " + std::to_string(size_bytes) +
                              " bytes lie in more than one slab of " + std::to_string(pool_->slab_bytes_) + " bytes");
    if (!slabs_[slab].granted)
      throw std::out_of_range("offset " + std::to_string(offset) + " lies in slab " + std::to_string(slab) +
                              ", which was not granted");
    return slabs_[slab].addresses.data() + inside;
  }

  std::shared_ptr<SlabPool> pool_;
  std::vector<Slab> slabs_;
  std::atomic<bool> tainted_{false};
};

std::shared_ptr<SlabPool> SlabPool::open(const std::string& name, Pages pages, std::size_t slab_bytes,
                                         std::size_t capacity) {
  const std::size_t least =
      pages == Pages::kSmall ? static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) : kHugePageBytes;
  if (slab_bytes < least || (slab_bytes & (slab_bytes - 1)) != 0 || capacity == 0)
    throw std::invalid_argument("slabs of " + std::to_string(slab_bytes) + " bytes: a power of two of at least " +
                                std::to_string(least) + " is needed, and room for one");
  std::shared_ptr<SlabPool> pool(new SlabPool(name, pages, slab_bytes, capacity));
  if (pages != Pages::kSmall) {  // whether the machine gives such pages shows with the first
    pool->prepare(1);
    if (!is_huge(pool->clean_.front().addresses.data(), slab_bytes)) {
      errno = ENOMEM;
      throw_errno("the kernel gave small pages for " + std::to_string(slab_bytes) + " bytes of huge ones");
    }
  }
  return pool;
}

SlabPool::SlabPool(const std::string& name, Pages pages, std::size_t slab_bytes, std::size_t capacity)
    : slab_bytes_(slab_bytes), capacity_(capacity), backing_(pages, name) {}

SlabPool::~SlabPool() = default;

SlabPool::Slab SlabPool::make(bool sparse) {
  AddressRange addresses(slab_bytes_);
  const std::lock_guard lock(mutex_);
  Descriptor descriptor = backing_.map_new(addresses.data(), slab_bytes_, sparse);
  return {std::move(descriptor), std::move(addresses), false, sparse, !sparse};
}

// Room for all of them is made where they are counted, so that putting them back cannot fail.
void SlabPool::grow(std::size_t count) {
  clean_.reserve(total_ + count);
  dirty_.reserve(total_ + count);
  total_ += count;
}

void SlabPool::clear(const Slab& slab) const {
  if (slab.populated) clear_streamed(slab.addresses.data(), slab_bytes_);
}

// Two cores clear twice as fast as one.
void SlabPool::clear_all(const std::vector<Slab>& slabs) const {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t at = next++; at < slabs.size(); at = next++) clear(slabs[at]);
  };
  std::thread helper;
  try {
    if (slabs.size() > 1) helper = std::thread(work);
  } catch (const std::system_error&) {  // no thread to be had: alone, then
  }
  work();
  if (helper.joinable()) helper.join();
}

std::size_t SlabPool::count_of(std::size_t size_bytes) const {
  return std::max<std::size_t>(1, size_bytes / slab_bytes_ + (size_bytes % slab_bytes_ != 0));
}

void SlabPool::await_room(std::unique_lock<std::mutex>& lock, std::size_t count, const std::string& what) {
  const auto free = [&] { return clean_.size() + dirty_.size(); };
  const auto at_hand = [&] { return free() + (capacity_ - total_); };
  // What somebody is clearing is neither used nor free; it is waited for if it makes the difference.
  prepared_.wait(lock, [&] { return count <= at_hand() || count > at_hand() + preparing_; });
  if (count <= at_hand()) return;
  errno = ENOMEM;
  throw_errno(what + ", " + std::to_string(count) + " slabs of a pool of " + std::to_string(capacity_) + ", of which " +
              std::to_string(total_ - free()) + " are in use");
}

Region SlabPool::take(std::size_t size_bytes) {
  const std::size_t count = count_of(size_bytes);
  if (count > capacity_) {  // refused before there is a vector of that length
    std::unique_lock lock(mutex_);
    await_room(lock, count, "a region of " + std::to_string(size_bytes) + " bytes");
  }
  return take(size_bytes, std::vector<bool>(count, true));
}

Region SlabPool::take_some(std::size_t size_bytes, const std::vector<std::size_t>& positions) {
  std::vector<bool> needed(count_of(size_bytes));
  for (const std::size_t position : positions) needed.at(position) = true;
  return take(size_bytes, needed);
}

Region SlabPool::take(std::size_t size_bytes, const std::vector<bool>& needed) {
  const auto count = static_cast<std::size_t>(std::count(needed.begin(), needed.end(), true));
  std::vector<Slab> slabs, soiled, placed;
  std::size_t made = 0;
  {
    std::unique_lock lock(mutex_);
    await_room(lock, count, "a region of " + std::to_string(size_bytes) + " bytes");
    slabs.reserve(count);
    soiled.reserve(std::min(count, dirty_.size()));
    made = count - std::min(count, clean_.size() + dirty_.size());
    grow(made);
    const auto move_some = [&](std::vector<Slab>& from, std::vector<Slab>& to, std::size_t most) {
      for (; most > 0 && !from.empty(); --most, from.pop_back()) to.push_back(std::move(from.back()));
    };
    move_some(clean_, slabs, count);
    move_some(dirty_, soiled, count - slabs.size());
  }
  try {
    clear_all(soiled);
    for (Slab& slab : soiled) slabs.push_back(std::move(slab));
    soiled.clear();
    for (; made > 0; --made) slabs.push_back(make());
    std::vector<Slab> sparse;
    while (sparse.size() < needed.size() - count) sparse.push_back(make(true));
    placed.reserve(needed.size());
    for (const bool granted : needed) {
      std::vector<Slab>& from = granted ? slabs : sparse;
      placed.push_back(std::move(from.back()));
      from.pop_back();
    }
    auto mapping = std::make_shared<SlabMapping>(shared_from_this(), std::move(placed), size_bytes);
    std::vector<int> fds = mapping->fds();
    return Region(std::move(mapping), std::move(fds));
  } catch (...) {
    for (Slab& slab : placed)
      if (slab.granted) slabs.push_back(std::move(slab));
    const std::size_t taken = slabs.size() + soiled.size() + made;
    for (Slab& slab : soiled) slabs.push_back(std::move(slab));
    put_back(std::move(slabs), taken);
    throw;
  }
}

void SlabPool::grant(const Region& region, const std::vector<std::size_t>& positions) {
  auto* const mapping = dynamic_cast<SlabMapping*>(region.mapping().get());
  if (mapping == nullptr || !mapping->belongs_to(this)) throw std::invalid_argument("a region of another pool");
  std::vector<Slab>& slabs = mapping->slabs();
  std::vector<Slab> gone;  // unmapped after the lock is open again
  std::unique_lock lock(mutex_);
  std::vector<bool> wanted(slabs.size());
  for (const std::size_t position : positions) wanted.at(position) = !slabs.at(position).granted;
  const auto count = static_cast<std::size_t>(std::count(wanted.begin(), wanted.end(), true));
  await_room(lock, count, "more of a region of " + std::to_string(mapping->size_bytes()) + " bytes");
  const std::size_t excess = count - std::min(count, capacity_ - total_);
  gone.reserve(excess);
  for (auto* const from : {&dirty_, &clean_})
    for (; gone.size() < excess && !from->empty(); from->pop_back()) gone.push_back(std::move(from->back()));
  total_ -= gone.size();
  grow(count);
  for (std::size_t position = 0; position < slabs.size(); ++position)
    if (wanted[position]) slabs[position].granted = true;
}

bool SlabPool::prepare(std::size_t wanted) {
  Slab slab{Descriptor(), AddressRange(0), false};
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    if (!dirty_.empty()) {
      slab = std::move(dirty_.back());
      dirty_.pop_back();
    } else if (clean_.size() + preparing_ < wanted && total_ < capacity_) {
      is_new = true;
      grow(1);
    } else {
      return false;
    }
    ++preparing_;
  }
  std::exception_ptr failure;
  try {
    if (is_new) {
      slab = make();
      populate_pages(slab.addresses.data(), slab_bytes_, Access::kOwner);
      slab.populated = true;
    } else {
      clear(slab);
    }
    if (backing_.pages() == Pages::kThp) make_huge(slab.addresses.data(), slab_bytes_);
  } catch (...) {
    failure = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    --preparing_;
    if (failure)
      --total_;
    else
      clean_.push_back(std::move(slab));
  }
  prepared_.notify_all();
  if (failure) std::rethrow_exception(failure);
  return true;
}

std::size_t SlabPool::release(std::size_t count) {
  std::vector<Slab> gone;  // unmapped after the lock is open again
  const std::lock_guard lock(mutex_);
  gone.reserve(std::min(count, clean_.size() + dirty_.size()));
  for (auto* const from : {&dirty_, &clean_})
    for (; gone.size() < count && !from->empty(); from->pop_back()) gone.push_back(std::move(from->back()));
  total_ -= gone.size();
  return gone.size();
}

void SlabPool::put_back(std::vector<Slab> slabs, std::size_t count) noexcept {
  {
    const std::lock_guard lock(mutex_);
    total_ -= count - slabs.size();
    for (Slab& slab : slabs) dirty_.push_back(std::move(slab));
  }
  prepared_.notify_all();
}

SlabPool::Counts SlabPool::counts() const {
  const std::lock_guard lock(mutex_);
  return {total_ - preparing_ - clean_.size() - dirty_.size(), clean_.size(), dirty_.size() + preparing_};
}

}  // namespace fs
