#include "python/bindings.hpp"

#include "driver/nvrtc.hpp"
#include "hooks/preload.hpp"
#include "hooks/torch_allocator.hpp"
#include "vmm/rewrite.hpp"
#include "vmm/shared_buffer.hpp"

// In Python a report is a dict of its fields, a range a pair, a restore policy its name.
namespace pybind11::detail {

using namespace memsaver;

#define FIELD(name) arg(#name) = value.name
#define REPORT(Report, ...)                                                                                      \
  template <>                                                                                                    \
  struct type_caster<Report> {                                                                                   \
    static constexpr auto name = const_name("dict[str, typing.Any]");                                            \
    static handle cast(const Report& value, return_value_policy, handle) { return dict(__VA_ARGS__).release(); } \
  };

REPORT(PipelineSeconds, arg("host_memory_seconds") = value.host_memory, arg("digest_seconds") = value.digest,
       arg("copy_seconds") = value.copy, arg("driver_seconds") = value.driver, FIELD(linked_bytes))
REPORT(SharedStoreStatus, FIELD(name), FIELD(processes), FIELD(held_bytes), FIELD(share_bytes), FIELD(used_bytes),
       FIELD(total_bytes), FIELD(limit_bytes))
REPORT(TagOutcome, FIELD(tag), FIELD(restore), FIELD(state), FIELD(bytes), FIELD(released_bytes), FIELD(resumed_bytes),
       FIELD(backed_up_bytes), FIELD(kept_bytes), FIELD(unchanged_bytes), FIELD(shared_bytes), FIELD(zero_bytes),
       FIELD(restored_bytes), FIELD(already))
REPORT(TagSnapshot, FIELD(tag), FIELD(restore), FIELD(state), FIELD(bytes), FIELD(resident_bytes),
       FIELD(released_bytes), FIELD(shrunk_bytes), FIELD(retained_bytes), FIELD(backed_up_bytes), FIELD(kept_bytes),
       FIELD(expected_bytes), FIELD(expected_file_bytes), FIELD(allocations), FIELD(chunks), FIELD(mapped_by_device),
       FIELD(bytes_by_device), FIELD(shrunk_by_device))
REPORT(OperationResult, FIELD(tags), FIELD(seconds), FIELD(work), FIELD(first_memory_seconds))
REPORT(SaverStatus, FIELD(state), FIELD(failure), FIELD(tags), FIELD(reserved_by_device), FIELD(operation),
       FIELD(done_bytes), FIELD(total_bytes), FIELD(copied_bytes), FIELD(operation_seconds),
       arg("host_backup") = dict(arg("bytes") = value.backup_bytes, FIELD(file_bytes), FIELD(prepared),
                                 arg("capacity_bytes") = value.pool.capacity_bytes,
                                 arg("target_bytes") = value.pool.target_bytes,
                                 arg("limit_bytes") = value.pool.limit_bytes, arg("used_bytes") = value.pool.used_bytes,
                                 arg("unused_bytes") = value.pool.capacity_bytes - value.pool.used_bytes,
                                 arg("shared_store") = value.shared.name.empty() ? object(none())
                                                                                 : pybind11::cast(value.shared)))
REPORT(BackupView, FIELD(tag), FIELD(allocation), FIELD(allocation_bytes), FIELD(released),
       arg("in_host_memory") = value.kept == Kept::host, arg("on_disk") = value.kept == Kept::file,
       arg("memory") = reinterpret_cast<Address>(value.memory))
REPORT(DeviceInfo, FIELD(uuid), FIELD(name), FIELD(total_bytes), FIELD(granularity), FIELD(numa_node))
REPORT(SharedStore::Text, FIELD(name), arg("pinned") = value.mark == SharedLayout::Entry::pinned, FIELD(unused_ms),
       FIELD(holders), arg("text") = bytes(value.text), FIELD(bytes), FIELD(complete))

#undef REPORT
#undef FIELD

template <>
struct type_caster<RangeSet::Range> {
  PYBIND11_TYPE_CASTER(RangeSet::Range, const_name("tuple[int, int]"));
  bool load(handle source, bool convert) {
    make_caster<std::pair<std::uintptr_t, std::size_t>> pair;
    if (!pair.load(source, convert)) return false;
    std::tie(value.begin, value.bytes) = cast_op<std::pair<std::uintptr_t, std::size_t>>(pair);
    return true;
  }
};

template <>
struct type_caster<Restore> {
  PYBIND11_TYPE_CASTER(Restore, const_name("str"));
  bool load(handle source, bool convert) {
    make_caster<std::string> text;
    if (!text.load(source, convert)) return false;
    value = python::parse<Restore>(cast_op<std::string&>(text), "restore policy", {"discard", "zero", "host", "file"});
    return true;
  }
  static handle cast(Restore restore, return_value_policy, handle) { return str(name_of(restore)).release(); }
};

}  // namespace pybind11::detail

