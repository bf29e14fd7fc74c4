// The memory of a node's segments: slabs of one size, so that it cannot fragment, used again and again, because
// making memory costs as much as filling it. A region is made of slabs. In the processes that attach it they lie
// contiguously; here each lies where it was made, and what is read or written must lie in one.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backing.hpp"
#include "segment.hpp"

namespace fs {

class SlabPool : public std::enable_shared_from_this<SlabPool> {
 public:
  struct Counts {
    std::size_t used, clean, dirty;  // one that prepare() has in hand is dirty still
  };

  // `slab_bytes` is a power of two of at least a huge page, or of a page if pages are small. OsError.
  static std::shared_ptr<SlabPool> open(const std::string& name, Pages pages, std::size_t slab_bytes,
                                        std::size_t capacity);
  ~SlabPool();
  SlabPool(const SlabPool&) = delete;

  // Memory that is zero everywhere, of clean slabs, then of dirty ones, which are cleared now, then of new ones, whose
  // pages come at first touch. OsError(ENOMEM) if the pool may not grow so far. Its slabs come back, dirty, when
  // the last use of it in this process ends: nobody elsewhere may still read it then.
  Region take(std::size_t size_bytes);
  // The same, of which only the slabs at these positions are granted now. At the others lie sparse ones, which count
  // for nothing, and which nobody may touch before they are granted. Who attaches the region sees all of them.
  Region take_some(std::size_t size_bytes, const std::vector<std::size_t>& positions);
  // Grants these slabs too. Their pages come at first touch; free slabs give way where the capacity is reached, and
  // they do not come back to the pool. OsError(ENOMEM) if the pool may not grow so far: then none is granted.
  void grant(const Region& region, const std::vector<std::size_t>& positions);
  // Clears a dirty slab, or makes a new one with all its pages, until `wanted` are clean. One a call; false if
  // there was nothing to do.
  bool prepare(std::size_t wanted);
  // Gives free slabs back to the system, dirty ones first. How many.
  std::size_t release(std::size_t count);

  Counts counts() const;
  std::size_t slab_bytes() const { return slab_bytes_; }
  std::size_t capacity() const { return capacity_; }
  Pages pages() const { return backing_.pages(); }

 private:
  struct Slab {
    Descriptor descriptor;
    AddressRange addresses;  // where it lies in this process, as long as it lives
    bool populated = false;
    bool sparse = false;
    bool granted = true;  // counted
    std::shared_ptr<void> kept;  // what others made of the memory, such as its registration with a device
  };
  class SlabMapping;

  SlabPool(const std::string& name, Pages pages, std::size_t slab_bytes, std::size_t capacity);
  Slab make(bool sparse = false);
  Region take(std::size_t size_bytes, const std::vector<bool>& needed);
  std::size_t count_of(std::size_t size_bytes) const;
  void await_room(std::unique_lock<std::mutex>& lock, std::size_t count, const std::string& what);
  void grow(std::size_t count);
  void clear(const Slab& slab) const;
  void clear_all(const std::vector<Slab>& slabs) const;
  // `count` slabs are no longer used; those that are not among `slabs` are gone.
  void put_back(std::vector<Slab> slabs, std::size_t count) noexcept;

  const std::size_t slab_bytes_, capacity_;
  mutable std::mutex mutex_;  // of what follows, and of making files
  Backing backing_;
  std::vector<Slab> clean_, dirty_;
  std::size_t total_ = 0;      // used ones and those under way included
  std::size_t preparing_ = 0;  // under way in prepare()
  std::condition_variable prepared_;
};

}  // namespace fs
