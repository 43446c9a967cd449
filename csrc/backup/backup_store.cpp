#include "backup/backup_store.hpp"

#include <algorithm>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"

namespace memsaver {

static BackupSettings with_limit(BackupSettings settings) {
  if (settings.host_backup_limit == 0) settings.host_backup_limit = available_memory_bytes() / 5 * 4;
  return settings;
}

BackupStore::BackupStore(Driver& driver, BackupSettings settings, Progress& progress,
                         std::function<void()> drop_resident)
    : driver_(driver),
      settings_(with_limit(std::move(settings))),
      shared_(settings_.shared_backups.empty()
                  ? nullptr
                  : std::make_unique<SharedStore>(driver, settings_.shared_backups, settings_.host_backup_limit)),
      key_(shared_ ? shared_->key() : random_digest_key()),
      progress_(progress),
      drop_resident_(std::move(drop_resident)),
      files_(settings_.file_folder) {}

BackupStore::~BackupStore() {
  if (getpid() != process_) {
    for (auto& [device, pipeline] : pipelines_) (void)pipeline.release();
    for (auto& [node, pool] : pools_) (void)pool.release();
    background_.abandon();
    return;
  }
  background_.join();
  pipelines_.clear();  // they use the pools and the files
}

void BackupStore::add_device(int device, int node, const std::set<int>& nodes) {
  const Lock lock(mutex_);
  node_of_.emplace(device, node);
  nodes_ = nodes.size();
}

HostPool& BackupStore::pool_of(int device) {
  const Lock lock(mutex_);
  const int node = node_of_.at(device);
  const auto found = pools_.find(node);
  if (found != pools_.end()) return *found->second;
  auto pool = std::make_unique<HostPool>(driver_, settings_.host_backup_limit / nodes_, node);
  return *pools_.emplace(node, std::move(pool)).first->second;
}

Pipeline& BackupStore::pipeline_of(int device) {
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

void BackupStore::clean_up() {
  std::vector<Pipeline*> pipelines;
  {
    const Lock lock(mutex_);
    for (const auto& [device, pipeline] : pipelines_) pipelines.push_back(pipeline.get());
  }
  for (Pipeline* const pipeline : pipelines) pipeline->packing.close();
}

std::size_t BackupStore::device_bytes(int device) {
  const Lock lock(mutex_);
  const auto found = pipelines_.find(device);
  return found == pipelines_.end() ? 0 : found->second->packing.held_bytes();
}

VerifyChoice BackupStore::verify() const {
  if (settings_.verify != VerifyChoice::automatic) return settings_.verify;
  return driver_.digest_is_cheap() ? VerifyChoice::full : VerifyChoice::sampled;
}

void BackupStore::give_back(Block& block, int device) {
  if (!block.host.empty() || block.shared) give_host_memory(block, pool_of(device), shared_.get());
  files_.give(std::exchange(block.file, {}));
  block.kept = Kept::nothing;
  block.has_digest = false;
  block.damaged = false;
  block.packed_bytes = 0;
}

void BackupStore::flush() {
  files_.punch_holes();
  if (shared_) shared_->apply_pending();
}

void BackupStore::prepare_packing_later() {
  if (!settings_.pack && !shared_) return;  // other processes of the store may pack
  {
    const Lock lock(mutex_);
    for (const auto& [device, pipeline] : pipelines_) {
      if (!driver_.has_packing(device) && packing_.insert(device).second) packing_wanted_.push_back(device);
    }
  }
  if (!packing_wanted_.empty()) work_later();
}

void BackupStore::retain() {
  if (settings_.retention == Retention::keep) return;
  drop_wanted_ = drop_wanted_ || settings_.retention == Retention::free;
  trim_later();
}

void BackupStore::trim_later() {
  trim_wanted_ = true;
  work_later();
}

// The work waits for the operation of this caller.
void BackupStore::work_later() {
  if (background_.request()) return;
  warn("no thread can be started to unpin backup memory or to prepare packing; the next operation tries again");
}

void BackupStore::trim_excess() {
  const HostPoolStatus pool = pool_status();
  const std::size_t unused = pool.capacity_bytes - pool.used_bytes;
  if (settings_.pack && unused > std::max(kLargestWindow, pool.used_bytes / 8)) trim_later();
}

void BackupStore::work() noexcept {
  try {
    do_wanted_work();
  } catch (const std::exception& error) {
    warn(std::string("work in the background failed, so unused backup memory stays pinned until a later operation: ") +
         error.what());
  }
}

// Holds operation_mutex, except while kernels are compiled and memory is given back, which may take long.
void BackupStore::do_wanted_work() {
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

bool BackupStore::short_of_room(std::size_t bytes) {
  try {
    if (bytes + kFileTransfers * kBlockBytes + kSpareMemory <= available_memory_bytes()) return false;
  } catch (const Error&) {
    return false;  // without descriptors nothing can be read
  }
  for (HostPool* const pool : pools()) pool->trim();
  return true;
}

void BackupStore::end() noexcept {
  const Lock lock(mutex_);
  for (const auto& [node, pool] : pools_) pool->end();
}

std::vector<HostPool*> BackupStore::pools() const {
  const Lock lock(mutex_);
  std::vector<HostPool*> pools;
  for (const auto& [node, pool] : pools_) pools.push_back(pool.get());
  return pools;
}

HostPoolStatus BackupStore::pool_status() const {
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

}  // namespace memsaver
