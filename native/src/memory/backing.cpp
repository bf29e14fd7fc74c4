#include "backing.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <fstream>
#include <thread>
#include <utility>

#include "errors.hpp"

// Since kernel 5.2 and 5.12; the numbers are the same everywhere, and older headers lack them.
#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif

// Since kernel 6.1.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace fs {
namespace {

constexpr unsigned kOpenTreeClone = 1;         // OPEN_TREE_CLONE
constexpr unsigned kMoveFromEmptyPath = 4;     // MOVE_MOUNT_F_EMPTY_PATH
constexpr unsigned kSetString = 1, kCreate = 6;  // FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE
constexpr std::uint64_t kReadOnly = 1;         // MOUNT_ATTR_RDONLY

struct MountAttributes {  // struct mount_attr
  std::uint64_t set, clear, propagation, user_namespace;
};

int checked(long result, const char* what) {
  if (result < 0) throw_errno(what);
  return static_cast<int>(result);
}

constexpr unsigned kHugePages2MiB = 21u << 26;  // MFD_HUGE_2MB: the default size may be another

Descriptor mount_tmpfs() {
  const Descriptor context(checked(::syscall(SYS_fsopen, "tmpfs", 1), "fsopen of tmpfs"));
  const auto set = [&](const char* key, const std::string& value) {
    checked(::syscall(SYS_fsconfig, context.get(), kSetString, key, value.c_str(), 0), "options of tmpfs");
  };
  set("huge", "always");
  set("size", "0");  // no limit of its own, past which a touch would be SIGBUS: who makes slabs counts them
  set("mode", "0700");
  checked(::syscall(SYS_fsconfig, context.get(), kCreate, nullptr, nullptr, 0), "making of tmpfs");
  return Descriptor(checked(::syscall(SYS_fsmount, context.get(), 1, 0), "mounting of tmpfs"));
}

// Only what is mounted somewhere can be mounted a second time. So a thread gets a mount namespace of its own, in which
// nobody sees it, and which ends with the thread.
Descriptor clone_read_only(const Descriptor& mount) {
  Descriptor clone;
  std::exception_ptr failure;
  std::thread([&] {
    try {
      checked(::unshare(CLONE_FS | CLONE_NEWNS), "a mount namespace");
      MountAttributes privately{0, 0, 1 << 18 /* MS_PRIVATE */, 0};
      checked(::syscall(SYS_mount_setattr, AT_FDCWD, "/", AT_RECURSIVE, &privately, sizeof privately),
              "a private mount namespace");
      checked(::syscall(SYS_move_mount, mount.get(), "", AT_FDCWD, "/", kMoveFromEmptyPath), "placing of tmpfs");
      clone = Descriptor(checked(
          ::syscall(SYS_open_tree, mount.get(), "", AT_EMPTY_PATH | kOpenTreeClone | O_CLOEXEC), "cloning of tmpfs"));
      MountAttributes read_only{kReadOnly, 0, 0, 0};
      checked(::syscall(SYS_mount_setattr, clone.get(), "", AT_EMPTY_PATH, &read_only, sizeof read_only),
              "a read-only mount");
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
  return clone;
}

}  // namespace

Backing::Backing(Pages pages, std::string name) : pages_(pages), name_(std::move(name)) {
  if (pages != Pages::kThp) return;
  writable_ = mount_tmpfs();
  read_only_ = clone_read_only(writable_);
}

Descriptor Backing::map_new(std::byte* address, std::size_t size_bytes, bool sparse) {
  return pages_ == Pages::kThp ? map_new_file(address, size_bytes) : map_new_memfd(address, size_bytes, sparse);
}

Descriptor Backing::map_new_memfd(std::byte* address, std::size_t size_bytes, bool sparse) {
  Descriptor descriptor = create_memory(name_, size_bytes, pages_ == Pages::kHugetlb ? MFD_HUGETLB | kHugePages2MiB : 0);
  const int flags = MAP_SHARED | MAP_FIXED | (sparse ? MAP_NORESERVE : 0);
  void* const mapped = ::mmap(address, size_bytes, PROT_READ | PROT_WRITE, flags, descriptor.get(), 0);
  if (mapped == MAP_FAILED) throw_errno("mapping of " + std::to_string(size_bytes) + " bytes");
  seal(descriptor);
  return descriptor;
}

Descriptor Backing::map_new_file(std::byte* address, std::size_t size_bytes) {
  const std::string file = "./" + name_ + "-" + std::to_string(files_++);  // never an absolute path
  const Descriptor descriptor(
      checked(::openat(writable_.get(), file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600), "a slab's file"));
  Descriptor readable(::openat(read_only_.get(), file.c_str(), O_RDONLY | O_CLOEXEC));
  const int error = errno;
  ::unlinkat(writable_.get(), file.c_str(), 0);  // its memory goes with the last that has it open or mapped
  errno = error;
  checked(readable.get(), "a slab's file for others");
  checked(::ftruncate(descriptor.get(), static_cast<off_t>(size_bytes)), "a slab's size");
  void* const mapped =
      ::mmap(address, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor.get(), 0);
  if (mapped == MAP_FAILED) throw_errno("mapping of " + std::to_string(size_bytes) + " bytes");
  ::madvise(address, size_bytes, MADV_HUGEPAGE);  // worth some work to the kernel, where memory is in pieces
  return readable;
}

void make_huge(std::byte* address, std::size_t size_bytes) { ::madvise(address, size_bytes, MADV_COLLAPSE); }

bool is_huge(const std::byte* address, std::size_t size_bytes) {
  char begin[32];
  std::snprintf(begin, sizeof begin, "%lx-", reinterpret_cast<unsigned long>(address));
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  while (std::getline(smaps, line) && line.rfind(begin, 0) != 0) continue;
  std::size_t huge_kib = 0, found = 0;
  while (std::getline(smaps, line) && line.rfind("VmFlags:", 0) != 0)
    for (const char* const field : {"ShmemPmdMapped: %zu", "FilePmdMapped: %zu", "Shared_Hugetlb: %zu",
                                    "Private_Hugetlb: %zu"})
      if (std::sscanf(line.c_str(), field, &found) == 1) huge_kib += found;
  return huge_kib * 1024 >= size_bytes;
}

}  // namespace fs
