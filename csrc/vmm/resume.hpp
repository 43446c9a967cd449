#pragma once

#include "vmm/operation.hpp"

namespace memsaver {

// Maps everything released under its tags at the same addresses, with the content owed; Saver::resume() has the
// contract.
class Resume final : public Operation {
 public:
  explicit Resume(Core& core) : Operation(core, Progress::Operation::resume) {}

 private:
  void plan(Arena& arena) REQUIRES(core_.backups.operation_mutex, core_.map.mutex) override;
  void run() REQUIRES(core_.backups.operation_mutex) override;
  // Throws ErrorKind::out_of_device_memory if a device has less free memory than this resume needs.
  void check_room();
  // Maps the chunks of one device and restores their content. When this throws, `device.transaction` undoes it.
  void restore(DeviceWork& device) REQUIRES(core_.backups.operation_mutex) EXCLUDES(core_.map.mutex);
};

}  // namespace memsaver
