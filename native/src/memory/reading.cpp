#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>

#include "checksum.hpp"
#include "errors.hpp"

// Kernel 6.5; older headers lack the number, which is the same everywhere.
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

namespace fs {
namespace {

// Small enough that what pread wrote is still in L2 when it is hashed; 64 to 512 KiB measure alike.
constexpr std::size_t kReadBlockBytes = 256 * 1024;

void check_range(std::int64_t file_offset, std::size_t size_bytes) {
  if (file_offset >= 0 &&
      size_bytes <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max() - file_offset))
    return;
  errno = EINVAL;
  throw_errno("read of " + std::to_string(size_bytes) + " bytes at offset " + std::to_string(file_offset));
}

// At most `wanted` bytes; none at the end of the file.
std::size_t read_some(int fd, std::int64_t file_offset, std::byte* destination, std::size_t wanted,
                      const std::function<void()>& interrupted) {
  for (;;) {
    const ssize_t got = ::pread(fd, destination, wanted, file_offset);
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno != EINTR) throw_errno("read at offset " + std::to_string(file_offset));
    interrupted();
  }
}

[[noreturn]] void throw_end(std::int64_t file_offset, std::size_t size_bytes, std::size_t there) {
  throw EndOfFile(std::to_string(size_bytes) + " bytes wanted at offset " + std::to_string(file_offset) +
                  ", the file has " + std::to_string(there) + " there");
}

}  // namespace

std::uint64_t read_checksum(int fd, std::int64_t file_offset, std::byte* destination, std::size_t size_bytes,
                            const std::function<void()>& interrupted) {
  check_range(file_offset, size_bytes);
  Xxh3 hash(destination, size_bytes);
  for (std::size_t done = 0; done < size_bytes;) {
    const std::size_t got = read_some(fd, file_offset + static_cast<std::int64_t>(done), destination + done,
                                      std::min(kReadBlockBytes, size_bytes - done), interrupted);
    if (got == 0) throw_end(file_offset, size_bytes, done);
    done += got;
    hash.advance(done);
  }
  return hash.digest();
}

std::uint64_t read_direct(int fd, std::int64_t file_offset, std::byte* destination, std::size_t size_bytes,
                          std::size_t room_bytes, const std::function<void()>& interrupted) {
  check_range(file_offset, room_bytes);
  std::size_t done = 0;
  while (done < size_bytes) {
    const std::size_t got = read_some(fd, file_offset + static_cast<std::int64_t>(done), destination + done,
                                      room_bytes - done, interrupted);
    done += got;
    // Only the end of a file is no multiple of its blocks.
    if (got == 0 || (done < size_bytes && got % 512 != 0)) throw_end(file_offset, size_bytes, done);
  }
  if (done > size_bytes) std::memset(destination + size_bytes, 0, done - size_bytes);
  return xxh3(destination, size_bytes);
}

std::size_t receive(int fd, Xxh3& hash, std::byte* destination, std::size_t begin, std::size_t size_bytes,
                    double slice_s, const std::function<void()>& interrupted) {
  const auto ends = std::chrono::steady_clock::now() + std::chrono::duration<double>(slice_s);
  std::size_t done = begin;
  while (done < size_bytes) {
    const ssize_t got = ::recv(fd, destination + done, std::min(kReadBlockBytes, size_bytes - done), MSG_WAITALL);
    if (got < 0 && errno == EINTR) {
      interrupted();
      continue;
    }
    const bool late = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (got < 0 && !late) throw_errno("receiving");
    if (got <= 0 && done > begin) break;  // what came is told first; it will be the same the next time
    if (late) throw TimedOut("no byte came");
    if (got == 0) throw EndOfFile("the peer closed after " + std::to_string(done) + " bytes");
    done += static_cast<std::size_t>(got);
    hash.advance(done);
    if (std::chrono::steady_clock::now() >= ends) break;
  }
  return done;
}

std::uint64_t cached_bytes(int fd, std::uint64_t file_offset, std::uint64_t size_bytes) {
  if (size_bytes == 0) return 0;  // to the kernel: to the end of the file
  struct {
    std::uint64_t offset, size_bytes;
  } range{file_offset, size_bytes};
  struct {
    std::uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } pages{};
  if (::syscall(SYS_cachestat, fd, &range, &pages, 0) < 0) return 0;
  return std::min(size_bytes, pages.cached * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
}

}  // namespace fs
