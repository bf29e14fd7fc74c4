// Receives as the node's reader does, and hashes nothing: what is left without verification.
#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

// Returns how many of the bytes are there then, or a negative errno; 0 more than `begin` if the peer has closed.
long receive(int fd, char *data, size_t begin, size_t size) {
  size_t done = begin;
  while (done < size) {
    const size_t block = 256 * 1024, left = size - done;
    const ssize_t got = recv(fd, data + done, left < block ? left : block, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 && done > begin) break;
    if (got < 0) return -(long)errno;
    if (got == 0) break;
    done += (size_t)got;
  }
  return (long)done;
}
