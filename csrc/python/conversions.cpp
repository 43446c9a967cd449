#include "python/bindings.hpp"

namespace memsaver::python {

namespace {

py::dict to_dict(const PipelineSeconds& seconds) {
  return py::dict("host_memory_seconds"_a = seconds.host_memory, "digest_seconds"_a = seconds.digest,
                  "copy_seconds"_a = seconds.copy, "driver_seconds"_a = seconds.driver);
}

py::dict to_dict(const SharedStoreStatus& store) {
  return py::dict("name"_a = store.name, "processes"_a = store.processes, "held_bytes"_a = store.held_bytes,
                  "share_bytes"_a = store.share_bytes, "used_bytes"_a = store.used_bytes,
                  "total_bytes"_a = store.total_bytes, "limit_bytes"_a = store.limit_bytes);
}

py::dict to_dict(const TagOutcome& tag) {
  return py::dict("tag"_a = tag.tag, "restore"_a = tag.restore, "state"_a = tag.state, "bytes"_a = tag.bytes,
                  "released_bytes"_a = tag.released_bytes, "resumed_bytes"_a = tag.resumed_bytes,
                  "backed_up_bytes"_a = tag.backed_up_bytes, "kept_bytes"_a = tag.kept_bytes,
                  "unchanged_bytes"_a = tag.unchanged_bytes, "shared_bytes"_a = tag.shared_bytes,
                  "zero_bytes"_a = tag.zero_bytes, "restored_bytes"_a = tag.restored_bytes, "already"_a = tag.already);
}

py::dict to_dict(const TagSnapshot& tag) {
  return py::dict("tag"_a = tag.tag, "restore"_a = tag.restore, "state"_a = tag.state, "bytes"_a = tag.bytes,
                  "resident_bytes"_a = tag.resident_bytes, "released_bytes"_a = tag.released_bytes,
                  "retained_bytes"_a = tag.retained_bytes, "backed_up_bytes"_a = tag.backed_up_bytes,
                  "kept_bytes"_a = tag.kept_bytes, "expected_bytes"_a = tag.expected_bytes,
                  "allocations"_a = tag.allocations, "chunks"_a = tag.chunks,
                  "mapped_by_device"_a = tag.mapped_by_device, "bytes_by_device"_a = tag.bytes_by_device);
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
  return py::dict("tags"_a = to_list(result.tags), "devices"_a = result.devices, "seconds"_a = result.seconds,
                  "work"_a = to_dict(result.work), "first_memory_seconds"_a = result.first_memory_seconds);
}

py::dict to_dict(const SaverStatus& status) {
  return py::dict("state"_a = status.state, "failure"_a = status.failure, "tags"_a = to_list(status.tags),
                  "reserved_by_device"_a = status.reserved_by_device, "backup_bytes"_a = status.backup_bytes,
                  "file_bytes"_a = status.file_bytes, "pool_used_bytes"_a = status.pool.used_bytes,
                  "pool_capacity_bytes"_a = status.pool.capacity_bytes,
                  "pool_target_bytes"_a = status.pool.target_bytes, "pool_limit_bytes"_a = status.pool.limit_bytes,
                  "shared_store"_a = to_dict(status.shared), "prepared"_a = status.prepared,
                  "operation"_a = status.operation, "done_bytes"_a = status.done_bytes,
                  "total_bytes"_a = status.total_bytes, "copied_bytes"_a = status.copied_bytes,
                  "operation_seconds"_a = status.operation_seconds);
}

py::dict to_dict(const BackupView& view) {
  return py::dict("tag"_a = view.tag, "released"_a = view.released, "in_host_memory"_a = view.kept == Kept::host,
                  "on_disk"_a = view.kept == Kept::file, "memory"_a = reinterpret_cast<Address>(view.memory));
}

py::dict to_dict(const DeviceInfo& info) {
  return py::dict("uuid"_a = info.uuid, "name"_a = info.name, "total_bytes"_a = info.total_bytes,
                  "granularity"_a = info.granularity, "numa_node"_a = info.numa_node, "rdma"_a = info.rdma);
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
