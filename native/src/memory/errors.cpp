#include "errors.hpp"

#include <cerrno>
#include <system_error>
#include <utility>

namespace fs {

SegmentFailed::SegmentFailed(std::string code_, std::string message_)
    : NativeError(code_ + ": " + message_), code(std::move(code_)), message(std::move(message_)) {}

void throw_errno(const std::string& what) {
  const int number = errno;
  throw OsError(number, what + ": " + std::generic_category().message(number));
}

}  // namespace fs
