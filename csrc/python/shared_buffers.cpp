#include <memory>

#include "python/bindings.hpp"
#include "vmm/shared_buffer.hpp"

namespace memsaver::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Giving a buffer back waits for the device.
struct DeleteWithoutGil {
  template <typename Buffer>
  void operator()(Buffer* buffer) const {
    const py::gil_scoped_release no_gil;
    delete buffer;
  }
};

template <typename Buffer>
using BufferClass = py::class_<Buffer, std::unique_ptr<Buffer, DeleteWithoutGil>>;

}  // namespace

void bind_shared_buffers(py::module_& module) {
  BufferClass<SharedBuffer>(module, "SharedBuffer")
      .def(py::init<Saver&, int, std::size_t>(), "saver"_a, "device"_a, "bytes"_a, py::keep_alive<1, 2>(), NoGil())
      .def_property_readonly("address", &SharedBuffer::address)
      .def_property_readonly("bytes", &SharedBuffer::bytes)
      .def("export_fd", &SharedBuffer::export_fd, NoGil())
      .def("release", &SharedBuffer::release, NoGil())
      .def("restore", &SharedBuffer::restore, NoGil());
  BufferClass<ImportedBuffer>(module, "ImportedBuffer")
      .def(py::init<Saver&, int, std::size_t, int>(), "saver"_a, "file"_a, "bytes"_a, "device"_a,
           py::keep_alive<1, 2>(), NoGil())
      .def_property_readonly("address", &ImportedBuffer::address)
      .def_property_readonly("bytes", &ImportedBuffer::bytes)
      .def("mapped", &ImportedBuffer::mapped, NoGil())
      .def("drop", &ImportedBuffer::drop, NoGil())
      .def("map_again", &ImportedBuffer::map_again, "file"_a, NoGil());
}

}  // namespace memsaver::python
