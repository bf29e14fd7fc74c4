#include "segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

// What a reader must be able to rely on. F_SEAL_SEAL only keeps others from adding seals.
constexpr int kNeededSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

int protection_of(Access access) { return access == Access::kReader ? PROT_READ : PROT_READ | PROT_WRITE; }

// Copies are the exception: without NORESERVE each reader would be charged for a copy of every page.
int flags_of(Access access) { return access == Access::kCopier ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED; }

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

Mapping::Mapping(const Descriptor& descriptor, std::size_t size_bytes, Access access)
    : size_bytes_(size_bytes), access_(access) {
  void* const address =
      ::mmap(nullptr, size_bytes, protection_of(access), flags_of(access), descriptor.get(), 0);
  if (address == MAP_FAILED) throw_errno("mmap of " + std::to_string(size_bytes) + " bytes");
  data_ = static_cast<std::byte*>(address);
}

Mapping::~Mapping() { ::munmap(data_, size_bytes_); }

std::byte* Mapping::range(std::uint64_t offset, std::uint64_t size_bytes) const {
  if (offset > size_bytes_ || size_bytes > size_bytes_ - offset)
    throw std::out_of_range("offset " + std::to_string(offset) + " and " + std::to_string(size_bytes) +
                            " bytes lie outside a region of " + std::to_string(size_bytes_) + " bytes");
  return data_ + offset;
}

Descriptor create_memory(const std::string& name, std::uint64_t size_bytes) {
  if (size_bytes == 0 || size_bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    errno = EINVAL;
    throw_errno("shared memory of " + std::to_string(size_bytes) + " bytes");
  }
  Descriptor descriptor(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (descriptor.get() < 0) throw_errno("memfd_create of " + name);
  if (::ftruncate(descriptor.get(), static_cast<off_t>(size_bytes)) < 0)
    throw_errno("ftruncate of " + name + " to " + std::to_string(size_bytes) + " bytes");
  return descriptor;
}

void seal(const Descriptor& descriptor) {
  if (::fcntl(descriptor.get(), F_ADD_SEALS, kSeals) < 0) throw_errno("sealing of shared memory");
}

std::uint64_t sealed_size(const Descriptor& descriptor) {
  const std::string name = "descriptor " + std::to_string(descriptor.get());
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0) throw_errno(name + " is not shared memory that can be sealed");
  if ((seals & kNeededSeals) != kNeededSeals) {
    errno = EPERM;
    throw_errno(name + " is shared memory without the seals against resizing and writing");
  }
  struct stat status {};
  if (::fstat(descriptor.get(), &status) < 0) throw_errno("fstat of shared memory");
  return static_cast<std::uint64_t>(status.st_size);
}

Region::Region(Descriptor descriptor, std::shared_ptr<Mapping> mapping)
    : descriptor_(std::move(descriptor)), mapping_(std::move(mapping)) {}

Region Region::create(const std::string& name, std::uint64_t size_bytes) {
  Descriptor descriptor = create_memory(name, size_bytes);
  auto mapping = std::make_shared<Mapping>(descriptor, size_bytes, Access::kOwner);
  seal(descriptor);
  return Region(std::move(descriptor), std::move(mapping));
}

Region Region::attach(Descriptor descriptor) {
  const std::uint64_t size_bytes = sealed_size(descriptor);
  auto mapping = std::make_shared<Mapping>(descriptor, size_bytes, Access::kCopier);
  return Region(std::move(descriptor), std::move(mapping));
}

void Region::populate(std::uint64_t offset, std::uint64_t size_bytes) const {
  std::byte* const begin = mapping_->range(offset, size_bytes);
  if (size_bytes == 0) return;
  const std::uint64_t page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t before = offset % page_bytes;
  const int advice = mapping_->access() == Access::kOwner ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  while (::madvise(begin - before, size_bytes + before, advice) < 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL) return;  // a kernel before 5.14: first touch does the work, later
    throw_errno("populating " + std::to_string(size_bytes) + " bytes");
  }
}

}  // namespace fs
