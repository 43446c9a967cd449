#include "python/bindings.hpp"

namespace memsaver::python {

namespace {

// An allocation on the host driver as a Python buffer, freed with the last reference to it.
class HostBuffer {
 public:
  HostBuffer(std::shared_ptr<Saver> saver, int device, const std::string& tag, const std::string& restore,
             std::size_t bytes)
      : saver_(std::move(saver)), bytes_(bytes) {
    const Restore policy = parse_restore(restore);
    const py::gil_scoped_release no_gil;
    address_ = saver_->allocate({device, tag, policy}, bytes);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer() {
    const py::gil_scoped_release no_gil;
    try {
      saver_->free(address_);
    } catch (const Error& error) {
      // A forked child drops its copies of the parent's tensors, which frees nothing.
      if (error.kind != ErrorKind::forked) PyErr_Clear();
    }
  }
  [[nodiscard]] py::buffer_info view() const {
    return {reinterpret_cast<void*>(address_), 1, py::format_descriptor<unsigned char>::format(),
            static_cast<py::ssize_t>(bytes_)};
  }
  [[nodiscard]] Address address() const { return address_; }

 private:
  std::shared_ptr<Saver> saver_;
  std::size_t bytes_;
  Address address_ = 0;
};

}  // namespace

void bind_host_buffer(py::module_& module) {
  py::class_<HostBuffer>(module, "HostBuffer", py::buffer_protocol())
      .def(py::init<std::shared_ptr<Saver>, int, const std::string&, const std::string&, std::size_t>(),
           py::arg("saver"), py::arg("device"), py::arg("tag"), py::arg("restore"), py::arg("bytes"))
      .def_property_readonly("address", &HostBuffer::address)
      .def_buffer(&HostBuffer::view);
}

}  // namespace memsaver::python