namespace memsaver::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Words = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

// Sets the Python exception that corresponds to `error`.
void set_python_error(const Error& error) {
  const py::object errors = py::module_::import("memsaver_core.contract.errors");
  const auto raise = [&](const char* name, auto&&... arguments) {
    const py::object type = errors.attr(name);
    const py::object value = type(error.what(), std::forward<decltype(arguments)>(arguments)...);
    PyErr_SetObject(type.ptr(), value.ptr());
  };
  const std::size_t needed_bytes = error.needed_bytes != 0 ? error.needed_bytes : error.bytes;
  switch (error.kind) {
    case ErrorKind::out_of_device_memory:
      return raise("OutOfDeviceMemoryError", needed_bytes, error.free_bytes, error.device);
    case ErrorKind::out_of_host_memory:
      return raise("OutOfHostMemoryError", needed_bytes, error.free_bytes);
    case ErrorKind::disk_full:
      return raise("DiskFullError", needed_bytes, error.free_bytes);
    case ErrorKind::driver:
      return raise("DriverError", error.call, error.code, error.tag, error.bytes);
    case ErrorKind::context_lost:
      return raise("ContextLostError", error.call, error.code, error.tag, error.bytes);
    case ErrorKind::backup:
      return raise("BackupError", error.tag, error.address, error.bytes);
    case ErrorKind::configuration:
      return raise("ConfigurationError");
    case ErrorKind::forked:
      return raise("ForkedProcessError");
  }
}

void bind_constructor(SaverClass& saver, const DriverAdaptor& adapt) {
  saver.def(py::init([adapt](const std::string& driver, const std::vector<std::string>& host_devices,
                             std::size_t host_capacity, std::size_t host_backup_limit, const std::string& file_folder,
                             const std::string& retention, const std::string& verify, bool pack,
                             const std::string& shared_backups, bool peer_access) {
              const auto retention_policy = parse<Retention>(retention, "retention policy", {"keep", "trim", "free"});
              const auto verification = parse<VerifyChoice>(verify, "verification", {"off", "sampled", "full", "auto"});
              const Settings settings{
                  {host_backup_limit, file_folder, retention_policy, verification, pack, shared_backups}, peer_access};
              auto opened = driver == "cuda" ? open_cuda_driver() : open_host_driver(host_devices, host_capacity);
              if (adapt) opened = adapt(std::move(opened));
              return std::make_shared<Saver>(std::move(opened), settings);
            }),
            py::kw_only(), "driver"_a, "host_devices"_a = std::vector<std::string>{}, "host_capacity"_a = 0,
            "host_backup_limit"_a = 0, "file_folder"_a = "/tmp", "retention"_a = "keep", "verify"_a = "auto",
            "pack"_a = true, "shared_backups"_a = "", "peer_access"_a = false);
}

// Throws driver errors.
Words digest(Saver& saver, int device, Address address, std::size_t bytes, const std::array<std::uint64_t, 4>& key) {
  const OwnStream stream(saver.driver(), device);
  DigestQueue queue(saver.driver(), device, {{key[0], key[1], key[2], key[3]}}, stream);
  Digest digest;  // the sum of those of its parts
  for (std::size_t at = 0; at < bytes; at += DigestQueue::kSlotBytes) {
    const std::vector<Extent> extents{{at, std::min(DigestQueue::kSlotBytes, bytes - at)}};
    queue.submit({{address, &extents}});
    digest += queue.collect().front();
  }
  return {digest.lane0, digest.lane1, digest.any};
}

