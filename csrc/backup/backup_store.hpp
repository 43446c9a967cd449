#pragma once

#include <unistd.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backup/block.hpp"
#include "backup/file_store.hpp"
#include "backup/host_pool.hpp"
#include "backup/pipeline.hpp"
#include "backup/shared_store.hpp"
#include "driver/driver.hpp"
#include "support/background.hpp"
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

struct BackupSettings {
  std::size_t host_backup_limit = 0;  // 0: 80 % of the memory that is available when the store is made
  std::string file_folder = "/tmp";
  Retention retention = Retention::keep;
  VerifyChoice verify = VerifyChoice::automatic;
  bool pack = true;            // keep content packed if that saves an eighth
  std::string shared_backups;  // the name of a store of host memory that other processes use, too; empty: none
};

// Owns what content is kept in, and decides until when: pinned host memory for each NUMA node, the backup file, the
// shared store, the pipeline of each device, and the thread that works in the background. Any thread may call any
// function.
class BackupStore {
 public:
  // `drop_resident` drops the backups of all resident memory; it is called with operation_mutex held. Throws
  // configuration, or backup if the limits of host memory cannot be read.
  BackupStore(Driver& driver, BackupSettings settings, Progress& progress, std::function<void()> drop_resident);
  // Waits for the thread in the background and gives everything back. In a forked child, which shares its parent's
  // device memory and has none of its threads, it gives nothing back.
  ~BackupStore();

  // Held by the one user of the backups: a release, a resume, a reader, or the thread in the background. Taken before
  // every other lock.
  Mutex operation_mutex ACQUIRED_BEFORE(mutex_);

  // Adds a device, with the NUMA node next to it, and the nodes of all devices, which share the limit of host memory.
  // The functions below need their device to be added.
  void add_device(int device, int node, const std::set<int>& nodes) EXCLUDES(mutex_);

  [[nodiscard]] HostPool& pool_of(int device) EXCLUDES(mutex_);
  // Makes the pipeline at the first call; one thread at a time for one device. Throws driver errors.
  [[nodiscard]] Pipeline& pipeline_of(int device) REQUIRES(operation_mutex) EXCLUDES(mutex_);
  // Gives back to the devices what earlier operations could not. Throws context_lost.
  void clean_up() REQUIRES(operation_mutex) EXCLUDES(mutex_);
  // Returns the memory of a device that is held for packing: none between operations, unless the driver did not take it
  // back.
  [[nodiscard]] std::size_t device_bytes(int device) REQUIRES(operation_mutex) EXCLUDES(mutex_);
  // Returns null if blocks are not shared with other processes.
  [[nodiscard]] SharedStore* shared() const { return shared_.get(); }
  [[nodiscard]] FileStore& files() { return files_; }
  [[nodiscard]] const FileStore& files() const { return files_; }
  // Returns whether content may be packed.
  [[nodiscard]] bool packs() const { return settings_.pack; }
  // Never returns `automatic`.
  [[nodiscard]] VerifyChoice verify() const;

  // Drops what is kept of a block. Calls neither driver nor file system; flush() does the rest.
  void give_back(Block& block, int device) EXCLUDES(mutex_);
  // Gives to the file system, and to other processes of the shared store, what give_back() dropped. May wait for both:
  // call it with no lock held but operation_mutex.
  void flush();
  // Compiles in the background, once, what packing needs on each device in use, so that later operations pack and
  // unpack.
  void prepare_packing_later() REQUIRES(operation_mutex);
  // Applies the retention policy in the background, after the operation that holds the lock.
  void retain() REQUIRES(operation_mutex);
  // Unpins unused host memory in the background.
  void trim_later() REQUIRES(operation_mutex);
  // Does so if it is much: host memory is pinned for the content, and packed content needs less. Only once all content
  // has its backup.
  void trim_excess() REQUIRES(operation_mutex);
  // Returns whether this machine or its control group has less memory than `bytes` and transfers to files take
  // together. If so, unpins unused host memory before it returns.
  [[nodiscard]] bool short_of_room(std::size_t bytes) REQUIRES(operation_mutex);

  // Lets no host memory be unpinned from now on: the process is ending, and the driver before it.
  void end() noexcept EXCLUDES(mutex_);

  [[nodiscard]] std::vector<HostPool*> pools() const EXCLUDES(mutex_);
  // Returns the sum over all pools.
  [[nodiscard]] HostPoolStatus pool_status() const EXCLUDES(mutex_);

 private:
  // Lets work() run in the background, once more if it is running.
  void work_later() REQUIRES(operation_mutex);
  // What fails is logged.
  void work() noexcept EXCLUDES(operation_mutex, mutex_);
  void do_wanted_work() EXCLUDES(operation_mutex, mutex_);

  const pid_t process_ = getpid();
  Driver& driver_;
  const BackupSettings settings_;
  const std::unique_ptr<SharedStore> shared_;
  const DigestKey key_;
  Progress& progress_;
  const std::function<void()> drop_resident_;
  FileStore files_;

  bool trim_wanted_ GUARDED_BY(operation_mutex) = false;
  bool drop_wanted_ GUARDED_BY(operation_mutex) = false;
  std::set<int> packing_ GUARDED_BY(operation_mutex);  // devices for which packing is or was prepared
  std::vector<int> packing_wanted_ GUARDED_BY(operation_mutex);

  mutable Mutex mutex_;
  std::map<int, int> node_of_ GUARDED_BY(mutex_);  // by device
  std::size_t nodes_ GUARDED_BY(mutex_) = 0;
  std::map<int, std::unique_ptr<HostPool>> pools_ GUARDED_BY(mutex_);      // by NUMA node
  std::map<int, std::unique_ptr<Pipeline>> pipelines_ GUARDED_BY(mutex_);  // by device
  Background background_{[this] { work(); }};
};

}  // namespace memsaver
