#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backup/file_store.hpp"
#include "backup/host_pool.hpp"
#include "backup/pipeline.hpp"
#include "driver/driver.hpp"
#include "support/digest.hpp"
#include "support/error.hpp"
#include "support/progress.hpp"
#include "vmm/arena.hpp"
#include "vmm/operation.hpp"

namespace memsaver {

// What becomes of backups after a resume: all stay for the next release, unused memory is unpinned, or everything is.
enum class Retention { keep, trim, free };
// `automatic` is full where the device digests far faster than it copies, else sampled.
enum class VerifyChoice { off, sampled, full, automatic };

struct Settings {
  std::size_t host_backup_limit = 0;  // bytes; 0: 80 % of the memory that is available when the saver is made
  std::string file_folder = "/tmp";
  Retention retention = Retention::keep;
  VerifyChoice verify = VerifyChoice::automatic;
  bool peer_access = false;  // let every visible device reach the memory
};

struct TagSnapshot {
  std::string tag;
  std::string restore;
  std::string state;
  std::size_t bytes = 0;
  std::size_t resident_bytes = 0;
  std::size_t released_bytes = 0;
  std::size_t retained_bytes = 0;
  std::size_t backed_up_bytes = 0;
  std::size_t allocations = 0;
  std::size_t chunks = 0;
  std::map<int, std::size_t> mapped_by_device;  // retained bytes included
  std::map<int, std::size_t> bytes_by_device;   // live bytes, mapped or not
};

struct SaverStatus {
  std::string state;
  std::string failure;
  std::vector<TagSnapshot> tags;
  std::size_t backup_bytes = 0;
  std::size_t file_bytes = 0;
  HostPoolStatus pool{};
  bool prepared = false;
  std::string operation;
  std::size_t done_bytes = 0;
  std::size_t total_bytes = 0;
  std::size_t copied_bytes = 0;
  double operation_seconds = 0;
};

// What is kept of a range of memory, seen from outside.
struct BackupView {
  std::string tag;
  bool released = false;         // some of the range has no memory now
  Kept kept = Kept::nothing;     // host: all of it is in host memory (zeros included); file: some of it is on disk
  const void* memory = nullptr;  // where it lies in one piece of host memory
};

// Memory under tags that can be given back to the driver and brought back at the same addresses.
//
// Promises: the address of a live allocation never changes. After every call, failed ones included, each chunk is
// either mapped with its content, or given back with what its policy owes; a call that failed can be repeated, and
// its opposite works. All functions may be called from any thread; releases and resumes run one at a time, and while
// one runs, allocations and status do not wait for it.
//
// Every function may throw Error: ErrorKind::forked in a child of the process that made the saver,
// ErrorKind::context_lost once the device context is lost, otherwise as stated.
class Saver {
 public:
  // Which tags; all where empty. Unknown ones are passed over.
  using Tags = std::vector<std::string>;

  Saver(std::unique_ptr<Driver> driver, Settings settings);
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;
  ~Saver();

  // Memory with undefined content, whatever state its tag is in. Throws ErrorKind::out_of_device_memory or a driver
  // error, and then has no effect.
  [[nodiscard]] Address allocate(const Arena::Key& key, std::size_t bytes);
  // Ends an allocation, released or not, waiting for the device first. An unknown address is ErrorKind::configuration.
  // A driver that fails to unmap leaves the memory mapped until the next release.
  void free(Address address);

  // Gives the memory of `tags` back, content kept as their policies say (`overrides`: another policy for this release).
  // Waits for the devices; nothing may use the memory from then on. Kept tags go first, so that until the last of them
  // is gone a resume undoes everything. `dead` ranges, in address order, hold no content worth keeping.
  // Throws ErrorKind::out_of_host_memory before anything is unmapped where the backups would not fit.
  OperationResult release(const Tags& tags, const std::vector<RangeSet::Range>& dead,
                          const std::map<std::string, Restore>& overrides);

  // Brings back all that is released under `tags`, at the same addresses, content as owed. All or nothing: when this
  // throws (ErrorKind::out_of_device_memory, ErrorKind::backup, a driver error), what was released still is, with its
  // backups.
  OperationResult resume(const Tags& tags);

  // Pins host memory for a release of everything, in the background, and compiles the digest kernel, which takes a
  // quarter of a second where this user never did.
  void prepare_backup();
  void wait_until_prepared();

  void synchronize();
  // Gives back what the driver caches for CUDA graphs that are gone, on every device.
  void trim_graph_memory();

