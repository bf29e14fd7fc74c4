// Python bindings of shared memory, checksums and direct reads; the only file of the folder that knows pybind11.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <system_error>

#include "../bind.hpp"
#include "checksum.hpp"
#include "control.hpp"
#include "dlpack.hpp"
#include "errors.hpp"
#include "pool.hpp"
#include "segment.hpp"

namespace py = pybind11;

void run_signal_handlers() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// An index or size from Python: one that is negative or too long for 64 bits is outside of everything.
std::uint64_t index_of(const py::int_& value) {
  const unsigned long long index = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred() == nullptr) return index;
  PyErr_Clear();
  throw py::index_error(py::str(value).cast<std::string>() + " is outside");
}

namespace {

// What a memoryview over a region holds on to.
struct Bytes {
  std::shared_ptr<fs::Mapping> mapping;
  std::byte* data;
  std::size_t size_bytes;
};

py::buffer_info buffer_of(const Bytes& bytes) {
  const bool readonly = bytes.mapping->access() != fs::Access::kOwner;
  return py::buffer_info(reinterpret_cast<std::uint8_t*>(bytes.data), static_cast<py::ssize_t>(bytes.size_bytes),
                         readonly);
}

py::object view(const fs::Region& region, const py::int_& offset, const py::int_& size_bytes) {
  const std::uint64_t size = index_of(size_bytes);
  std::byte* const data = region.mapping()->range(index_of(offset), size);
  const py::object bytes = py::cast(Bytes{region.mapping(), data, size});
  PyObject* const made = PyMemoryView_FromObject(bytes.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// Runs when a capsule dies that nobody consumed; a consumer renames it and deletes the tensor itself.
void destroy_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  fs::delete_dlpack(static_cast<fs::DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

py::object dlpack(const fs::Region& region, const py::int_& offset, const std::vector<std::int64_t>& shape,
                  const std::string& dtype) {
  fs::DLManagedTensor* const tensor = fs::make_dlpack(region.mapping(), index_of(offset), shape, dtype);
  PyObject* const capsule = PyCapsule_New(tensor, "dltensor", destroy_capsule);
  if (capsule == nullptr) {
    fs::delete_dlpack(tensor);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

std::uint64_t xxh3(const py::object& data) {
  const HeldBuffer held(data, false);
  const py::gil_scoped_release released;
  return fs::xxh3(held.data(), held.size_bytes());
}

std::uint64_t read_checksum(int fd, std::int64_t file_offset, const py::object& destination) {
  const HeldBuffer to(destination, true);
  const py::gil_scoped_release released;
  return fs::read_checksum(fd, file_offset, to.data(), to.size_bytes(), run_signal_handlers);
}

std::uint64_t read_direct(int fd, std::int64_t file_offset, const py::object& destination, std::size_t size_bytes) {
  const HeldBuffer to(destination, true);
  if (size_bytes > to.size_bytes())
    throw py::value_error(std::to_string(size_bytes) + " bytes do not fit into a destination of " +
                          std::to_string(to.size_bytes()));
  const py::gil_scoped_release released;
  return fs::read_direct(fd, file_offset, to.data(), size_bytes, to.size_bytes(), run_signal_handlers);
}

// Hashes a buffer that fills from its beginning; see fs::Xxh3.
class Checksum {
 public:
  explicit Checksum(const py::object& data) : held_(data, false), hash_(held_.data(), held_.size_bytes()) {}
  void advance(std::size_t ready_bytes) {
    if (ready_bytes > held_.size_bytes())
      throw py::value_error(std::to_string(ready_bytes) + " bytes of a buffer of " + std::to_string(held_.size_bytes()));
    hash_.advance(ready_bytes);
  }
  std::uint64_t digest() const { return hash_.digest(); }
  std::size_t receive(int fd, std::size_t begin, double slice_s) {
    if (held_.readonly()) throw py::buffer_error("the buffer is read-only");
    const py::gil_scoped_release released;
    return fs::receive(fd, hash_, held_.data(), begin, held_.size_bytes(), slice_s, run_signal_handlers);
  }

 private:
  HeldBuffer held_;
  fs::Xxh3 hash_;
};

fs::Pages pages_named(const std::string& name) {
  if (name == "hugetlb") return fs::Pages::kHugetlb;
  if (name == "thp") return fs::Pages::kThp;
  if (name == "small") return fs::Pages::kSmall;
  throw py::value_error("pages are hugetlb, thp or small, not " + name);
}

const char* name_of(fs::Pages pages) {
  switch (pages) {
    case fs::Pages::kHugetlb: return "hugetlb";
    case fs::Pages::kThp: return "thp";
    default: return "small";
  }
}

const char* name_of(fs::SegmentState state) {
  switch (state) {
    case fs::SegmentState::kFilling: return "filling";
    case fs::SegmentState::kReady: return "ready";
    default: return "failed";
  }
}

// A broken or hostile owner may have written what is no UTF-8.
py::object text_of(const std::string& bytes) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "replace"));
}

void bind_errors(py::module_& module) {
  static PyObject* const native_error = PyErr_NewExceptionWithDoc(
      "fleetstart.native.NativeError", "Base of every error of this module.", nullptr, nullptr);
  static PyObject* const segment_failed =
      PyErr_NewExceptionWithDoc("fleetstart.native.SegmentFailed", "The segment's owner gave up filling it.",
                                native_error, nullptr);
  module.add_object("NativeError", native_error);
  module.add_object("SegmentFailed", segment_failed);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const fs::SegmentFailed& error) {
      PyErr_SetObject(segment_failed, py::make_tuple(text_of(error.code), text_of(error.message)).ptr());
    } catch (const fs::NativeError& error) {
      PyErr_SetString(native_error, error.what());
    } catch (const fs::OsError& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.number, error.what()).ptr());
    } catch (const std::system_error& error) {  // no more threads
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    } catch (const fs::TimedOut& error) {
      PyErr_SetString(PyExc_TimeoutError, error.what());
    } catch (const fs::EndOfFile& error) {
      PyErr_SetString(PyExc_EOFError, error.what());
    }
  });
}

