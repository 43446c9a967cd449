#pragma once

#include "vmm/memory_map.hpp"
#include "vmm/physical_memory.hpp"
#include "vmm/reports.hpp"
#include "vmm/settings.hpp"
#include "vmm/thread_stacks.hpp"

namespace memsaver {

// Owns device memory under tags that can be given back to the driver and brought back at the same addresses.
//
// Promises. The address of a live allocation never changes. After every call, failed or not, each chunk is either
// mapped with its content, or released with what its restore policy needs; a failed call can be repeated, and its
// opposite works. Functions may be called from any thread. Operations (release, resume, resize) run one at a time;
// allocations and status do not wait for them. Every function that is not noexcept throws forked in a forked child.
// Those that use a device throw context_lost once the context is lost.
class Saver {
 public:
  using Tags = MemoryMap::Tags;  // empty: all tags; unknown ones are ignored

  // Throws as BackupStore().
  Saver(std::unique_ptr<Driver> driver, Settings settings);
  // Gives everything back; nothing in a forked child, which shares the device memory of its parent.
  ~Saver();

  // Returns memory with undefined content, whatever state its tag is in, mapped in pieces of at most the key's chunk
  // size (rounded up to the device's granularity). Throws driver errors: nothing has changed.
  [[nodiscard]] Address allocate(const Arena::Key& key, std::size_t bytes);
  // Ends an allocation, released or not, after synchronizing the device. If the driver fails to unmap, the memory stays
  // mapped until the next release. Throws configuration if `address` is not that of a live allocation.
  void free(Address address);

  // Gives the memory of `tags` back, content kept as their policies say (`overrides`: by tag, for this release only).
  // Synchronizes the devices; nothing may use the memory until it is resumed. `dead` ranges, in address order, hold no
  // content worth keeping. Tags with kept content go first. Throws out_of_host_memory, disk_full, backup or
  // configuration if the backups would not fit or cannot be made: nothing is unmapped. Throws driver errors,
  // out_of_host_memory, disk_full or backup later: the release is undone, unless content that is not kept is already
  // gone or the undo fails; a repeat and a resume both work then.
  OperationResult release(const Tags& tags, const std::vector<RangeSet::Range>& dead,
                          const std::map<std::string, Restore>& overrides);
  // Brings back everything released under `tags`, with the content that its policies promise; with `verify_all` all
  // content is compared with its digests. Throws driver errors, out_of_host_memory or backup: all of it stays released
  // with its backups.
  OperationResult resume(const Tags& tags, bool verify_all = false);
  // Gives back the chunks of `tag` whose live ranges are all unused, and brings back, with zeros, the other chunks that
  // an earlier resize gave back. A range is unused if it is in `unused`, or beyond the first part `kept` (0 to 1) of
  // its allocation. Synchronizes the devices before anything is unmapped; nothing may use an unused range until a
  // resize keeps it again. A release and its resume skip what a resize gave back. If all of the tag is released, no
  // memory moves, and its resume brings back the used ranges only. Throws configuration if the tag is released in part,
  // or has no memory in one of `unused`: nothing has changed. Throws driver errors or out_of_host_memory: undone, with
  // zeros in the unused ranges; if the undo fails, what was given back stays so.
  OperationResult resize(const std::string& tag, const std::vector<RangeSet::Range>& unused, double kept);
  // Makes the backups that a release of `tags` would make, and gives nothing back. Throws as release().
  OperationResult save(const Tags& tags, const std::vector<RangeSet::Range>& dead);
  // Returns the allocations of `tag`, unless an operation works on them, whose whole backup is zeros or in the shared
  // store.
  [[nodiscard]] std::vector<SavedAllocation> saved(const std::string& tag) const;
  // Returns a new allocation, released, whose backup is what the shared store has of `saved`; a resume copies it in.
  // Throws configuration without a shared store, backup if it lacks a block or the blocks do not form an allocation of
  // `bytes`, out_of_host_memory or driver errors: nothing has changed.
  [[nodiscard]] Address adopt(const Arena::Key& key, std::size_t bytes, const std::vector<SavedBlock>& saved);
  // Takes the device memory that a resume of `tags` needs, in place of what was reserved before. The next resume uses
  // it, so that it cannot run out of memory, and gives back the rest. Throws driver errors: nothing is reserved.
  void reserve(const Tags& tags);
  void give_back_reserved() noexcept;  // what the driver refuses is tried again by later operations

  // Compiles kernels (0.25 s each, once), and starts to pin the host memory that a release of everything needs. May
  // wait for an operation under way.
  void prepare_backup();
  // Only starts to pin that memory, as much as content that does not pack needs. Calls no device.
  void grow_backup_memory();
  // Waits until that memory is pinned. Throws what stopped the pinning: out_of_host_memory, backup or driver errors.
  void wait_until_prepared();
  // Waits for all work on every device. Throws driver errors.
  void synchronize();
  // Releases what the driver caches for CUDA graphs that no longer exist, on every device. Throws driver errors.
  void trim_graph_memory();

