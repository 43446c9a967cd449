#pragma once

#include <unistd.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backup/block.hpp"
#include "backup/file_store.hpp"
#include "backup/host_pool.hpp"
#include "backup/pipeline.hpp"
#include "backup/shared_store.hpp"
#include "driver/driver.hpp"
#include "support/digest.hpp"
#include "support/mutex.hpp"
#include "support/progress.hpp"

namespace memsaver {

// What becomes of backups after a resume.
enum class Retention {
  keep,  // all stay for the next release
  trim,  // all stay; unused host memory is unpinned
  free,  // backups of resident memory are dropped, and their memory is unpinned
};

// Keeps content, and decides until when: pinned host memory for each NUMA node, the backup file, the pipeline of each
// device, and the thread that enforces the retention policy.
class BackupStore {
 public:
  struct Options {
    std::size_t host_limit;  // bytes
    std::string folder;
    Retention retention;
    VerifyChoice verify;
    bool pack;
    std::string shared;  // name of a store that other processes use, too; empty: none
  };

  // `drop_resident` drops the backups of all resident memory; it is called with operation_mutex held.
  BackupStore(Driver& driver, Options options, Progress& progress, std::function<void()> drop_resident);
  // Waits for the retention thread and gives everything back. In a forked child, which shares its parent's device
  // memory and has none of its threads, it gives nothing back.
  ~BackupStore();

  // Held by the one user of the backups: a release, a resume, a reader, or the retention thread. Taken before every
  // other lock.
  Mutex operation_mutex ACQUIRED_BEFORE(mutex_);

  // Announces a device: the NUMA node next to it, and those of all devices, which share the limit of host memory.
  void add_device(int device, int node, const std::set<int>& nodes) EXCLUDES(mutex_);
  // The functions below need their device to be announced.

  [[nodiscard]] HostPool& pool_of(int device) EXCLUDES(mutex_);
  // Made at the first call. Only one thread at a time for one device.
  [[nodiscard]] Pipeline& pipeline_of(int device) REQUIRES(operation_mutex) EXCLUDES(mutex_);
  // What earlier operations could not give back to the devices, is tried again.
  void clean_up() REQUIRES(operation_mutex) EXCLUDES(mutex_);
  // Memory of a device that is held for packing: none between operations, unless the driver did not take it back.
  [[nodiscard]] std::size_t device_bytes(int device) REQUIRES(operation_mutex) EXCLUDES(mutex_);
  // Null if blocks are not shared with other processes.
  [[nodiscard]] SharedStore* shared() const { return shared_.get(); }
  [[nodiscard]] FileStore& files() { return files_; }
  [[nodiscard]] const FileStore& files() const { return files_; }
  // Whether content may be packed.
  [[nodiscard]] bool packs() const { return options_.pack; }
  // Never `automatic`.
  [[nodiscard]] VerifyChoice verify() const;

  // Drops what is kept of a block. Calls neither driver nor file system.
  void give_back(Block& block, int device) EXCLUDES(mutex_);
  // Returns to the system, and to other processes, what give_back() left to be returned. May wait for both: do not call
  // it with a lock held but operation_mutex.
  void settle();
  // Makes ready in the background what packing needs on each device in use, so that later releases pack, and resumes
  // unpack. Once.
  void prepare_packing_later() REQUIRES(operation_mutex);
  // Applies the retention policy in the background, after the operation that holds the lock.
  void retain() REQUIRES(operation_mutex);
  // Unpins unused host memory in the background.
  void trim_later() REQUIRES(operation_mutex);
  // The same, if it is much: host memory is pinned for the content, and packed content needs less. Only once all
  // content has its backup.
  void trim_excess() REQUIRES(operation_mutex);
  // Whether this machine or its control group has less memory than `bytes` and transfers to files take together. If so,
  // unpins unused host memory at once.
  [[nodiscard]] bool short_of_room(std::size_t bytes) REQUIRES(operation_mutex);

  // The process is ending, and the driver before it: no host memory is unpinned from now on.
  void end() noexcept EXCLUDES(mutex_);

  [[nodiscard]] std::vector<HostPool*> pools() const EXCLUDES(mutex_);
  // Sum over all pools.
  [[nodiscard]] HostPoolStatus pool_status() const EXCLUDES(mutex_);

 private:
  void work_later() REQUIRES(operation_mutex);
  void work() EXCLUDES(operation_mutex, mutex_);

  const pid_t process_ = getpid();
  Driver& driver_;
  const Options options_;
  const std::unique_ptr<SharedStore> shared_;
  const DigestKey key_;
  Progress& progress_;
  const std::function<void()> drop_resident_;
  FileStore files_;

  std::thread worker_ GUARDED_BY(operation_mutex);
  bool working_ GUARDED_BY(operation_mutex) = false;
  bool trim_wanted_ GUARDED_BY(operation_mutex) = false;
  bool drop_wanted_ GUARDED_BY(operation_mutex) = false;
  std::set<int> packing_ GUARDED_BY(operation_mutex);  // devices for which packing is made ready, or was
  std::vector<int> packing_wanted_ GUARDED_BY(operation_mutex);

  mutable Mutex mutex_;
  std::map<int, int> node_of_ GUARDED_BY(mutex_);  // by device
  std::size_t nodes_ GUARDED_BY(mutex_) = 0;
  std::map<int, std::unique_ptr<HostPool>> pools_ GUARDED_BY(mutex_);      // by NUMA node
  std::map<int, std::unique_ptr<Pipeline>> pipelines_ GUARDED_BY(mutex_);  // by device
};

}  // namespace memsaver