void bind_region(py::module_& module) {
  py::class_<Bytes>(module, "_Bytes", py::buffer_protocol()).def_buffer(&buffer_of);
  py::class_<fs::Region>(module, "Region")
      .def_static(
          "attach",
          [](const std::vector<int>& fds, std::uint64_t size_bytes) {
            std::vector<fs::Descriptor> descriptors;
            for (const int fd : fds) descriptors.emplace_back(fd);
            return fs::Region::attach(std::move(descriptors), size_bytes);
          },
          py::arg("fds"), py::arg("size_bytes"))
      .def_property_readonly("fds", &fs::Region::fds)
      .def_property_readonly("size_bytes", [](const fs::Region& region) { return region.mapping()->size_bytes(); })
      .def_property_readonly("reader", &fs::Region::reader)
      .def("view", &view, py::arg("offset"), py::arg("size_bytes"))
      .def("dlpack", &dlpack, py::arg("offset"), py::arg("shape"), py::arg("dtype"))
      .def(
          "populate",
          [](const fs::Region& region, const py::int_& offset, const py::int_& size_bytes) {
            const std::uint64_t begin = index_of(offset), size = index_of(size_bytes);
            const py::gil_scoped_release released;
            region.populate(begin, size);
          },
          py::arg("offset"), py::arg("size_bytes"));
}

