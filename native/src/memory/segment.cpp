#include "segment.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <utility>

#include "errors.hpp"

// Older C libraries lack the names, not the kernels: 5.1 and 5.14.
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace fs {
namespace {

constexpr std::size_t kHugePageBytes = 2 * 1024 * 1024;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

// More than there are addresses; sums of two of them are far from where 64 bits wrap.
constexpr std::uint64_t kSizeMax = std::uint64_t{1} << 62;

// What a reader must be able to rely on. F_SEAL_SEAL only keeps others from adding seals.
constexpr int kNeededSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

std::atomic<bool> g_across_kernels{false};

int protection_of(Access access) { return access == Access::kReader ? PROT_READ : PROT_READ | PROT_WRITE; }

// Copies are the exception: without NORESERVE each reader would be charged for a copy of every page.
int flags_of(Access access) { return access == Access::kCopier ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED; }

void map_at(std::byte* address, std::size_t size_bytes, const Descriptor& descriptor, Access access) {
  const int flags = flags_of(access) | MAP_FIXED;
  if (::mmap(address, size_bytes, protection_of(access), flags, descriptor.get(), 0) == MAP_FAILED)
    throw_errno("mmap of " + std::to_string(size_bytes) + " bytes");
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    Descriptor previous(fd_);
    fd_ = other.release();
  }
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

int Descriptor::release() { return std::exchange(fd_, -1); }

AddressRange::AddressRange(std::size_t size_bytes) : data_(nullptr), size_bytes_(0) {
  if (size_bytes == 0) return;
  const std::size_t reserved = size_bytes + kHugePageBytes;
  void* const begin = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) throw_errno("addresses for " + std::to_string(size_bytes) + " bytes");
  auto* const first = static_cast<std::byte*>(begin);
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t skipped = -reinterpret_cast<std::uintptr_t>(first) % kHugePageBytes;
  size_bytes_ = (size_bytes + page - 1) / page * page;
  data_ = first + skipped;
  if (skipped > 0) ::munmap(first, skipped);
  if (skipped + size_bytes_ < reserved) ::munmap(data_ + size_bytes_, reserved - skipped - size_bytes_);
}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

AddressRange::~AddressRange() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
}

std::byte* Mapping::range(std::uint64_t offset, std::uint64_t size_bytes) const {
  if (offset > size_bytes_ || size_bytes > size_bytes_ - offset)
    throw std::out_of_range("offset " + std::to_string(offset) + " and " + std::to_string(size_bytes) +
                            " bytes lie outside a region of " + std::to_string(size_bytes_) + " bytes");
  return address(offset, size_bytes);
}

FileMapping::FileMapping(AddressRange addresses, std::size_t size_bytes, Access access)
    : Mapping(size_bytes, access), addresses_(std::move(addresses)) {}

FileMapping::FileMapping(const Descriptor& descriptor, std::size_t size_bytes, Access access)
    : Mapping(size_bytes, access), addresses_(size_bytes) {
  map_at(data(), size_bytes, descriptor, access);
}

Descriptor create_memory(const std::string& name, std::uint64_t size_bytes, unsigned flags) {
  if (size_bytes == 0 || size_bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    errno = EINVAL;
    throw_errno("shared memory of " + std::to_string(size_bytes) + " bytes");
  }
  Descriptor descriptor(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (descriptor.get() < 0) throw_errno("memfd_create of " + name);
  if (::ftruncate(descriptor.get(), static_cast<off_t>(size_bytes)) < 0)
    throw_errno("ftruncate of " + name + " to " + std::to_string(size_bytes) + " bytes");
  return descriptor;
}

void seal(const Descriptor& descriptor) {
  if (across_kernels()) return;  // what is made there is for nobody else
  if (::fcntl(descriptor.get(), F_ADD_SEALS, kSeals) < 0) throw_errno("sealing of shared memory");
}

void attach_across_kernels() { g_across_kernels.store(true); }

bool across_kernels() { return g_across_kernels.load(); }

std::uint64_t size_of(const Descriptor& descriptor) {
  struct stat status {};
  if (::fstat(descriptor.get(), &status) < 0) throw_errno("fstat of shared memory");
  return static_cast<std::uint64_t>(status.st_size);
}

std::uint64_t protected_size(const Descriptor& descriptor) {
  if (across_kernels()) return size_of(descriptor);
  const std::string name = "descriptor " + std::to_string(descriptor.get());
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0) throw_errno(name + " is not shared memory that can be sealed");
  if ((seals & kNeededSeals) != kNeededSeals) {
    struct statfs system {};
    const bool read_only = ::fstatfs(descriptor.get(), &system) == 0 && system.f_type == TMPFS_MAGIC &&
                           (system.f_flags & ST_RDONLY) != 0;
    if (!read_only) {
      errno = EPERM;
      throw_errno(name + " is shared memory without the seals against resizing and writing");
    }
  }
  return size_of(descriptor);
}

Region::Region(std::shared_ptr<Mapping> mapping, std::vector<int> fds)
    : mapping_(std::move(mapping)), fds_(std::move(fds)) {}

Region Region::attach(std::vector<Descriptor> descriptors, std::uint64_t size_bytes) {
  // Asked once: what is reserved is what is mapped over, whatever their maker does meanwhile.
  std::vector<std::size_t> part_bytes;
  std::uint64_t there = 0;
  for (const Descriptor& descriptor : descriptors) {
    part_bytes.push_back(protected_size(descriptor));
    there = std::min(kSizeMax, there + std::min<std::uint64_t>(kSizeMax, part_bytes.back()));
  }
  if (there < size_bytes || there == 0 || there == kSizeMax) {
    errno = EINVAL;
    throw_errno("shared memory of " + std::to_string(there) + " bytes for a region of " + std::to_string(size_bytes));
  }
  const auto mapped = [&](Access access) {
    AddressRange addresses(there);
    std::byte* at = addresses.data();
    for (std::size_t part = 0; part < descriptors.size(); at += part_bytes[part++])
      map_at(at, part_bytes[part], descriptors[part], access);
    return std::make_shared<FileMapping>(std::move(addresses), size_bytes, access);
  };
  Region region(mapped(Access::kCopier));
  region.reader_ = mapped(Access::kReader);  // addresses alone, until something reads there
  return region;
}

void populate_pages(std::byte* begin, std::size_t size_bytes, Access access) {
  const int advice = access == Access::kOwner ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  while (::madvise(begin, size_bytes, advice) < 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL) return;
    if (errno == EFAULT) errno = ENOMEM;  // what a memory limit says
    throw_errno("populating " + std::to_string(size_bytes) + " bytes");
  }
}

void Region::populate(std::uint64_t offset, std::uint64_t size_bytes) const {
  std::byte* const begin = mapping_->range(offset, size_bytes);
  if (size_bytes == 0) return;
  const std::uint64_t before = offset % static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  populate_pages(begin - before, size_bytes + before, mapping_->access());
}

}  // namespace fs