  // What is kept of [address, address + bytes), copied to `to` where that is not null and all of it is kept in host
  // memory. It is the content of the last release; after a resume it stays until it is dropped or the next release.
  // Waits for an operation under way. A range that is not within a live allocation is ErrorKind::configuration.
  [[nodiscard]] BackupView backup_of(Address address, std::size_t bytes, void* to);
  // Drops the backups of what is resident under `tags`, and unpins unused memory in the background.
  void drop_backups(const Tags& tags);
  // Backup files lie in `folder` from now on. Backups on disk of what is resident may be dropped for that; with others
  // in the old folder this is ErrorKind::configuration.
  void set_file_folder(const std::string& folder);
  // From now on an allocation that would leave less than this free on its device fails, as out of device memory.
  void set_memory_margin(std::size_t bytes) noexcept { memory_margin_ = bytes; }

  // Never waits for an operation, calls no driver.
  [[nodiscard]] SaverStatus status() const;
  [[nodiscard]] std::vector<std::string> known_tags() const;
  // Devices on which memory was ever allocated.
  [[nodiscard]] std::vector<int> devices() const;
  [[nodiscard]] bool owns(Address address) const;
  // What is wrong with the saver's own account, in words: empty where every invariant of Arena holds, what the pools
  // and the file handed out is what blocks own, and each device has given out what chunks and orphans hold (`others`:
  // what other processes hold of it). For tests, and only while no other call is under way.
  [[nodiscard]] std::vector<std::string> audit(const std::map<int, std::size_t>& others);
  [[nodiscard]] Driver& driver() { return *driver_; }

  // The process is ending: from now on free() leaves everything to the driver and the kernel.
  void close() noexcept { closed_ = true; }

 private:
  struct BackupRoom;
  struct Orphan {
    int device;
    Handle handle;
    std::size_t bytes;
    Address mapped_at = 0;  // where the driver did not unmap it, else 0
    // What of that range is free, and goes back to its arena once it is unmapped.
    Arena* arena = nullptr;
    std::vector<RangeSet::Range> withheld = {};
  };

  void check_process() const;
  void check_usable() const;

  Arena& arena_for(const Arena::Key& key);
  Arena* arena_of(Address address);
  [[nodiscard]] bool selected(const Tags& tags, const std::string& tag) const;
  std::vector<int> peers_of(int device);
  Chunk acquire(const Arena::Key& key, Address address, std::size_t bytes, Transaction& transaction);
  void give_back_handle(Orphan orphan) noexcept;
  void give_up_damaged(Operation& operation, const std::map<std::string, Restore>& overrides);
  void drop(Arena& arena, const Chunk& chunk, Restore restore);
  void free_now(std::unique_lock<std::mutex>& lock, Arena& arena, Address address);
  void give_backup_back(Block& block, int device);
  void check_margin(const Arena::Key& key, std::size_t bytes);
  void release_orphans(bool wait);
  bool take_back(Orphan& orphan) noexcept;
  std::vector<Orphan>::iterator find_orphan(const Orphan& orphan);
  void refuse_orphans_of(const Arena& arena) const;
  void withhold_orphans(Arena& arena, Address address, std::size_t bytes);
  void know_device(int device);
  std::size_t guard_bytes(int device) const { return infos_.at(device).granularity; }
  void retain();
  void trim_later(bool drop_backups);
  void drop_backups_now(const Tags& tags);
  const Allocation* allocation_around(const Arena* arena, Address address, std::size_t bytes) const;

  HostPool& pool_of(int device);
  Pipeline& pipeline_of(int device);
  [[nodiscard]] Verify verify() const;

  OperationResult operate(Progress::Operation kind, const Tags& tags,
                          const std::function<void(Arena&, Operation&)>& plan,
                          const std::function<void(Operation&)>& run);
  void plan_release(Arena& arena, Restore restore, const std::vector<RangeSet::Range>& dead, Operation& operation,
                    BackupRoom& room);
  void plan_resume(Arena& arena, Operation& operation);
  void end_operation(const Operation& operation);

  const pid_t process_ = getpid();
  std::unique_ptr<Driver> driver_;
  const Settings settings_;
  const DigestKey key_ = random_digest_key();
  Progress progress_;

  std::mutex operation_mutex_;  // one release or resume at a time; taken before mutex_
  std::mutex orphans_mutex_;    // one thread at a time tries to give orphans back; taken before mutex_
  std::thread retainer_;
  bool retainer_works_ = false;  // these three are guarded by operation_mutex_
  bool trims_later_ = false;
  bool drops_later_ = false;
  std::map<int, std::unique_ptr<Pipeline>> pipelines_;  // by device; of the operation

  mutable std::mutex mutex_;  // guards all below; never held across a wait for a device, a copy or a file
  std::map<Arena::Key, std::unique_ptr<Arena>> arenas_;
  std::map<int, DeviceInfo> infos_;
  std::map<int, std::unique_ptr<HostPool>> pools_;  // by NUMA node
  FileStore files_;
  std::set<int> nodes_;          // NUMA nodes of all devices
  std::vector<Orphan> orphans_;  // handles that the driver did not unmap or take back
  bool releasing_ = false;       // what a busy arena is busy with
  std::atomic<bool> closed_{false};
  std::atomic<std::size_t> memory_margin_{0};
};

}  // namespace memsaver