void bind_pool(py::module_& module) {
  py::class_<fs::SlabPool, std::shared_ptr<fs::SlabPool>>(module, "SlabPool")
      .def(py::init([](const std::string& name, const std::string& pages, std::size_t slab_bytes, std::size_t capacity) {
             const fs::Pages kind = pages_named(pages);
             const py::gil_scoped_release released;
             return fs::SlabPool::open(name, kind, slab_bytes, capacity);
           }),
           py::arg("name"), py::kw_only(), py::arg("pages"), py::arg("slab_bytes"), py::arg("capacity"))
      .def("take", py::overload_cast<std::size_t>(&fs::SlabPool::take), py::arg("size_bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("take_some", &fs::SlabPool::take_some, py::arg("size_bytes"), py::arg("positions"),
           py::call_guard<py::gil_scoped_release>())
      .def("grant", &fs::SlabPool::grant, py::arg("region"), py::arg("positions"),
           py::call_guard<py::gil_scoped_release>())
      .def("prepare", &fs::SlabPool::prepare, py::arg("wanted"), py::call_guard<py::gil_scoped_release>())
      .def("release", &fs::SlabPool::release, py::arg("count"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("pages", [](const fs::SlabPool& pool) { return name_of(pool.pages()); })
      .def_property_readonly("slab_bytes", &fs::SlabPool::slab_bytes)
      .def_property_readonly("capacity", &fs::SlabPool::capacity)
      .def_property_readonly("used", [](const fs::SlabPool& pool) { return pool.counts().used; })
      .def_property_readonly("clean", [](const fs::SlabPool& pool) { return pool.counts().clean; })
      .def_property_readonly("dirty", [](const fs::SlabPool& pool) { return pool.counts().dirty; });
}

void bind_checksum(py::module_& module) {
  module.def("xxh3", &xxh3, py::arg("data"));
  module.def("read_checksum", &read_checksum, py::arg("fd"), py::arg("file_offset"), py::arg("destination"));
  module.def("read_direct", &read_direct, py::arg("fd"), py::arg("file_offset"), py::arg("destination"),
             py::arg("size_bytes"));
  module.def("cached_bytes", &fs::cached_bytes, py::arg("fd"), py::arg("file_offset"), py::arg("size_bytes"));
  py::class_<Checksum>(module, "Checksum")
      .def(py::init<const py::object&>(), py::arg("data"))
      .def("advance", &Checksum::advance, py::arg("ready_bytes"), py::call_guard<py::gil_scoped_release>())
      .def("receive", &Checksum::receive, py::arg("fd"), py::arg("begin"), py::arg("slice_s"))
      .def("digest", &Checksum::digest, py::call_guard<py::gil_scoped_release>());
}

void bind_control(py::module_& module) {
  module.def("attach_across_kernels", &fs::attach_across_kernels);
  py::class_<fs::ControlBlock>(module, "ControlBlock")
      .def_static(
          "create",
          [](const std::string& name, std::uint64_t chunk_count, const py::bytes& manifest, std::uint64_t generation) {
            return fs::ControlBlock::create(name, chunk_count, static_cast<std::string_view>(manifest), generation);
          },
          py::arg("name"), py::arg("chunk_count"), py::arg("manifest"), py::arg("generation"))
      .def_static("attach", [](int fd) { return fs::ControlBlock::attach(fs::Descriptor(fd)); }, py::arg("fd"))
      .def_property_readonly("fd", &fs::ControlBlock::fd)
      .def_property_readonly("manifest", [](const fs::ControlBlock& block) { return py::bytes(block.manifest()); })
      .def_property_readonly("generation", &fs::ControlBlock::generation)
      .def_property_readonly("chunk_count", &fs::ControlBlock::chunk_count)
      .def_property_readonly("ready_count", &fs::ControlBlock::ready_count)
      .def_property_readonly("state", [](const fs::ControlBlock& block) { return name_of(block.state()); })
      .def_property_readonly("error",
                             [](const fs::ControlBlock& block) -> py::object {
                               const auto error = block.error();
                               if (!error) return py::none();
                               return py::make_tuple(text_of(error->first), text_of(error->second));
                             })
      .def(
          "is_ready",
          [](const fs::ControlBlock& block, const py::int_& chunk) { return block.is_ready(index_of(chunk)); },
          py::arg("chunk"))
      .def(
          "mark_ready",
          [](fs::ControlBlock& block, const py::int_& chunk) {
            return block.mark_ready(index_of(chunk));  // shorter than to give the GIL away and wait for it
          },
          py::arg("chunk"))
      .def("fail", &fs::ControlBlock::fail, py::arg("code"), py::arg("message"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "wait",
          [](const fs::ControlBlock& block, const py::int_& first, const py::int_& last, double timeout_s) {
            const std::uint64_t begin = index_of(first), end = index_of(last);
            const py::gil_scoped_release released;
            block.wait(begin, end, timeout_s, run_signal_handlers);
          },
          py::arg("first"), py::arg("last"), py::arg("timeout_s"));
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_errors(module);
  bind_checksum(module);
  bind_region(module);
  bind_pool(module);
  bind_control(module);
}
