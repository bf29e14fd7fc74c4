// Python bindings of the transports between peers; the only file of the folder that knows pybind11.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <unordered_map>

#include "../bind.hpp"
#include "tcp_reader.hpp"
#include "tcp_server.hpp"
#include "transport.hpp"

namespace py = pybind11;

namespace {

// Long enough for a machine that is short of processors, short beside what a caller waits for a model.
constexpr double kStallS = 10.0;
// For as long as the grant, unless its caller says otherwise.
constexpr double kIdleS = 1e6;

const char* name_of(fs::ReadStatus status) {
  switch (status) {
    case fs::ReadStatus::kOk: return "ok";
    case fs::ReadStatus::kNotReady: return "not_ready";
    case fs::ReadStatus::kGone: return "gone";
    case fs::ReadStatus::kRefused: return "refused";
    default: return "failed";
  }
}

// Holds the buffers that answers go to, for as long as they may.
class Reader {
 public:
  Reader(int fd, const std::optional<fs::Region>& region, double stall_s)
      : reader_(fd, region ? region->mapping() : nullptr, stall_s) {}
  fs::TcpReader& native() { return reader_; }

  void submit(const py::int_& request, const py::int_& offset, const py::int_& size_bytes, double wait_s) {
    reader_.submit(index_of(request), index_of(offset), index_of(size_bytes), wait_s);
  }
  void submit_into(const py::int_& request, const py::int_& offset, const py::object& into, double wait_s) {
    auto held = std::make_unique<HeldBuffer>(into, true);
    const std::uint64_t number = index_of(request);
    reader_.submit_to(held->data(), number, index_of(offset), held->size_bytes(), wait_s);
    held_[number] = std::move(held);
  }
  std::vector<fs::Completion> poll(double timeout_s) {
    std::vector<fs::Completion> completed;
    {
      const py::gil_scoped_release released;
      completed = reader_.poll(timeout_s, run_signal_handlers);
    }
    for (const fs::Completion& one : completed) held_.erase(one.request);
    return completed;
  }

 private:
  std::unordered_map<std::uint64_t, std::unique_ptr<HeldBuffer>> held_;  // under the GIL
  fs::TcpReader reader_;
};

}  // namespace

void bind_transport(py::module_& module) {
  py::class_<fs::Completion>(module, "Completion")
      .def_readonly("request", &fs::Completion::request)
      .def_property_readonly("status", [](const fs::Completion& completion) { return name_of(completion.status); })
      .def_readonly("checksum", &fs::Completion::checksum);

  py::class_<Reader>(module, "TcpReader")
      .def(py::init<int, const std::optional<fs::Region>&, double>(), py::arg("fd"), py::arg("region") = py::none(),
           py::arg("stall_s") = kStallS)
      .def("submit", &Reader::submit, py::arg("request"), py::arg("offset"), py::arg("size_bytes"),
           py::arg("wait_s") = 0.0)
      .def("submit_into", &Reader::submit_into, py::arg("request"), py::arg("offset"), py::arg("into"),
           py::arg("wait_s") = 0.0)
      .def("poll", &Reader::poll, py::arg("timeout_s"))
      .def("cancel", [](Reader& reader) { reader.native().cancel(); }, py::call_guard<py::gil_scoped_release>())
      .def("release", [](Reader& reader) { reader.native().release(); }, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("error", [](Reader& reader) { return reader.native().error(); });

  py::class_<fs::TcpServer>(module, "TcpServer")
      .def(py::init<int, const fs::Region&, const fs::ControlBlock&, std::uint64_t, fs::TcpServer::ChunkRanges, double>(),
           py::arg("fd"), py::arg("region"), py::arg("control"), py::arg("chunk_bytes"), py::arg("allowed"),
           py::arg("stall_s") = kStallS, py::keep_alive<1, 4>())
      .def(
          "run",
          [](fs::TcpServer& server, std::int64_t until_unix_ms, double idle_s) {
            const py::gil_scoped_release released;
            return server.run(until_unix_ms, idle_s, run_signal_handlers);
          },
          py::arg("until_unix_ms"), py::arg("idle_s") = kIdleS)
      .def("stop", &fs::TcpServer::stop)
      .def_property_readonly("sent_bytes", &fs::TcpServer::sent_bytes);
}