void bind_functions(SaverClass& saver) {
  saver
      .def(
          "allocate",
          [](Saver& self, int device, const std::string& tag, Restore restore, std::size_t bytes,
             std::size_t chunk_bytes) { return self.allocate({device, tag, restore, chunk_bytes}, bytes); },
          "device"_a, "tag"_a, "restore"_a, "bytes"_a, "chunk_bytes"_a = 0, NoGil())
      .def("free", &Saver::free, "address"_a, NoGil())
      .def("release", &Saver::release, "tags"_a, "dead"_a, "overrides"_a, NoGil())
      .def("resume", &Saver::resume, "tags"_a, "verify_all"_a = false, NoGil())
      .def("save", &Saver::save, "tags"_a, "dead"_a, NoGil())
      .def("saved", &Saver::saved, "tag"_a, NoGil())
      .def_property_readonly("shared_store", &Saver::shared_store, py::return_value_policy::reference_internal)
      .def("resize", &Saver::resize, "tag"_a, "unused"_a, "kept"_a, NoGil())
      .def("reserve", &Saver::reserve, "tags"_a, NoGil())
      .def("give_back_reserved", &Saver::give_back_reserved, NoGil())
      .def("stop_lending", &Saver::stop_lending, NoGil())
      .def("status", &Saver::status, NoGil())
      .def("prepare_backup", &Saver::prepare_backup, NoGil())
      .def("grow_backup_memory", &Saver::grow_backup_memory, NoGil())
      .def("wait_until_prepared", &Saver::wait_until_prepared, NoGil())
      .def(
          "backup_of",
          [](Saver& self, Address address, std::size_t bytes, Address to) {
            return self.backup_of(address, bytes, reinterpret_cast<void*>(to));
          },
          "address"_a, "bytes"_a, "to"_a, NoGil())
      .def("drop_backups", &Saver::drop_backups, "tags"_a, "keep_memory"_a = false, NoGil())
      .def("trim_backup_memory", &Saver::trim_backup_memory, "at_once"_a = false, NoGil())
      .def("set_file_folder", &Saver::set_file_folder, "folder"_a, NoGil())
      .def("synchronize", &Saver::synchronize, NoGil())
      .def("set_memory_margin", &Saver::set_memory_margin, "bytes"_a)
      .def("known_tags", &Saver::known_tags, NoGil())
      .def("devices", &Saver::devices, NoGil())
      .def("owns", &Saver::owns, "address"_a, NoGil())
      .def("check_process", &Saver::check_process)
      .def("close", &Saver::close, NoGil())
      .def("trim_graph_memory", &Saver::trim_graph_memory, NoGil())
      .def(
          "graph_memory", [](Saver& self, int device) { return self.driver().graph_memory(device); }, "device"_a,
          NoGil())
      .def("accounts", [](Saver& self) { return self.driver().accounts(); })
      .def(
          "device_info", [](Saver& self, int device) { return self.driver().device_info(device); }, "device"_a, NoGil())
      .def(
          "memory_info",
          [](Saver& self, int device) {
            const MemoryInfo info = self.driver().memory_info(device);
            return std::make_pair(info.free_bytes, info.total_bytes);
          },
          "device"_a, NoGil(), "(free, total) bytes of a device, as the driver reports them now")
      .def("digest", &digest, "device"_a, "address"_a, "bytes"_a, "key"_a, NoGil());
}

// An active saver is never destroyed: torch frees memory until the end of the process, after Python's objects are gone.
void activate(const std::shared_ptr<Saver>& saver) {
  static auto* const kept = new std::vector<std::shared_ptr<Saver>>;
  kept->push_back(saver);
  set_active_saver(saver.get());
}

