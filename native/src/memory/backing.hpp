// What slabs of shared memory are made of: huge pages where the machine has them.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "segment.hpp"

namespace fs {

enum class Pages {
  kHugetlb,  // reserved huge pages of 2 MiB
  kThp,      // a tmpfs of our own that takes transparent huge pages
  kSmall,    // 4 KiB
};

class Backing {
 public:
  // OsError if the machine does not have such pages or does not let us have them.
  Backing(Pages pages, std::string name);

  // New zeroed memory, mapped shared and writable at that address. What is returned lets others map it, but
  // neither write nor resize it. `sparse` takes nothing of a reserve of huge pages before it is populated.
  Descriptor map_new(std::byte* address, std::size_t size_bytes, bool sparse = false);

  Pages pages() const { return pages_; }

 private:
  Descriptor map_new_file(std::byte* address, std::size_t size_bytes);
  Descriptor map_new_memfd(std::byte* address, std::size_t size_bytes, bool sparse);

  Pages pages_;
  std::string name_;
  // Two mounts of one tmpfs that stand nowhere in the file system and end with these descriptors: files are made
  // in the first, and opened for others in the second, which is read-only. Unlike a memfd's, its files cannot be sealed.
  Descriptor writable_, read_only_;
  std::size_t files_ = 0;
};

// Has the kernel gather pages that it gave singly, while memory was in pieces, into huge ones; what it cannot, it leaves.
void make_huge(std::byte* address, std::size_t size_bytes);

// Whether a populated mapping at that address consists of huge pages, by /proc/self/smaps.
bool is_huge(const std::byte* address, std::size_t size_bytes);

}  // namespace fs
