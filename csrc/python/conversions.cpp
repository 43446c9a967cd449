#include "python/bindings.hpp"

namespace memsaver::python {

namespace {

py::dict to_dict(const PipelineSeconds& seconds) {
  py::dict dict;
  dict["host_memory_seconds"] = seconds.host_memory;
  dict["digest_seconds"] = seconds.digest;
  dict["copy_seconds"] = seconds.copy;
  dict["driver_seconds"] = seconds.driver;
  return dict;
}

py::dict to_dict(const TagOutcome& tag) {
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
  return dict;
}

py::dict to_dict(const TagSnapshot& tag) {
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
  return dict;
}

template <typename Tag>
py::list to_list(const std::vector<Tag>& tags) {
  py::list list;
  for (const auto& tag : tags) list.append(to_dict(tag));
  return list;
}

}  // namespace

Restore parse_restore(const std::string& text) {
  return parse<Restore>(
      text, "restore policy",
      {{"discard", Restore::discard}, {"zero", Restore::zero}, {"host", Restore::host}, {"file", Restore::file}});
}

py::dict to_dict(const OperationResult& result) {
  py::dict dict;
  dict["tags"] = to_list(result.tags);
  dict["devices"] = result.devices;
  dict["seconds"] = result.seconds;
  dict["work"] = to_dict(result.work);
  dict["first_memory_seconds"] = result.first_memory_seconds;
  return dict;
}

py::dict to_dict(const SaverStatus& status) {
  py::dict dict;
  dict["state"] = status.state;
  dict["failure"] = status.failure;
  dict["tags"] = to_list(status.tags);
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

py::dict to_dict(const BackupView& view) {
  py::dict dict;
  dict["tag"] = view.tag;
  dict["released"] = view.released;
  dict["in_host_memory"] = view.kept == Kept::host;
  dict["on_disk"] = view.kept == Kept::file;
  dict["memory"] = reinterpret_cast<Address>(view.memory);
  return dict;
}

py::dict to_dict(const DeviceInfo& info) {
  py::dict dict;
  dict["uuid"] = info.uuid;
  dict["name"] = info.name;
  dict["total_bytes"] = info.total_bytes;
  dict["granularity"] = info.granularity;
  dict["numa_node"] = info.numa_node;
  dict["rdma"] = info.rdma;
  return dict;
}

void set_python_error(const Error& error) {
  const py::object errors = py::module_::import("memsaver_core.errors");
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

}  // namespace memsaver::python
