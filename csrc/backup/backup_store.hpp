#pragma once

#include "backup/block.hpp"
#include "backup/file_store.hpp"
#include "backup/host_pool.hpp"
#include "backup/links.hpp"
#include "backup/pipeline.hpp"
#include "backup/shared_store.hpp"

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

// Owns what keeps content, and decides for how long it is kept: pinned host memory for each NUMA node, the backup file,
// the shared store, the pipelines of the devices, and a background thread. Any thread may call any function.
class BackupStore {
 public:
  // `drop_resident` drops the backups of all resident memory; it is called with operation_mutex held. Throws
  // configuration, or backup if the limits of host memory cannot be read.
  BackupStore(Driver& driver, BackupSettings settings, Progress& progress, std::function<void()> drop_resident)
      : driver_(driver),
        settings_(with_limit(std::move(settings))),
        shared_(settings_.shared_backups.empty()
                    ? nullptr
                    : std::make_unique<SharedStore>(driver, settings_.shared_backups, settings_.host_backup_limit)),
        key_(shared_ ? shared_->key() : random_digest_key()),
        progress_(progress),
        drop_resident_(std::move(drop_resident)),
        files_(settings_.file_folder) {}
  // Gives everything back, after the work in the background; nothing in a forked child, whose parent still has it.
  ~BackupStore() {
    if (getpid() != process_) {
      for (auto& [device, pipeline] : pipelines_) (void)pipeline.release();
      for (auto& [node, pool] : pools_) (void)pool.release();
      background_.abandon();
      (void)lender_.release();
      return;
    }
    background_.join();
    pipelines_.clear();  // they use the pools and the files
  }

  // Held by a release, a resume, a reader, or the thread in the background. Taken before every other lock.
  Mutex operation_mutex ACQUIRED_BEFORE(mutex_);

