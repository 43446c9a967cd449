// The Python face of the core: plain data in and out, errors as memsaver_core.errors, the GIL dropped in every call
// that can wait.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver/cuda.hpp"
#include "driver/faulty.hpp"
#include "driver/host.hpp"
#include "driver/nvrtc.hpp"
#include "hooks/preload.hpp"
#include "hooks/torch_allocator.hpp"
#include "support/digest.hpp"
#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "vmm/saver.hpp"

namespace py = pybind11;

namespace memsaver {
namespace {

template <typename Enum>
Enum parse(const std::string& text, const char* what, const std::vector<std::pair<const char*, Enum>>& values) {
  std::string names;
  for (const auto& [name, value] : values) {
    if (text == name) return value;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  throw Error(ErrorKind::configuration, std::string("unknown ") + what + " '" + text + "'; choose one of " + names);
}

Restore parse_restore(const std::string& text) {
  return parse<Restore>(
      text, "restore policy",
      {{"discard", Restore::discard}, {"zero", Restore::zero}, {"host", Restore::host}, {"file", Restore::file}});
}

py::dict to_dict(const PipelineSeconds& seconds) {
  py::dict dict;
  dict["host_memory_seconds"] = seconds.host_memory;
  dict["digest_seconds"] = seconds.digest;
  dict["copy_seconds"] = seconds.copy;
  dict["driver_seconds"] = seconds.driver;
  return dict;
}

py::dict to_dict(const OperationResult& result) {
  py::list tags;
  for (const auto& tag : result.tags) {
    py::dict dict;
    dict["tag"] = tag.tag;
    dict["restore"] = tag.restore;
    dict["state"] = tag.state;
    dict["bytes"] = tag.bytes;
    dict["released_bytes"] = tag.released_bytes;
    dict["resumed_bytes"] = tag.resumed_bytes;
    dict["backed_up_bytes"] = tag.backed_up_bytes;
    dict["unchanged_bytes"] = tag.unchanged_bytes;
    dict["zero_bytes"] = tag.zero_bytes;
    dict["restored_bytes"] = tag.restored_bytes;
    dict["already"] = tag.already;
    tags.append(dict);
  }
  py::dict dict;
  dict["tags"] = tags;
  dict["devices"] = result.devices;
  dict["seconds"] = result.seconds;
  dict["work"] = to_dict(result.work);
  dict["first_memory_seconds"] = result.first_memory_seconds;
  return dict;
}

py::dict to_dict(const SaverStatus& status) {
  py::list tags;
  for (const auto& tag : status.tags) {
    py::dict dict;
    dict["tag"] = tag.tag;
    dict["restore"] = tag.restore;
    dict["state"] = tag.state;
    dict["bytes"] = tag.bytes;
    dict["resident_bytes"] = tag.resident_bytes;
    dict["released_bytes"] = tag.released_bytes;
    dict["retained_bytes"] = tag.retained_bytes;
    dict["backed_up_bytes"] = tag.backed_up_bytes;
    dict["allocations"] = tag.allocations;
    dict["chunks"] = tag.chunks;
    dict["mapped_by_device"] = tag.mapped_by_device;
    dict["bytes_by_device"] = tag.bytes_by_device;
    tags.append(dict);
  }
  py::dict dict;
  dict["state"] = status.state;
  dict["failure"] = status.failure;
  dict["tags"] = tags;
  dict["backup_bytes"] = status.backup_bytes;
  dict["file_bytes"] = status.file_bytes;
  dict["pool_used_bytes"] = status.pool.used_bytes;
  dict["pool_capacity_bytes"] = status.pool.capacity_bytes;
  dict["pool_target_bytes"] = status.pool.target_bytes;
  dict["pool_limit_bytes"] = status.pool.limit_bytes;
  dict["prepared"] = status.prepared;
  dict["operation"] = status.operation;
  dict["done_bytes"] = status.done_bytes;
  dict["total_bytes"] = status.total_bytes;
  dict["copied_bytes"] = status.copied_bytes;
  dict["operation_seconds"] = status.operation_seconds;
  return dict;
}

// A saver and, where it was asked for, the faulty driver in front of its driver.
class PySaver {
 public:
  PySaver(const std::string& driver, const std::vector<std::string>& host_devices, std::size_t host_capacity,
          Settings settings, bool faulty) {
    auto opened = driver == "cuda" ? open_cuda_driver() : open_host_driver(host_devices, host_capacity);
    if (faulty) {
      auto wrapped = std::make_unique<FaultyDriver>(std::move(opened));
      faulty_ = wrapped.get();
      opened = std::move(wrapped);
    }
    saver_ = std::make_shared<Saver>(std::move(opened), std::move(settings));
  }

  Saver& operator*() { return *saver_; }
  Saver* operator->() { return saver_.get(); }
  [[nodiscard]] std::shared_ptr<Saver> share() const { return saver_; }
  FaultyDriver& faulty() {
    if (faulty_ == nullptr) throw Error(ErrorKind::configuration, "this saver was made without fault injection");
    return *faulty_;
  }

 private:
  std::shared_ptr<Saver> saver_;
  FaultyDriver* faulty_ = nullptr;
};

// An allocation on the host driver as a Python buffer; it ends with the last reference to it.
class HostBuffer {
 public:
  HostBuffer(PySaver& saver, int device, const std::string& tag, const std::string& restore, std::size_t bytes)
      : saver_(saver.share()), bytes_(bytes) {
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
      // A forked child drops its copies of the parent's tensors; that ends nothing.
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

void raise_in_python(const Error& error) {
  const py::object errors = py::module_::import("memsaver_core.errors");
  const auto raise = [](const py::object& type, const py::object& value) { PyErr_SetObject(type.ptr(), value.ptr()); };
  const auto make = [&](const char* name, auto&&... arguments) {
    const py::object type = errors.attr(name);
    raise(type, type(error.what(), std::forward<decltype(arguments)>(arguments)...));
  };
  switch (error.kind) {
    case ErrorKind::out_of_device_memory:
      return make("OutOfDeviceMemoryError", error.needed_bytes != 0 ? error.needed_bytes : error.bytes,
                  error.free_bytes, error.device);
    case ErrorKind::out_of_host_memory:
      return make("OutOfHostMemoryError", error.needed_bytes != 0 ? error.needed_bytes : error.bytes, error.free_bytes);
    case ErrorKind::driver:
      return make("DriverError", error.call, error.code, error.tag, error.bytes);
    case ErrorKind::context_lost:
      return make("ContextLostError", error.call, error.code, error.tag, error.bytes);
    case ErrorKind::backup:
      return make("BackupError", error.tag, error.address, error.bytes);
    case ErrorKind::configuration:
      return make("ConfigurationError");
    case ErrorKind::forked:
      return make("ForkedProcessError");
  }
}

}  // namespace
}  // namespace memsaver

PYBIND11_MODULE(_native, module) {
  using namespace memsaver;
  module.doc() = "The native core of memsaver; use memsaver_core instead.";

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });

