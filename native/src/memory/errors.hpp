// Exceptions of the memory package. bind.cpp turns each into one Python exception.
#pragma once

#include <stdexcept>
#include <string>

namespace fs {

// NativeError in Python: what is not a matter of the system, of time or of an argument.
class NativeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// SegmentFailed(code, message) in Python, a NativeError.
class SegmentFailed : public NativeError {
 public:
  SegmentFailed(std::string code_, std::string message_);
  std::string code;
  std::string message;
};

// OSError(errno, text) in Python, or the subclass that the number asks for.
class OsError : public std::runtime_error {
 public:
  OsError(int number_, const std::string& text) : std::runtime_error(text), number(number_) {}
  int number;
};

// TimeoutError in Python.
class TimedOut : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// EOFError in Python.
class EndOfFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws OsError with the calling thread's errno, "what: strerror".
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace fs
