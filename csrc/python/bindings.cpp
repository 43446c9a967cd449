#include "python/bindings.hpp"

#include <array>
#include <tuple>

#include "driver/cuda.hpp"
#include "driver/nvrtc.hpp"
#include "hooks/preload.hpp"
#include "hooks/torch_allocator.hpp"
#include "support/digest.hpp"
#include "support/host_memory.hpp"

namespace memsaver::python {

namespace {

// torch frees memory until the very end of the process, after Python's objects are gone: an active saver is never
// destroyed.
void activate(const std::shared_ptr<Saver>& saver) {
  static auto* const kept = new std::vector<std::shared_ptr<Saver>>;
  kept->push_back(saver);
  set_active_saver(saver.get());
}

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

void bind_host_buffer(py::module_& module) {
  py::class_<HostBuffer>(module, "HostBuffer", py::buffer_protocol())
      .def(py::init<std::shared_ptr<Saver>, int, const std::string&, const std::string&, std::size_t>(), "saver"_a,
           "device"_a, "tag"_a, "restore"_a, "bytes"_a)
      .def_property_readonly("address", &HostBuffer::address)
      .def_buffer(&HostBuffer::view);
}

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> digest_of(const py::buffer& data,
                                                                  const std::array<std::uint64_t, 4>& key,
                                                                  std::uint64_t first_word) {
  const py::buffer_info info = data.request();
  const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
  if (bytes % kDigestWord != 0) throw Error(ErrorKind::configuration, "digests are of multiples of 16 bytes");
  const py::gil_scoped_release no_gil;
  const Digest digest = digest_on_host({{key[0], key[1], key[2], key[3]}},
                                       {reinterpret_cast<std::uint64_t>(info.ptr), bytes, first_word});
  return {digest.lane0, digest.lane1, digest.any};
}

void bind_hooks(py::module_& module) {
  module.def("activate", &activate, "saver"_a, "Make this the saver that torch's allocations go to.");
  module.def(
      "allocator_for",
      [](const std::string& tag, const std::string& restore) { return allocator_for(tag, parse_restore(restore)); },
      "tag"_a, "restore"_a);
  module.def("take_allocation_failure", &take_allocation_failure);
  module.def("attach_preload_library", &attach_preload_library, "zeroed_tags"_a,
             "Send the preload library's allocations to the active saver; its path, or an empty string.");
  module.def(
      "restore_for",
      [](const std::string& tag, bool cpu_backup, bool disk_backup) {
        return std::string(name_of(restore_for(tag, cpu_backup, disk_backup)));
      },
      "tag"_a, "cpu_backup"_a, "disk_backup"_a);
}

void bind_machine(py::module_& module) {
  module.def(
      "cuda_missing",
      [] {
        std::string why;
        return cuda_available(&why) ? std::string() : why;
      },
      "Why CUDA cannot be used here; an empty string if it can.");
  module.def("can_checkpoint", &cuda_can_checkpoint);
  module.def("reaches", &cuda_reaches, "device"_a, "address"_a, py::call_guard<py::gil_scoped_release>());
  module.def("set_nvrtc_path", &cuda::set_nvrtc_path, "path"_a);
  module.def("available_memory_bytes", [] { return available_memory_bytes(); });
  module.def("digest_of", &digest_of, "data"_a, "key"_a, "first_word"_a = 0);
}

}  // namespace

void bind_all(py::module_& module, const DriverAdaptor& adapt) {
  module.doc() = "The native core of memsaver; use memsaver_core instead.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error);
    }
  });
  bind_saver(module, adapt);
  bind_host_buffer(module);
  bind_shared_buffers(module);
  bind_hooks(module);
  bind_machine(module);
}

}  // namespace memsaver::python
