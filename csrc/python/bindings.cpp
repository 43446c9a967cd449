#include "python/bindings.hpp"

#include "driver/nvrtc.hpp"
#include "hooks/preload.hpp"
#include "hooks/torch_allocator.hpp"
#include "vmm/rewrite.hpp"
#include "vmm/shared_buffer.hpp"

namespace memsaver::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Words = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

#define FIELD(name) py::arg(#name) = value.name

py::dict to_dict(const PipelineSeconds& seconds) {
  return py::dict("host_memory_seconds"_a = seconds.host_memory, "digest_seconds"_a = seconds.digest,
                  "copy_seconds"_a = seconds.copy, "driver_seconds"_a = seconds.driver);
}

py::dict to_dict(const SharedStoreStatus& value) {
  return py::dict(FIELD(name), FIELD(processes), FIELD(held_bytes), FIELD(share_bytes), FIELD(used_bytes),
                  FIELD(total_bytes), FIELD(limit_bytes));
}

py::dict to_dict(const TagOutcome& value) {
  return py::dict(FIELD(tag), FIELD(restore), FIELD(state), FIELD(bytes), FIELD(released_bytes), FIELD(resumed_bytes),
                  FIELD(backed_up_bytes), FIELD(kept_bytes), FIELD(unchanged_bytes), FIELD(shared_bytes),
                  FIELD(zero_bytes), FIELD(restored_bytes), FIELD(already));
}

py::dict to_dict(const TagSnapshot& value) {
  return py::dict(FIELD(tag), FIELD(restore), FIELD(state), FIELD(bytes), FIELD(resident_bytes), FIELD(released_bytes),
                  FIELD(shrunk_bytes), FIELD(retained_bytes), FIELD(backed_up_bytes), FIELD(kept_bytes),
                  FIELD(expected_bytes), FIELD(expected_file_bytes), FIELD(allocations), FIELD(chunks),
                  FIELD(mapped_by_device), FIELD(bytes_by_device), FIELD(shrunk_by_device));
}

template <typename Tag>
py::list to_list(const std::vector<Tag>& tags) {
  py::list list;
  for (const auto& tag : tags) list.append(to_dict(tag));
  return list;
}

py::dict to_dict(const OperationResult& value) {
  return py::dict("tags"_a = to_list(value.tags), FIELD(devices), FIELD(seconds), "work"_a = to_dict(value.work),
                  FIELD(first_memory_seconds));
}

py::dict to_dict(const SaverStatus& value) {
  return py::dict(FIELD(state), FIELD(failure), "tags"_a = to_list(value.tags), FIELD(reserved_by_device),
                  FIELD(backup_bytes), FIELD(file_bytes), "pool_used_bytes"_a = value.pool.used_bytes,
                  "pool_capacity_bytes"_a = value.pool.capacity_bytes, "pool_target_bytes"_a = value.pool.target_bytes,
                  "pool_limit_bytes"_a = value.pool.limit_bytes, "shared_store"_a = to_dict(value.shared),
                  FIELD(prepared), FIELD(operation), FIELD(done_bytes), FIELD(total_bytes), FIELD(copied_bytes),
                  FIELD(operation_seconds));
}

py::dict to_dict(const BackupView& value) {
  return py::dict(FIELD(tag), FIELD(allocation), FIELD(allocation_bytes), FIELD(released),
                  "in_host_memory"_a = value.kept == Kept::host, "on_disk"_a = value.kept == Kept::file,
                  "memory"_a = reinterpret_cast<Address>(value.memory));
}

py::dict to_dict(const DeviceInfo& value) {
  return py::dict(FIELD(uuid), FIELD(name), FIELD(total_bytes), FIELD(granularity), FIELD(numa_node), FIELD(rdma));
}

#undef FIELD

// Calls `function` without the GIL, and converts its result with the GIL.
template <typename Function>
py::dict dict_of(const Function& function) {
  decltype(function()) result;
  {
    const py::gil_scoped_release no_gil;
    result = function();
  }
  return to_dict(result);
}

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

