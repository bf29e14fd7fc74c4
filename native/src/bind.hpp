// Python bindings of the parts: each function adds one to the module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

void bind_memory(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_decoder(pybind11::module_& module);

// Python's, in a call that has released the GIL. What a handler raised is thrown.
void run_signal_handlers();

// An index or size from Python. IndexError if it is negative or too long for 64 bits: outside of everything.
std::uint64_t index_of(const pybind11::int_& value);