  // Adds a device. All devices together have `nodes` NUMA nodes closest to them, which share the limit of host memory.
  // The functions below need their device to be added.
  void add_device(int device, const DeviceInfo& info, std::size_t nodes) EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    auto& pool = pools_[info.numa_node];
    if (!pool) pool = std::make_unique<HostPool>(driver_, settings_.host_backup_limit / nodes, info.numa_node);
    const bool added = pool_of_.emplace(device, pool.get()).second;
    if (shared_ && added) shared_->index().add_device(info.uuid);
  }

  [[nodiscard]] HostPool& pool_of(int device) EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return *pool_of_.at(device);
  }
  // Makes the pipeline at the first call; one thread at a time for one device. Throws driver errors.
  [[nodiscard]] Pipeline& pipeline_of(int device) REQUIRES(operation_mutex) EXCLUDES(mutex_) {
    {
      const Lock lock(mutex_);
      const auto found = pipelines_.find(device);
      if (found != pipelines_.end()) return *found->second;
    }
    const PipelineParts parts{driver_, device, pool_of(device), files_, shared_.get(), key_, progress_};
    auto pipeline = std::make_unique<Pipeline>(parts, settings_.pack);
    const Lock lock(mutex_);
    return *pipelines_.emplace(device, std::move(pipeline)).first->second;
  }
  // Gives back to the devices what earlier operations could not. Throws context_lost.
  void clean_up() REQUIRES(operation_mutex) EXCLUDES(mutex_) {
    std::vector<Pipeline*> pipelines;
    {
      const Lock lock(mutex_);
      for (const auto& [device, pipeline] : pipelines_) pipelines.push_back(pipeline.get());
    }
    for (Pipeline* const pipeline : pipelines) pipeline->packing.close();
  }
  // Returns null if blocks are not shared with other processes.
  [[nodiscard]] SharedStore* shared() const { return shared_.get(); }
  // Lends the link of the device to other members of the store, if it is the only one and `idle` returns true: this
  // process uses no memory of it. Until refuse_link(), which precedes any such use; if that is of another thread,
  // `idle` returns false by then.
  void lend_link(const std::vector<int>& devices, const std::function<bool()>& idle) EXCLUDES(lender_mutex_) {
    if (!shared_) return;
    const Lock lock(lender_mutex_);
    if (lender_ || !idle()) return;
    shared_->index().set_idle(true);
    if (devices.size() != 1) return;
    attempt("this process does not lend its link", [&]() REQUIRES(lender_mutex_) {
      lender_ = std::make_unique<LinkLender>(driver_, *shared_, devices.front());
    });
  }
  // Returns once this process uses its device for no other member, as ~LinkLender().
  void refuse_link() EXCLUDES(lender_mutex_) {
    if (!shared_) return;
    const Lock lock(lender_mutex_);
    shared_->index().set_idle(false);
    lender_.reset();
  }
  [[nodiscard]] const DigestKey& key() const { return key_; }
  [[nodiscard]] FileStore& files() { return files_; }
  [[nodiscard]] const FileStore& files() const { return files_; }
  [[nodiscard]] bool packs() const { return settings_.pack; }
  // Never returns `automatic`.
  [[nodiscard]] VerifyChoice verify() const {
    if (settings_.verify != VerifyChoice::automatic) return settings_.verify;
    // A GPU digests its memory about seventy times as fast as PCIe 5 x16 copies it, a CPU about as fast as it copies.
    return driver_.in_host_memory() ? VerifyChoice::sampled : VerifyChoice::full;
  }

  // Drops what is kept of a block, without a call of driver or file system: flush() does the rest. No process finds
  // damaged content from then on.
  void give_back(Block& block, int device) EXCLUDES(mutex_) {
    if (block.damaged && block.shared) shared_->spoil(*block.shared);
    if (!block.host.empty() || block.shared) give_host_memory(block, pool_of(device), shared_.get());
    files_.give(std::exchange(block.file, {}));
    block.kept = Kept::nothing;
    block.digest.reset();
    block.damaged = false;
    block.packed_bytes = 0;
  }
  // Gives to the file system and the shared store what give_back() dropped. May wait: hold no lock but operation_mutex.
  void flush() {
    files_.punch_holes();
    if (shared_) shared_->apply_pending();
  }
  // Compiles in the background, once, what packing needs on each device in use.
  void prepare_packing_later() REQUIRES(operation_mutex) {
    if (!settings_.pack && !shared_) return;  // other processes of the store may pack
    {
      const Lock lock(mutex_);
      for (const auto& [device, pipeline] : pipelines_) {
        if (!driver_.has_packing(device) && packing_.insert(device).second) packing_wanted_.push_back(device);
      }
    }
    if (!packing_wanted_.empty()) background_.request();
  }
  // Applies the retention policy in the background, after the operation that holds the lock.
  void retain() REQUIRES(operation_mutex) {
    if (settings_.retention == Retention::keep) return;
    drop_wanted_ = drop_wanted_ || settings_.retention == Retention::free;
    trim_later();
  }
  // Unpins unused host memory in the background.
  void trim_later() REQUIRES(operation_mutex) {
    trim_wanted_ = true;
    background_.request();
  }
  // Calls trim_later() if much is unused: packed content takes less than was pinned. Only once all has its backup.
  void trim_excess() REQUIRES(operation_mutex) {
    const HostPoolStatus pool = pool_status();
    const std::size_t unused = pool.capacity_bytes - pool.used_bytes;
    if (settings_.pack && unused > std::max(kLargestWindow, pool.used_bytes / 8)) trim_later();
  }
  // Returns whether `bytes` and the bounce memory of transfers exceed available memory; if so, unpins what is unused.
  [[nodiscard]] bool short_of_room(std::size_t bytes) REQUIRES(operation_mutex) {
    try {
      if (bytes + kTransfers * kBlockBytes + kSpareMemory <= available_memory_bytes()) return false;
    } catch (const Error&) {
      return false;  // how much is available cannot be read now
    }
    for (HostPool* const pool : pools()) pool->trim();
    return true;
  }

  // Lets no host memory be unpinned from now on: the process is ending, and its driver may be gone already.
  void end() noexcept EXCLUDES(mutex_, lender_mutex_) {
    refuse_link();
    const Lock lock(mutex_);
    for (const auto& [node, pool] : pools_) pool->end();
  }

  [[nodiscard]] std::vector<HostPool*> pools() const EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    std::vector<HostPool*> pools;
    for (const auto& [node, pool] : pools_) pools.push_back(pool.get());
    return pools;
  }
  [[nodiscard]] HostPoolStatus pool_status() const EXCLUDES(mutex_) {
    HostPoolStatus sum{};
    for (const HostPool* const pool : pools()) {
      const HostPoolStatus each = pool->status();
      sum.used_bytes += each.used_bytes;
      sum.capacity_bytes += each.capacity_bytes;
      sum.target_bytes += each.target_bytes;
    }
    sum.limit_bytes = settings_.host_backup_limit;
    return sum;
  }

 private:
  friend struct SaverAudit;  // of the tests
  static BackupSettings with_limit(BackupSettings settings) {
    if (settings.host_backup_limit == 0) settings.host_backup_limit = available_memory_bytes() / 5 * 4;
    return settings;
  }
  // Holds operation_mutex, except while kernels are compiled and memory is given back: that may take long.
  void work() EXCLUDES(operation_mutex, mutex_) {
    bool trim = false;
    std::vector<int> devices;
    {
      const Lock operation(operation_mutex);
      trim = std::exchange(trim_wanted_, false);
      devices = std::exchange(packing_wanted_, {});
      if (std::exchange(drop_wanted_, false)) drop_resident_();
    }
    for (const int device : devices) driver_.prepare_packing(device);
    if (!trim) return;
    flush();
    for (HostPool* const pool : pools()) pool->trim();
    if (shared_) shared_->trim();
  }

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

  Mutex lender_mutex_;
  std::unique_ptr<LinkLender> lender_ GUARDED_BY(lender_mutex_);

  mutable Mutex mutex_;
  std::map<int, std::unique_ptr<HostPool>> pools_ GUARDED_BY(mutex_);      // by NUMA node
  std::map<int, HostPool*> pool_of_ GUARDED_BY(mutex_);                    // by device
  std::map<int, std::unique_ptr<Pipeline>> pipelines_ GUARDED_BY(mutex_);  // by device
  Background background_{
      "unpin backup memory or to prepare packing; the next operation tries again", [this] {
        attempt("work in the background failed, so unused backup memory stays pinned until a later operation",
                [this] { work(); });
      }};
};

}  // namespace memsaver