Restore parse_restore(const std::string& text) {
  return parse<Restore>(text, "restore policy", {"discard", "zero", "host", "file"});
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

using Ranges = std::vector<std::pair<Address, std::size_t>>;

std::vector<RangeSet::Range> to_ranges(const Ranges& pairs) {
  std::vector<RangeSet::Range> ranges;
  ranges.reserve(pairs.size());
  for (const auto& [address, bytes] : pairs) ranges.push_back({address, bytes});
  return ranges;
}

py::dict release(Saver& saver, const std::vector<std::string>& tags, const Ranges& dead,
                 const std::map<std::string, std::string>& overrides) {
  const auto ranges = to_ranges(dead);
  std::map<std::string, Restore> policies;
  for (const auto& [tag, restore] : overrides) policies.emplace(tag, parse_restore(restore));
  return dict_of([&] { return saver.release(tags, ranges, policies); });
}

void bind_operations(SaverClass& saver) {
  saver
      .def(
          "allocate",
          [](Saver& self, int device, const std::string& tag, const std::string& restore, std::size_t bytes,
             std::size_t chunk_bytes) {
            return self.allocate({device, tag, parse_restore(restore), chunk_bytes}, bytes);
          },
          "device"_a, "tag"_a, "restore"_a, "bytes"_a, "chunk_bytes"_a = 0, NoGil())
      .def("free", &Saver::free, "address"_a, NoGil())
      .def("release", &release, "tags"_a, "dead"_a, "overrides"_a)
      .def(
          "resume",
          [](Saver& self, const std::vector<std::string>& tags, bool verify_all) {
            return dict_of([&] { return self.resume(tags, verify_all); });
          },
          "tags"_a, "verify_all"_a = false)
      .def(
          "save",
          [](Saver& self, const std::vector<std::string>& tags, const Ranges& dead) {
            return dict_of([&] { return self.save(tags, to_ranges(dead)); });
          },
          "tags"_a, "dead"_a)
      .def("saved", &Saver::saved, "tag"_a, NoGil())
      .def_property_readonly("shared_store", &Saver::shared_store, py::return_value_policy::reference_internal)
      .def(
          "resize",
          [](Saver& self, const std::string& tag, const Ranges& unused, double kept) {
            return dict_of([&] { return self.resize(tag, to_ranges(unused), kept); });
          },
          "tag"_a, "unused"_a, "kept"_a)
      .def("reserve", &Saver::reserve, "tags"_a, NoGil())
      .def("give_back_reserved", &Saver::give_back_reserved, NoGil())
      .def("status", [](Saver& self) { return dict_of([&] { return self.status(); }); })
      .def("prepare_backup", &Saver::prepare_backup, NoGil())
      .def("wait_until_prepared", &Saver::wait_until_prepared, NoGil())
      .def(
          "backup_of",
          [](Saver& self, Address address, std::size_t bytes, Address to) {
            return dict_of([&] { return self.backup_of(address, bytes, reinterpret_cast<void*>(to)); });
          },
          "address"_a, "bytes"_a, "to"_a)
      .def("drop_backups", &Saver::drop_backups, "tags"_a, "keep_memory"_a = false, NoGil())
      .def("trim_backup_memory", &Saver::trim_backup_memory, "at_once"_a = false, NoGil())
      .def("set_file_folder", &Saver::set_file_folder, "folder"_a, NoGil())
      .def("synchronize", &Saver::synchronize, NoGil())
      .def("set_memory_margin", &Saver::set_memory_margin, "bytes"_a)
      .def("known_tags", &Saver::known_tags, NoGil())
      .def("devices", &Saver::devices, NoGil())
      .def("owns", &Saver::owns, "address"_a, NoGil())
      .def("close", &Saver::close, NoGil());
}

Words digest(Saver& saver, int device, Address address, std::size_t bytes, const std::array<std::uint64_t, 4>& key) {
  const OwnStream stream(saver.driver(), device);
  DigestQueue queue(saver.driver(), device, {{key[0], key[1], key[2], key[3]}}, stream);
  const std::vector<Extent> extents{{0, bytes}};
  queue.submit({{address, &extents}});
  const Digest digest = queue.collect().front();
  return {digest.lane0, digest.lane1, digest.any};
}

void bind_driver(SaverClass& saver) {
  saver.def("trim_graph_memory", &Saver::trim_graph_memory, NoGil())
      .def(
          "graph_memory", [](Saver& self, int device) { return self.driver().graph_memory(device); }, "device"_a,
          NoGil())
      .def("accounts", [](Saver& self) { return self.driver().accounts(); })
      .def(
          "device_info",
          [](Saver& self, int device) { return dict_of([&] { return self.driver().device_info(device); }); },
          "device"_a)
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
  HostBuffer(std::shared_ptr<Saver> saver, int device, const std::string& tag, const std::string& restore,
             std::size_t bytes, std::size_t chunk_bytes, const std::vector<SavedBlock>& blocks)
      : saver_(std::move(saver)), bytes_(bytes) {
    const Arena::Key key{device, tag, parse_restore(restore), chunk_bytes};
    const py::gil_scoped_release no_gil;
    address_ = blocks.empty() ? saver_->allocate(key, bytes) : saver_->adopt(key, bytes, blocks);
  }
  HostBuffer(const HostBuffer&) = delete;
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
      .def(py::init<std::shared_ptr<Saver>, int, const std::string&, const std::string&, std::size_t, std::size_t,
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

py::list texts(SharedStore& store) {
  std::vector<SharedStore::Text> found;
  {
    const py::gil_scoped_release no_gil;
    found = store.texts();
  }
  py::list list;
  for (const auto& text : found) {
    list.append(py::dict("name"_a = text.name, "pinned"_a = text.mark == SharedLayout::Entry::pinned,
                         "unused_ms"_a = text.unused_ms, "holders"_a = text.holders, "text"_a = py::bytes(text.text),
                         "bytes"_a = text.bytes, "complete"_a = text.complete));
  }
  return list;
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
      .def("texts", &texts)
      .def(
          "mark_text",
          [](SharedStore& self, const std::string& name, const std::string& mark) {
            return self.mark_text(name,
                                  parse<SharedLayout::Entry::Mark>(mark, "mark", {"unmarked", "pinned", "dropped"}));
          },
          "name"_a, "mark"_a, NoGil())
      .def("status", [](SharedStore& self) { return dict_of([&] { return self.status(); }); });
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
  module.def(
      "allocator_for",
      [](const std::string& tag, const std::string& restore, std::size_t chunk_bytes) {
        return allocator_for(tag, parse_restore(restore), chunk_bytes);
      },
      "tag"_a, "restore"_a, "chunk_bytes"_a = 0);
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
  bind_operations(saver);
  bind_driver(saver);
  bind_host_buffer(module);
  bind_rewrite(module);
  bind_shared_buffers(module);
  bind_shared_store(module);
  bind_hooks(module);
  bind_machine(module);
}

}  // namespace memsaver::python
