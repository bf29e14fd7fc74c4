// Python bindings of the parts: each function adds one to the module.
#pragma once

#include <pybind11/pybind11.h>

void bind_memory(pybind11::module_& module);
void bind_decoder(pybind11::module_& module);
