#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backup/backup_store.hpp"
#include "driver/driver.hpp"
#include "support/progress.hpp"
#include "support/range_set.hpp"
#include "vmm/memory_map.hpp"
#include "vmm/physical_memory.hpp"
#include "vmm/reports.hpp"
#include "vmm/settings.hpp"
#include "vmm/thread_stacks.hpp"

namespace memsaver {

// Device memory under tags that can be given back to the driver and brought back at the same addresses.
//
// Promises. The address of a live allocation never changes. After every call, failed or not, each chunk is either
// mapped with its content, or released with what its restore policy owes; a failed call can be repeated, and its
// opposite works. Functions may be called from any thread. Operations (release, resume) run one at a time; allocations
// and status do not wait for them. Every function may throw Error: ErrorKind::forked in a child of the process that
// made the saver, ErrorKind::context_lost once the device context is lost, otherwise as stated.
class Saver {
 public:
  using Tags = MemoryMap::Tags;  // empty: all tags; unknown ones are ignored

  Saver(std::unique_ptr<Driver> driver, Settings settings);
  // In a forked child, which shares the device memory of its parent, ends nothing.
  ~Saver();

  // Memory with undefined content, whatever state its tag is in. Throws ErrorKind::out_of_device_memory or a driver
  // error, and then has no effect.
  [[nodiscard]] Address allocate(const Arena::Key& key, std::size_t bytes);
  // Ends an allocation, released or not, after synchronizing the device. An unknown address is
  // ErrorKind::configuration. If the driver fails to unmap, the memory stays mapped until the next release.
  void free(Address address);

  // Gives the memory of `tags` back, content kept as their policies say (`overrides`: by tag, for this release only).
  // Synchronizes the devices; nothing may use the memory from then on. Tags with kept content go first: until the last
  // of them is gone, a release that fails is undone. `dead` ranges, in address order, hold no content worth keeping.
  // Throws ErrorKind::out_of_host_memory before anything is unmapped if the backups would not fit.
  OperationResult release(const Tags& tags, const std::vector<RangeSet::Range>& dead,
                          const std::map<std::string, Restore>& overrides);
  // Brings back everything released under `tags`, with the content owed. All or nothing: if this throws
  // (ErrorKind::out_of_device_memory, ErrorKind::backup, a driver error), all of it stays released with its backups.
  OperationResult resume(const Tags& tags);
  // Takes the device memory that a resume of `tags` needs, in place of what was reserved before. The next resume uses
  // it, so that it cannot run out, and gives back what it did not use. Throws ErrorKind::out_of_device_memory or a
  // driver error, and then nothing is reserved.
  void reserve(const Tags& tags);
  void give_back_reserved() noexcept;

  // Pins host memory for a release of everything in the background, and compiles kernels (0.25 s each, once).
  void prepare_backup();
  void wait_until_prepared();
  void synchronize();
  // Releases what the driver caches for CUDA graphs that no longer exist, on every device.
  void trim_graph_memory();

  // The backup of [address, address + bytes): the content at the last release, kept until the next one or until it is
  // dropped. Copies it to `to` if that is not null and all of it is in host memory. Waits for an operation under way.
  // ErrorKind::configuration if the range is not within a live allocation, which must not be freed meanwhile.
  [[nodiscard]] BackupView backup_of(Address address, std::size_t bytes, void* to);
  // Drops the backups of resident memory under `tags`, and unpins unused host memory in the background unless it is to
  // be kept for the next release.
  void drop_backups(const Tags& tags, bool keep_memory = false);
  // Unpins unused host memory, in the background unless `at_once`.
  void trim_backup_memory(bool at_once = false);
  // Moves backup files to `folder`; backups on disk of resident memory may be dropped for that. With backups of
  // released memory in the old folder this is ErrorKind::configuration.
  void set_file_folder(const std::string& folder);
  // From now on an allocation that would leave less than this free on its device fails as out of device memory.
  void set_memory_margin(std::size_t bytes) noexcept { memory_margin_ = bytes; }

  // These never wait for an operation and call no driver.
  [[nodiscard]] SaverStatus status() const;
  [[nodiscard]] std::vector<std::string> known_tags() const;
  [[nodiscard]] std::vector<int> devices() const;  // on which memory was ever allocated
  [[nodiscard]] bool owns(Address address) const;
  [[nodiscard]] Driver& driver() { return *driver_; }
  // Throws as every function.
  void check_usable() const;
  // The process is ending: from now on free() does nothing, no host memory is unpinned, and no kernel is compiled.
  // Waits for one that is.
  void close() noexcept;
  // After close(), and in a forked child: nothing is to be given back.
  [[nodiscard]] bool ended() const noexcept { return closed_ || getpid() != process_; }

 private:
  friend struct SaverAudit;  // of the tests
  class Operation;
  class Release;
  class Resume;
  class Reserve;
  class Expectation;

  // Throws ErrorKind::forked in a child of the process that made the saver. Called before any lock is taken: the parent
  // may have held it when it forked.
  void check_process() const;
  // Asks the driver what later calls need to know of a device and its neighbours, once.
  void learn_device(int device) EXCLUDES(map_.mutex);
  // Acquires chunks for `ranges`, one after the other, of an allocation. When this throws, they are free again.
  [[nodiscard]] std::vector<Chunk> acquire(Arena& arena, const std::vector<RangeSet::Range>& ranges)
      EXCLUDES(map_.mutex);
  // Removes an allocation and its backups. Returns the chunks for the caller to pass to PhysicalMemory::give_back(),
  // without the lock.
  [[nodiscard]] std::vector<Chunk> forget(Arena& arena, Address address) REQUIRES(map_.mutex);
  // Drops the backups of resident memory under `tags`.
  void drop_resident(const Tags& tags) REQUIRES(backups_.operation_mutex) EXCLUDES(map_.mutex);
  // Notes what backups of resident content are expected to take. Throws ErrorKind::context_lost; other failures only
  // cost host memory.
  void expect_backups();

  // Each part is made before and destroyed after those that use it. Lock order: backups_.operation_mutex, the retries
  // of orphans, map_.mutex, then the mutex of any other part.
  const pid_t process_ = getpid();
  std::unique_ptr<Driver> driver_;
  Progress progress_;
  MemoryMap map_;
  PhysicalMemory physical_;
  ThreadStacks stacks_;
  BackupStore backups_;
  std::atomic<bool> closed_{false};
  std::atomic<std::size_t> memory_margin_{0};
};

}  // namespace memsaver
