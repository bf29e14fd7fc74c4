// The Python module fleetstart.native._core, of the parts' bindings.
#include "bind.hpp"

PYBIND11_MODULE(_core, module) {
  bind_memory(module);
  bind_transport(module);
  bind_decoder(module);
}
