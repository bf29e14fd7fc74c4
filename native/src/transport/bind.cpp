// Python bindings of the transports between peers; the only file of the folder that knows pybind11.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../bind.hpp"
#include "tcp_reader.hpp"
#include "tcp_server.hpp"
#include "transport.hpp"

namespace py = pybind11;

namespace {

// Long enough for a machine that is short of processors, short beside what a caller waits for a model.
constexpr double kStallS = 10.0;

const char* name_of(fs::ReadStatus status) {
  switch (status) {
    case fs::ReadStatus::kOk: return "ok";
    case fs::ReadStatus::kNotReady: return "not_ready";
    case fs::ReadStatus::kGone: return "gone";
    case fs::ReadStatus::kRefused: return "refused";
    default: return "failed";
  }
}

}  // namespace

void bind_transport(py::module_& module) {
  py::class_<fs::Completion>(module, "Completion")
      .def_readonly("request", &fs::Completion::request)
      .def_property_readonly("status", [](const fs::Completion& completion) { return name_of(completion.status); })
      .def_readonly("checksum", &fs::Completion::checksum);

  py::class_<fs::TcpReader>(module, "TcpReader")
      .def(py::init<int, const fs::Region&, double>(), py::arg("fd"), py::arg("region"), py::arg("stall_s") = kStallS)
      .def(
          "submit",
          [](fs::TcpReader& reader, const py::int_& request, const py::int_& offset, const py::int_& size_bytes,
             double wait_s) { reader.submit(index_of(request), index_of(offset), index_of(size_bytes), wait_s); },
          py::arg("request"), py::arg("offset"), py::arg("size_bytes"), py::arg("wait_s") = 0.0)
      .def(
          "poll",
          [](fs::TcpReader& reader, double timeout_s) {
            const py::gil_scoped_release released;
            return reader.poll(timeout_s, run_signal_handlers);
          },
          py::arg("timeout_s"))
      .def("cancel", &fs::TcpReader::cancel, py::call_guard<py::gil_scoped_release>())
      .def("release", &fs::TcpReader::release, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("error", &fs::TcpReader::error);

  py::class_<fs::TcpServer>(module, "TcpServer")
      .def(py::init<int, const fs::Region&, const fs::ControlBlock&, std::uint64_t, fs::TcpServer::ChunkRanges, double>(),
           py::arg("fd"), py::arg("region"), py::arg("control"), py::arg("chunk_bytes"), py::arg("allowed"),
           py::arg("stall_s") = kStallS, py::keep_alive<1, 4>())
      .def(
          "run",
          [](fs::TcpServer& server, std::int64_t until_unix_ms) {
            const py::gil_scoped_release released;
            return server.run(until_unix_ms, run_signal_handlers);
          },
          py::arg("until_unix_ms"))
      .def("stop", &fs::TcpServer::stop)
      .def_property_readonly("sent_bytes", &fs::TcpServer::sent_bytes);
}