// An allocation, on the host driver also as a Python buffer, freed with the last reference to it. With blocks it is
// one that Saver::adopt() makes.
class HostBuffer {
 public:
  HostBuffer(std::shared_ptr<Saver> saver, int device, const std::string& tag, Restore restore, std::size_t bytes,
             std::size_t chunk_bytes, const std::vector<SavedBlock>& blocks)
      : saver_(std::move(saver)), bytes_(bytes) {
    const Arena::Key key{device, tag, restore, chunk_bytes};
    const py::gil_scoped_release no_gil;
    address_ = blocks.empty() ? saver_->allocate(key, bytes) : saver_->adopt(key, bytes, blocks);
  }
  HostBuffer(const HostBuffer&) = delete;
  ~HostBuffer() {
    const py::gil_scoped_release no_gil;
    free_or_warn(*saver_, address_);
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
      .def(py::init<std::shared_ptr<Saver>, int, const std::string&, Restore, std::size_t, std::size_t,
                    const std::vector<SavedBlock>&>(),
           "saver"_a, "device"_a, "tag"_a, "restore"_a, "bytes"_a, "chunk_bytes"_a = 0,
           "blocks"_a = std::vector<SavedBlock>())
      .def_property_readonly("address", &HostBuffer::address)
      .def_buffer(&HostBuffer::view);
}

void bind_rewrite(py::module_& module) {
  const py::release_gil_before_calling_cpp_dtor no_gil;
  py::class_<Rewrite>(module, "Rewrite", no_gil)
      .def(py::init<Saver&, const std::vector<NewContent>&>(), "saver"_a, "contents"_a, py::keep_alive<1, 2>(), NoGil())
      .def("commit", &Rewrite::commit, NoGil());
}

void bind_shared_store(py::module_& module) {
  py::class_<SharedStore>(module, "SharedStore")
      .def(py::init([](const std::string& name) {
             static Driver& unused = *open_host_driver({}, page_bytes()).release();
             return std::make_unique<SharedStore>(unused, name, 0);
           }),
           "name"_a, NoGil())
      .def(
          "find_text",
          [](SharedStore& self, std::uint64_t lane0, std::uint64_t lane1) {
            const auto answer = self.find_or_claim({lane0, lane1, 1}, 0);
            const char* const names[] = {"kept", "claimed", "awaited", "no_room"};
            return std::make_pair(names[static_cast<int>(answer.found)], answer.entry);
          },
          "lane0"_a, "lane1"_a, NoGil())
      .def("publish_text", &SharedStore::publish_text, "entry"_a, "text"_a, NoGil())
      .def(
          "give",
          [](SharedStore& self, std::uint32_t entry) {
            self.give(entry);
            self.apply_pending();
          },
          "entry"_a, NoGil())
      .def(
          "wait_for_change", [](SharedStore& self) { self.wait_for_change(self.changes()); }, NoGil())
      .def("texts", &SharedStore::texts, NoGil())
      .def(
          "mark_text",
          [](SharedStore& self, const std::string& name, const std::string& mark) {
            return self.mark_text(name,
                                  parse<SharedLayout::Entry::Mark>(mark, "mark", {"unmarked", "pinned", "dropped"}));
          },
          "name"_a, "mark"_a, NoGil())
      .def("status", &SharedStore::status, NoGil());
}

void bind_shared_buffers(py::module_& module) {
  const py::release_gil_before_calling_cpp_dtor no_gil;  // giving a buffer back waits for the device
  py::class_<SharedBuffer>(module, "SharedBuffer", no_gil)
      .def(py::init<Saver&, int, std::size_t>(), "saver"_a, "device"_a, "bytes"_a, py::keep_alive<1, 2>(), NoGil())
      .def_property_readonly("address", &SharedBuffer::address)
      .def_property_readonly("nbytes", &SharedBuffer::bytes)
      .def("export_fd", &SharedBuffer::export_fd, NoGil())
      .def("release", &SharedBuffer::release, NoGil())
      .def("restore", &SharedBuffer::restore, NoGil());
  py::class_<ImportedBuffer>(module, "ImportedBuffer", no_gil)
      .def(py::init<Saver&, int, std::size_t, int>(), "saver"_a, "file"_a, "bytes"_a, "device"_a,
           py::keep_alive<1, 2>(), NoGil())
      .def_property_readonly("address", &ImportedBuffer::address)
      .def_property_readonly("nbytes", &ImportedBuffer::bytes)
      .def_property_readonly("mapped", py::cpp_function(&ImportedBuffer::mapped, NoGil()))
      .def("drop", &ImportedBuffer::drop, NoGil())
      .def("map_again", &ImportedBuffer::map_again, "file"_a, NoGil());
}

Words digest_of(const py::buffer& data, const std::array<std::uint64_t, 4>& key, std::uint64_t first_word) {
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
  module.def("allocator_for", &allocator_for, "tag"_a, "restore"_a, "chunk_bytes"_a = 0);
  module.def("attach_preload_library", &attach_preload_library, "zeroed_tags"_a,
             "Send the preload library's allocations to the active saver; its path, or an empty string.");
  module.def("restore_for", &restore_for, "tag"_a, "cpu_backup"_a, "disk_backup"_a);
}

void bind_machine(py::module_& module) {
  module.def("cuda_missing", &cuda_missing, "Why CUDA cannot be used here; an empty string if it can.");
  module.def("can_checkpoint", &cuda_can_checkpoint);
  module.def("reaches", &cuda_reaches, "device"_a, "address"_a, NoGil());
  module.def("set_nvrtc_path", &cuda::set_nvrtc_path, "path"_a);
  module.def("available_memory_bytes", [] { return available_memory_bytes(); });
  module.def("machine_memory_bytes", &machine_memory_bytes);
  module.def("is_in_memory", &is_in_memory, "folder"_a, NoGil());
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
  SaverClass saver(module, "Saver");
  bind_constructor(saver, adapt);
  bind_functions(saver);
  bind_host_buffer(module);
  bind_rewrite(module);
  bind_shared_buffers(module);
  bind_shared_store(module);
  bind_hooks(module);
  bind_machine(module);
}

}  // namespace memsaver::python
