// Mappings of shared memory, and a segment's region: memory that outlives whoever made it, as long as it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fs {

// For a process whose kernel is not its owner's (gVisor): there are no such seals there, and no wake-up crosses, so that
// waits look often. For all that is attached afterwards; never taken back.
void attach_across_kernels();
bool across_kernels();

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();
  int get() const { return fd_; }
  int release();

 private:
  int fd_;
};

enum class Access {
  kOwner,   // shared and writable: what is written here is what everybody sees
  kReader,  // shared and read-only
  kCopier,  // private and writable: a write copies its page for this process alone
};

// Addresses of this process, reserved, aligned to a huge page; what is mapped over them goes with them.
class AddressRange {
 public:
  explicit AddressRange(std::size_t size_bytes);
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  AddressRange(const AddressRange&) = delete;
  ~AddressRange();
  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
  std::size_t size_bytes_;
};

// Shared memory as this process sees it.
class Mapping {
 public:
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  virtual ~Mapping() = default;
  std::size_t size_bytes() const { return size_bytes_; }
  Access access() const { return access_; }

  // Where that range lies. IndexError (std::out_of_range) unless it lies inside, and in one piece.
  std::byte* range(std::uint64_t offset, std::uint64_t size_bytes) const;

  // The piece of reused memory that the range begins in. What `kept` points to is its users' to set: it lives as long
  // as the piece does, longer than this mapping. None where memory goes with its mapping.
  struct Piece {
    std::byte* begin;
    std::size_t size_bytes;
    std::shared_ptr<void>* kept;
  };
  virtual std::optional<Piece> piece(std::uint64_t /*offset*/) { return std::nullopt; }

  // From here on its memory goes to nobody else, not even when this is gone: the kernel may still be reading it.
  virtual void never_reuse() {}

 protected:
  Mapping(std::size_t size_bytes, Access access) : size_bytes_(size_bytes), access_(access) {}

 private:
  virtual std::byte* address(std::uint64_t offset, std::uint64_t size_bytes) const = 0;

  std::size_t size_bytes_;
  Access access_;
};

// The first bytes of an address range that files are mapped over, or of one descriptor.
class FileMapping : public Mapping {
 public:
  FileMapping(AddressRange addresses, std::size_t size_bytes, Access access);
  FileMapping(const Descriptor& descriptor, std::size_t size_bytes, Access access);
  std::byte* data() const { return addresses_.data(); }

 private:
  std::byte* address(std::uint64_t offset, std::uint64_t) const override { return data() + offset; }

  AddressRange addresses_;
};

// A memfd of that size, not sealed yet: its creator maps it, then seals it. `flags` as of memfd_create.
Descriptor create_memory(const std::string& name, std::uint64_t size_bytes, unsigned flags = 0);

// From here on nobody resizes it, nobody but the mappings that exist may write, and nobody unseals it.
void seal(const Descriptor& descriptor);

// Size of memory that whoever has this descriptor can neither write nor shrink under its readers, who would die of
// SIGBUS: a sealed memfd, or a file of a read-only mount of shared memory, whose maker is trusted not to resize it by
// another mount. OsError if it is anything else.
std::uint64_t protected_size(const Descriptor& descriptor);

// Maps the pages now, in one call, instead of one fault each at first touch. OsError(ENOMEM) if memory is short.
// A kernel before 5.14 leaves it to the first touch.
void populate_pages(std::byte* begin, std::size_t size_bytes, Access access);

class Region {
 public:
  explicit Region(std::shared_ptr<Mapping> mapping, std::vector<int> fds = {});
  // Maps what another process's region is made of, `size_bytes` of it.
  static Region attach(std::vector<Descriptor> descriptors, std::uint64_t size_bytes);
  // What makes this region elsewhere; they belong to the mapping. None in a reader, who keeps no descriptor.
  const std::vector<int>& fds() const { return fds_; }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  // The same memory. Of an attached region it is mapped shared and read-only: such pages can be pinned as they are, where
  // those of a private mapping are copied first. Of the owner it is its own, writable mapping.
  Region reader() const { return Region(reader_ == nullptr ? mapping_ : reader_); }

  // populate_pages of the range. To a reader only worth it where it is filled: a hole would become a page of zeroes
  // at its expense.
  void populate(std::uint64_t offset, std::uint64_t size_bytes) const;

 private:
  std::shared_ptr<Mapping> mapping_;
  std::shared_ptr<Mapping> reader_;
  std::vector<int> fds_;
};

}  // namespace fs