  py::class_<PySaver, std::shared_ptr<PySaver>>(module, "Saver")
      .def(py::init([](const std::string& driver, const std::vector<std::string>& host_devices,
                       std::size_t host_capacity, std::size_t host_backup_limit, const std::string& file_folder,
                       const std::string& retention, const std::string& verify, bool peer_access, bool faulty) {
             Settings settings;
             settings.host_backup_limit = host_backup_limit;
             settings.file_folder = file_folder;
             settings.retention =
                 parse<Retention>(retention, "retention policy",
                                  {{"keep", Retention::keep}, {"trim", Retention::trim}, {"free", Retention::free}});
             settings.verify = parse<VerifyChoice>(verify, "verification",
                                                   {{"off", VerifyChoice::off},
                                                    {"sampled", VerifyChoice::sampled},
                                                    {"full", VerifyChoice::full},
                                                    {"auto", VerifyChoice::automatic}});
             settings.peer_access = peer_access;
             return std::make_shared<PySaver>(driver, host_devices, host_capacity, std::move(settings), faulty);
           }),
           py::kw_only(), py::arg("driver"), py::arg("host_devices") = std::vector<std::string>{},
           py::arg("host_capacity") = 0, py::arg("host_backup_limit") = 0, py::arg("file_folder") = "/tmp",
           py::arg("retention") = "keep", py::arg("verify") = "auto", py::arg("peer_access") = false,
           py::arg("faulty") = false)
      .def(
          "allocate",
          [](PySaver& saver, int device, const std::string& tag, const std::string& restore, std::size_t bytes) {
            const Restore policy = parse_restore(restore);
            const py::gil_scoped_release no_gil;
            return saver->allocate({device, tag, policy}, bytes);
          },
          py::arg("device"), py::arg("tag"), py::arg("restore"), py::arg("bytes"))
      .def(
          "free", [](PySaver& saver, Address address) { saver->free(address); }, py::arg("address"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "release",
          [](PySaver& saver, const std::vector<std::string>& tags,
             const std::vector<std::pair<Address, std::size_t>>& dead,
             const std::map<std::string, std::string>& overrides) {
            std::vector<RangeSet::Range> ranges;
            ranges.reserve(dead.size());
            for (const auto& [address, bytes] : dead) ranges.push_back({address, bytes});
            std::map<std::string, Restore> policies;
            for (const auto& [tag, restore] : overrides) policies.emplace(tag, parse_restore(restore));
            OperationResult result;
            {
              const py::gil_scoped_release no_gil;
              result = saver->release(tags, ranges, policies);
            }
            return to_dict(result);
          },
          py::arg("tags"), py::arg("dead"), py::arg("overrides"))
      .def(
          "resume",
          [](PySaver& saver, const std::vector<std::string>& tags) {
            OperationResult result;
            {
              const py::gil_scoped_release no_gil;
              result = saver->resume(tags);
            }
            return to_dict(result);
          },
          py::arg("tags"))
      .def("status",
           [](PySaver& saver) {
             SaverStatus status;
             {
               const py::gil_scoped_release no_gil;
               status = saver->status();
             }
             return to_dict(status);
           })
      .def(
          "prepare_backup", [](PySaver& saver) { saver->prepare_backup(); }, py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_until_prepared", [](PySaver& saver) { saver->wait_until_prepared(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "synchronize", [](PySaver& saver) { saver->synchronize(); }, py::call_guard<py::gil_scoped_release>())
      .def(
          "backup_of",
          [](PySaver& saver, Address address, std::size_t bytes, Address to) {
            BackupView view;
            {
              const py::gil_scoped_release no_gil;
              view = saver->backup_of(address, bytes, reinterpret_cast<void*>(to));
            }
            py::dict dict;
            dict["tag"] = view.tag;
            dict["released"] = view.released;
            dict["in_host_memory"] = view.kept == Kept::host;
            dict["on_disk"] = view.kept == Kept::file;
            dict["memory"] = reinterpret_cast<Address>(view.memory);
            return dict;
          },
          py::arg("address"), py::arg("bytes"), py::arg("to"))
      .def(
          "drop_backups", [](PySaver& saver, const std::vector<std::string>& tags) { saver->drop_backups(tags); },
          py::arg("tags"), py::call_guard<py::gil_scoped_release>())
      .def(
          "set_file_folder", [](PySaver& saver, const std::string& folder) { saver->set_file_folder(folder); },
          py::arg("folder"), py::call_guard<py::gil_scoped_release>())
      .def(
          "set_memory_margin", [](PySaver& saver, std::size_t bytes) { saver->set_memory_margin(bytes); },
          py::arg("bytes"))
      .def(
          "trim_graph_memory", [](PySaver& saver) { saver->trim_graph_memory(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "graph_memory", [](PySaver& saver, int device) { return saver->driver().graph_memory(device); },
          py::arg("device"), py::call_guard<py::gil_scoped_release>())
      .def("accounts",
           [](PySaver& saver) {
             std::vector<std::pair<int, int>> accounts;
             for (const auto& [file, slot] : saver->driver().accounts()) accounts.emplace_back(file, slot);
             return accounts;
           })
      .def(
          "known_tags", [](PySaver& saver) { return saver->known_tags(); }, py::call_guard<py::gil_scoped_release>())
      .def(
          "devices", [](PySaver& saver) { return saver->devices(); }, py::call_guard<py::gil_scoped_release>())
      .def(
          "owns", [](PySaver& saver, Address address) { return saver->owns(address); }, py::arg("address"),
          py::call_guard<py::gil_scoped_release>())
      .def("close", [](PySaver& saver) { saver->close(); })
      .def(
          "audit", [](PySaver& saver, const std::map<int, std::size_t>& others) { return saver->audit(others); },
          py::arg("others") = std::map<int, std::size_t>{}, py::call_guard<py::gil_scoped_release>())
      .def("driver_name", [](PySaver& saver) { return std::string(saver->driver().name()); })
      .def("device_count", [](PySaver& saver) { return saver->driver().device_count(); })
      .def(
          "device_info",
          [](PySaver& saver, int device) {
            DeviceInfo info;
            {
              const py::gil_scoped_release no_gil;
              info = saver->driver().device_info(device);
            }
            py::dict dict;
            dict["uuid"] = info.uuid;
            dict["name"] = info.name;
            dict["total_bytes"] = info.total_bytes;
            dict["granularity"] = info.granularity;
            dict["numa_node"] = info.numa_node;
            dict["rdma"] = info.rdma;
            return dict;
          },
          py::arg("device"))
      .def(
          "memory_info",
          [](PySaver& saver, int device) {
            const py::gil_scoped_release no_gil;
            const MemoryInfo info = saver->driver().memory_info(device);
            return std::make_pair(info.free_bytes, info.total_bytes);
          },
          py::arg("device"), "(free, total) bytes of a device, as the driver tells them now")
      .def(
          "digest",
          [](PySaver& saver, int device, Address address, std::size_t bytes, const std::array<std::uint64_t, 4>& key) {
            const py::gil_scoped_release no_gil;
            Driver& driver = saver->driver();
            const DigestKey keys{{key[0], key[1], key[2], key[3]}};
            const Stream stream = driver.create_stream(device);
            Digest digest;
            {
              DigestQueue queue(driver, device, keys, stream);
              const std::vector<Extent> extents{{0, bytes}};
              queue.submit({{address, &extents}});
              digest = queue.collect().front();
            }
            driver.destroy_stream(device, stream);
            return std::make_tuple(digest.lane0, digest.lane1, digest.any);
          },
          py::arg("device"), py::arg("address"), py::arg("bytes"), py::arg("key"))
      .def(
          "fail",
          [](PySaver& saver, const std::string& call, std::size_t nth, const std::string& kind, std::size_t times) {
            saver.faulty().fail(call, nth,
                                parse<ErrorKind>(kind, "failure",
                                                 {{"out_of_memory", ErrorKind::out_of_device_memory},
                                                  {"out_of_host_memory", ErrorKind::out_of_host_memory},
                                                  {"invalid_value", ErrorKind::driver},
                                                  {"context_lost", ErrorKind::context_lost}}),
                                times);
          },
          py::arg("call"), py::arg("nth") = 1, py::arg("kind") = "invalid_value", py::arg("times") = 1)
      .def(
          "delay", [](PySaver& saver, const std::string& call, double seconds) { saver.faulty().delay(call, seconds); },
          py::arg("call"), py::arg("seconds"))
      .def("heal", [](PySaver& saver) { saver.faulty().heal(); })
      .def("counts", [](PySaver& saver) { return saver.faulty().counts(); });

  py::class_<HostBuffer>(module, "HostBuffer", py::buffer_protocol())
      .def(py::init<PySaver&, int, const std::string&, const std::string&, std::size_t>(), py::arg("saver"),
           py::arg("device"), py::arg("tag"), py::arg("restore"), py::arg("bytes"))
      .def_property_readonly("address", &HostBuffer::address)
      .def_buffer(&HostBuffer::view);

  module.def(
      "activate",
      [](const std::shared_ptr<PySaver>& saver) {
        // torch frees memory until the very end of the process, after Python's objects are gone.
        static std::vector<std::shared_ptr<PySaver>>* kept = new std::vector<std::shared_ptr<PySaver>>;
        kept->push_back(saver);
        set_active_saver(&**saver);
      },
      py::arg("saver"), "Make this the saver that torch's allocations go to.");
  module.def(
      "allocator_for",
      [](const std::string& tag, const std::string& restore) { return allocator_for(tag, parse_restore(restore)); },
      py::arg("tag"), py::arg("restore"));
  module.def("take_allocation_failure", &take_allocation_failure);
  module.def("attach_preload_library", &attach_preload_library, py::arg("zeroed_tags"),
             "Send the preload library's allocations to the active saver; its path, or an empty string.");
  module.def(
      "restore_for",
      [](const std::string& tag, bool cpu_backup, bool disk_backup) {
        return std::string(name_of(restore_for(tag, cpu_backup, disk_backup)));
      },
      py::arg("tag"), py::arg("cpu_backup"), py::arg("disk_backup"));
  module.def(
      "cuda_missing",
      [] {
        std::string why;
        return cuda_available(&why) ? std::string() : why;
      },
      "Why CUDA cannot be used here; an empty string where it can.");
  module.def("can_checkpoint", &cuda_can_checkpoint);
  module.def("reaches", &cuda_reaches, py::arg("device"), py::arg("address"), py::call_guard<py::gil_scoped_release>());
  module.def("set_nvrtc_path", &cuda::set_nvrtc_path, py::arg("path"));
  module.def("available_memory_bytes", [] { return available_memory_bytes(); });
  module.def(
      "digest_of",
      [](const py::buffer& data, const std::array<std::uint64_t, 4>& key, std::uint64_t first_word) {
        const py::buffer_info info = data.request();
        const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
        if (bytes % kDigestWord != 0) throw Error(ErrorKind::configuration, "digests are of multiples of 16 bytes");
        const py::gil_scoped_release no_gil;
        const Digest digest = digest_on_host({{key[0], key[1], key[2], key[3]}},
                                             {reinterpret_cast<std::uint64_t>(info.ptr), bytes, first_word});
        return std::make_tuple(digest.lane0, digest.lane1, digest.any);
      },
      py::arg("data"), py::arg("key"), py::arg("first_word") = 0);
}
