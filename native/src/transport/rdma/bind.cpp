// The Python module fleetstart.native._rdma, which is built where libibverbs is and imports where it is installed; the
// only file of RDMA that knows pybind11. Regions and control blocks are those of fleetstart.native._core.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <system_error>

#include "../../memory/errors.hpp"
#include "reader.hpp"
#include "server.hpp"

namespace py = pybind11;
namespace rdma = fs::rdma;

namespace {

constexpr double kConnectS = 5.0, kSilenceS = 0.8, kStallS = 10.0;
constexpr std::uint8_t kPacketTimeout = 19;

void handle_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void bind_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const fs::NativeError& error) {
      PyErr_SetString(py::module_::import("fleetstart.native._core").attr("NativeError").ptr(), error.what());
    } catch (const fs::OsError& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.number, error.what()).ptr());
    } catch (const std::system_error& error) {  // no more threads
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
}

void bind_memory(py::module_& module) {
  using rdma::Device;
  using rdma::Memory;
  py::class_<Device, std::shared_ptr<Device>>(module, "RdmaDevice")
      .def(py::init<const std::string&, std::uint8_t>(), py::arg("name"), py::arg("port") = 1)
      .def_property_readonly("name", &Device::name)
      .def_property_readonly("active", &Device::active)
      .def_property_readonly("link", [](const Device& device) { return device.ethernet() ? "ethernet" : "infiniband"; })
      .def_property_readonly("has_windows", &Device::has_windows)
      .def_property_readonly("registered_bytes", &Device::registered_bytes)
      .def_property_readonly("mtu_bytes", [](const Device& device) { return 128 << device.mtu(); });
  py::class_<Memory, std::shared_ptr<Memory>>(module, "RdmaMemory")
      .def(py::init<std::shared_ptr<Device>>(), py::arg("device"))
      .def("add", &Memory::add, py::arg("region"), py::arg("offset"), py::arg("size_bytes"),
           py::call_guard<py::gil_scoped_release>());
}

void bind_reader(py::module_& module) {
  using rdma::Reader;
  py::class_<Reader>(module, "RdmaReader")
      .def(py::init([](int fd, std::shared_ptr<rdma::Memory> memory, double connect_s, double silence_s, double stall_s,
                       std::uint8_t packet_timeout) {
             const py::gil_scoped_release released;
             const rdma::Timing timing{connect_s, silence_s, packet_timeout};
             return std::make_unique<Reader>(fd, std::move(memory), timing, stall_s);
           }),
           py::arg("fd"), py::arg("memory"), py::kw_only(), py::arg("connect_s") = kConnectS,
           py::arg("silence_s") = kSilenceS, py::arg("stall_s") = kStallS, py::arg("packet_timeout") = kPacketTimeout)
      .def("submit", &Reader::submit, py::arg("request"), py::arg("offset"), py::arg("size_bytes"),
           py::arg("wait_s") = 0.0)
      .def(
          "poll",
          [](Reader& reader, double timeout_s) {
            const py::gil_scoped_release released;
            return reader.poll(timeout_s, handle_signals);
          },
          py::arg("timeout_s"))
      .def("cancel", &Reader::cancel)
      .def_property_readonly("error", &Reader::error);
}

void bind_server(py::module_& module) {
  using rdma::Server;
  py::class_<Server>(module, "RdmaServer")
      .def(py::init([](int fd, std::shared_ptr<rdma::Memory> memory, const fs::ControlBlock& control,
                       std::uint64_t chunk_bytes, Server::ChunkRanges allowed, double connect_s, double silence_s,
                       std::uint8_t packet_timeout) {
             const rdma::Timing timing{connect_s, silence_s, packet_timeout};
             return std::make_unique<Server>(fd, std::move(memory), control, chunk_bytes, std::move(allowed), timing);
           }),
           py::arg("fd"), py::arg("memory"), py::arg("control"), py::arg("chunk_bytes"), py::arg("allowed"),
           py::kw_only(), py::arg("connect_s") = kConnectS, py::arg("silence_s") = kSilenceS,
           py::arg("packet_timeout") = kPacketTimeout, py::keep_alive<1, 4>())
      .def(
          "run",
          [](Server& server, std::int64_t until_unix_ms) {
            const py::gil_scoped_release released;
            return server.run(until_unix_ms, handle_signals);
          },
          py::arg("until_unix_ms"))
      .def("stop", &Server::stop)
      .def_property_readonly("ready_bytes", &Server::ready_bytes);
}

}  // namespace

PYBIND11_MODULE(_rdma, module) {
  py::module_::import("fleetstart.native._core");
  bind_errors();
  bind_memory(module);
  bind_reader(module);
  bind_server(module);
  module.def("device_names", &rdma::Device::names);
}