  // Stops lending the link of this process's device until the next operation ends: nothing of it is left there, and no
  // host memory is pinned for it.
  void stop_lending();
  // As BackupStore::shared().
  [[nodiscard]] SharedStore* shared_store() const { return backups_.shared(); }
  // Returns the backup of [address, address + bytes): the content at the last release, kept until the next one or until
  // it is dropped. Copies it to `to`, unless `to` is null or a part of the content is not in host memory. Waits for an
  // operation under way. Throws configuration if the range is not within a live allocation, which must not be freed
  // meanwhile; backup if packed content is damaged.
  [[nodiscard]] BackupView backup_of(Address address, std::size_t bytes, void* to);
  // Drops the backups of resident memory under `tags`, and, unless `keep_memory` for the next release, unpins unused
  // host memory in the background. Waits for an operation under way.
  void drop_backups(const Tags& tags, bool keep_memory = false);
  // Unpins unused host memory, with `at_once` before it returns. Otherwise waits for an operation under way, and leaves
  // the unpinning to the background.
  void trim_backup_memory(bool at_once = false);
  // Uses `folder` for backup files from now on, after an operation under way. If there are backups in the old folder,
  // drops those of all resident memory, wherever they are kept. Throws configuration if backups of released memory are
  // in the old folder, which stays in use.
  void set_file_folder(const std::string& folder);
  // Lets an allocation fail as out of device memory if it would leave less than `bytes` free on its device.
  void set_memory_margin(std::size_t bytes) noexcept { memory_margin_ = bytes; }

  // These never wait for an operation and call no driver.
  [[nodiscard]] SaverStatus status() const;
  [[nodiscard]] std::vector<std::string> known_tags() const;
  [[nodiscard]] std::vector<int> devices() const;  // on which memory was ever allocated
  [[nodiscard]] bool owns(Address address) const;
  [[nodiscard]] Driver& driver() { return *driver_; }
  // Throws forked in a forked child. Call it before taking a lock: the parent may have held that lock at the fork.
  void check_process() const;
  // Throws as above, and context_lost once the context is lost.
  void check_usable() const;
  // Prepares for the end of the process: from now on free() does nothing, no host memory is unpinned, and no kernel is
  // compiled. Waits for a kernel that is being compiled.
  void close() noexcept;
  // Returns whether nothing may be given back any more: after close(), and in a forked child.
  [[nodiscard]] bool ended() const noexcept { return closed_ || getpid() != process_; }

 private:
  friend struct SaverAudit;  // of the tests
  friend class Rewrite;
  class Operation;
  class Release;
  class Resume;
  class Reserve;
  class Resize;
  class Expectation;

  // Adds a device to the map and to the backups, once. Throws driver errors.
  void add_device(int device) EXCLUDES(map_.mutex);
  // Acquires chunks for `ranges` of an allocation, which follow one another. Throws driver errors: they are free again.
  [[nodiscard]] std::vector<Chunk> acquire(Arena& arena, const std::vector<RangeSet::Range>& ranges)
      EXCLUDES(map_.mutex);
  // Returns whether no memory under any tag is resident, reserved or being allocated; false after close().
  [[nodiscard]] bool idle() const EXCLUDES(map_.mutex);
  // Returns the block as the shared store has it. Throws as adopt().
  [[nodiscard]] Block adopted(const SavedBlock& saved);
  // Removes an allocation and its backups. Returns the chunks for the caller to pass to PhysicalMemory::give_back(),
  // without the lock.
  [[nodiscard]] std::vector<Chunk> remove(Arena& arena, Address address) REQUIRES(map_.mutex);
  // Drops the backups of the arena's blocks for which `wanted(address, bytes)` returns true.
  template <typename Wanted>
  void drop_backups_if(Arena& arena, const Wanted& wanted) REQUIRES(map_.mutex) {
    for (const auto& [base, block] : arena.blocks()) {
      if (wanted(base + block->offset, block->bytes)) backups_.give_back(*block, arena.key().device);
    }
  }
  // Drops the backups of resident memory under `tags`.
  void drop_resident(const Tags& tags) REQUIRES(backups_.operation_mutex) EXCLUDES(map_.mutex);
  // Notes for each resident block what its backup is expected to take. Throws context_lost; after another failure
  // backups are expected to take as much as their content.
  void expect_backups();

  // Each part is made before and destroyed after those that use it. Lock order: backups_.operation_mutex, the retries
  // of orphans, map_.mutex, then the mutex of any other part.
  const pid_t process_ = getpid();
  std::unique_ptr<Driver> driver_;
  Progress progress_;
  MemoryMap map_;
  PhysicalMemory physical_;
  ThreadStacks stacks_;
  std::atomic<std::size_t> allocating_{0};  // allocations under way
  BackupStore backups_;
  std::atomic<bool> closed_{false};
  std::atomic<std::size_t> memory_margin_{0};
};

}  // namespace memsaver
