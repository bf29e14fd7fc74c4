// Python bindings of the parts: each function adds one to the module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

void bind_memory(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_decoder(pybind11::module_& module);

// Python's, in a call that has released the GIL. What a handler raised is thrown.
void run_signal_handlers();

// An index or size from Python. IndexError if it is negative or too long for 64 bits: outside of everything.
std::uint64_t index_of(const pybind11::int_& value);

// A contiguous buffer, held for as long as this lives: its owner can neither free nor resize it meanwhile.
class HeldBuffer {
 public:
  HeldBuffer(const pybind11::object& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw pybind11::error_already_set();
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;
  ~HeldBuffer() { PyBuffer_Release(&view_); }
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  std::size_t size_bytes() const { return static_cast<std::size_t>(view_.len); }
  bool readonly() const { return view_.readonly != 0; }

 private:
  Py_buffer view_{};
};
