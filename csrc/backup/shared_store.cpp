#include "backup/shared_store.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <set>
#include <utility>

#include "support/cleanup.hpp"
#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLockTimeout{5000};    // for the processes that look for the store before this one
constexpr milliseconds kAnswerTimeout{5000};  // for one of those that have it
constexpr milliseconds kIndexTimeout{1000};
constexpr milliseconds kUpkeep{1000};  // how soon the memory of a dead process is given back
constexpr milliseconds kPoll{10};
constexpr milliseconds kSlabTimeout{5000};  // for a slab that another process makes
constexpr std::size_t kTouchers = 8;        // 8 GiB in 1.6 s, of pages of 4 KiB
// In errors, after the name of the limit.
constexpr char kWhose[] = " of all processes of the store, which its first one sets";

Error no_store(const std::string& name, const std::string& why) {
  return Error(ErrorKind::configuration, "the shared backup store '" + name + "' cannot be used: " + why)
      .with_advice("set MEMSAVER_SHARED_BACKUPS to another name, or unset it");
}

// Allocates the pages of new memory, with several threads, on a NUMA node (-1: any). Throws out_of_host_memory: some of
// them are allocated.
void touch(const HostRange& all, int numa_node) {
  prefer_node(reinterpret_cast<void*>(all.address), all.bytes, numa_node);
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t count = std::min({kTouchers, cores, all.bytes / kGrain});
  const std::size_t part = to_pages(all.bytes / count + 1);
  sys::run_in_threads(count, [&](std::size_t i) {
    const std::size_t begin = std::min(all.bytes, i * part);
    const std::size_t end = std::min(all.bytes, begin + part);
    const int code = sys::make_pages(reinterpret_cast<void*>(all.address + begin), end - begin);
    if (code == 0) return;
    throw Error::from_errno(ErrorKind::out_of_host_memory, "madvise", code)
        .with_bytes(all.bytes)
        .with_advice("free host memory, or raise the limit on what the machine commits (vm.overcommit_ratio)");
  });
}

}  // namespace

// The stores of this process. A forked child is no member of them, and must not keep their memory.
struct SharedStoreForks {
  Mutex mutex;
  std::set<SharedStore*> stores GUARDED_BY(mutex);

  static SharedStoreForks& instance() {
    static auto* const forks = new SharedStoreForks;
    static const int registered = pthread_atfork([]() NO_THREAD_SAFETY_ANALYSIS { forks->mutex.lock(); },
                                                 []() NO_THREAD_SAFETY_ANALYSIS { forks->mutex.unlock(); }, &in_child);
    static_cast<void>(registered);
    return *forks;
  }
  static void in_child() NO_THREAD_SAFETY_ANALYSIS {
    auto& forks = instance();
    for (SharedStore* const store : forks.stores) store->abandon();
    forks.stores.clear();  // for children of the child
    forks.mutex.unlock();
  }
  void add(SharedStore* store) {
    const Lock lock(mutex);
    stores.insert(store);
  }
  void remove(SharedStore* store) {
    const Lock lock(mutex);
    stores.erase(store);
  }
};

// Delegates, so that the destructor runs if this throws.
SharedStore::SharedStore(Driver& driver, const std::string& name, std::size_t limit_bytes) : SharedStore(driver, name) {
  SharedStoreForks::instance().add(this);  // before anything is open that a child would keep
  std::promise<void> joined;
  auto thread = sys::start_thread([this, limit_bytes, &joined] {
    try {
      join(limit_bytes);
    } catch (...) {
      return joined.set_exception(std::current_exception());
    }
    joined.set_value();
    run_member();
  });
  if (!thread) throw no_store(name, "no thread can be started for it");
  member_thread_ = std::move(*thread);
  joined.get_future().get();
}

SharedStore::~SharedStore() {
  if (getpid() != process_) {
    member_thread_.detach();
    background_.abandon();
    return;
  }
  SharedStoreForks::instance().remove(this);
  ending_ = true;
  background_.join();
  still_pinned_.clear();
  slabs_.clear();
  sockets_.stop();
  if (member_thread_.joinable()) member_thread_.join();
  if (layout_ != nullptr) munmap(layout_, sizeof(SharedLayout));
  if (file_ >= 0) close(file_);
}

void SharedStore::abandon() {
  sockets_.close_all();
  if (file_ >= 0) close(std::exchange(file_, -1));
}

// Any process of the store has the file; if there is none, this one makes it. No other process looks for it meanwhile,
// so that two do not make one each: a second store of one name would double what its limit allows.
void SharedStore::open_file(std::size_t limit_bytes) {
  const std::optional<int> found = sockets_.request(kAnswerTimeout);
  if (!found) {
    throw no_store(name_,
                   "processes of this user have it, and none of them answers; continue or end those that are "
                   "stopped, and start this one again");
  }
  file_ = *found;
  const bool founding = file_ < 0;
  if (founding) file_ = make_store_file(SharedLayout::file_bytes());
  if (file_ < 0) throw no_store(name_, std::string("memfd: ") + std::strerror(errno));
  if (!is_store_file(file_, SharedLayout::file_bytes())) throw no_store(name_, "a process uses another format for it");
  void* const memory = mmap(nullptr, sizeof(SharedLayout), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) throw no_store(name_, std::string("mmap: ") + std::strerror(errno));
  madvise(memory, sizeof(SharedLayout), MADV_DONTFORK);
  layout_ = static_cast<SharedLayout*>(memory);
  if (founding) SharedIndex::found(*layout_, random_digest_key(), limit_bytes);
  if (!SharedIndex::is_valid(*layout_)) throw no_store(name_, "a process of another version of memsaver uses it");
}

void SharedStore::join(std::size_t limit_bytes) {
  if (!sockets_.lock(kLockTimeout)) throw no_store(name_, "its name is in use, by another user or a stopped process");
  const Cleanup at_end([this] { sockets_.unlock(); });
  open_file(limit_bytes);
  index_ = std::make_unique<SharedIndex>(*layout_);
  if (!lock_index()) throw no_store(name_, "a process that uses it does not go on");
  const bool joined = index_->join();
  index_->mutex.unlock();
  if (!joined) throw no_store(name_, "it has " + std::to_string(kMembers) + " processes already");
  if (sockets_.listen()) return;
  if (lock_index()) {
    index_->leave();
    index_->mutex.unlock();
  }
  throw no_store(name_, std::string("it cannot be offered to others: ") + std::strerror(errno));
}

void SharedStore::run_member() {
  while (!ending_) {
    sockets_.serve(file_, kUpkeep);
    if (ending_) break;
    apply_pending();
    free_unused([this] { sockets_.serve(file_, milliseconds(0)); });
  }
  // If a stopped process has the index, the others do this, as after a death.
  if (!lock_index()) return;
  index_->drop_all();
  index_->mutex.unlock();
  free_unused([] {});
  if (!lock_index()) return;
  index_->leave();
  index_->mutex.unlock();
}

bool SharedStore::lock_index() {
  const bool locked = index_->mutex.lock_within(index_busy_ ? milliseconds(0) : kIndexTimeout);
  index_busy_ = !locked;
  return locked;
}

SharedStore::Answer SharedStore::find_or_claim(const Digest& digest, std::size_t content_bytes, bool alone) {
  if (!lock_index()) return {Found::no_room, {}, {}, {}, {}};
  Answer answer = index_->find_or_claim(digest, content_bytes, alone);
  if (answer.found == Found::kept || answer.found == Found::claimed) {
    const Lock lock(mutex_);
    ++uses_[answer.entry];
  }
  index_->mutex.unlock();
  return answer;
}

void SharedStore::publish(std::uint32_t entry, std::size_t packed_bytes) {
  add_pending([=]() REQUIRES(index_->mutex) { index_->publish(entry, packed_bytes); });
  apply_pending();
}

void SharedStore::add_pending(std::function<void()> change) {
  const Lock lock(mutex_);
  pending_.push_back(std::move(change));
}

void SharedStore::apply_pending() {
  {
    const Lock lock(mutex_);
    if (pending_.empty()) return;
  }
  if (!lock_index()) return;
  std::vector<std::function<void()>> changes;
  {
    const Lock lock(mutex_);
    changes.swap(pending_);
  }
  for (const auto& change : changes) change();
  index_->mutex.unlock();
}

void SharedStore::drop_use(std::uint32_t entry) {
  {
    const Lock lock(mutex_);
    const auto use = uses_.find(entry);
    if (use == uses_.end() || --use->second > 0) return;
    uses_.erase(use);
  }
  index_->drop(entry);
}

void SharedStore::wait_for_change(std::uint32_t seen) {
  index_->wait_for_change(seen, kPoll);
  if (changes() != seen || !lock_index()) return;
  index_->drop_dead_members();
  index_->mutex.unlock();
}

SharedStoreStatus SharedStore::status() const {
  SharedStoreStatus status;
  status.name = name_;
  status.processes = index_->members();
  status.used_bytes = index_->used_bytes();
  status.total_bytes = index_->slab_bytes();
  status.limit_bytes = index_->limit_bytes();
  const Lock lock(mutex_);
  for (const auto& [index, slab] : slabs_) status.pinned_bytes += slab.pinned() ? slab.bytes() : 0;
  for (const auto& [entry, uses] : uses_) {
    const std::size_t bytes = index_->stored_bytes(entry);
    status.held_bytes += bytes;
    status.share_bytes += bytes / index_->holders(entry);
  }
  return status;
}

HostRange SharedStore::map(std::uint32_t slab) {
  const Lock lock(mutex_);
  auto found = slabs_.find(slab);
  if (found == slabs_.end()) {
    const std::size_t bytes = index_->bytes_of(slab);
    void* const memory = sys::map_file(file_, SharedLayout::slabs_at() + slab * kSlabBytes, bytes);
    madvise(memory, bytes, MADV_DONTFORK);
    madvise(memory, bytes, MADV_HUGEPAGE);  // if the machine has them for shared memory (shmem_enabled)
    found = slabs_.emplace(slab, HostMapping(memory, bytes)).first;
  }
  return {found->second.address(), found->second.bytes()};
}

std::vector<HostRange> SharedStore::map(const std::vector<SharedIndex::Piece>& pieces, std::size_t bytes) {
  std::vector<HostRange> ranges;
  for (const auto& piece : pieces) {
    const std::size_t length = std::min(bytes, piece.grains * kGrain);
    ranges.push_back({map(piece.slab).address + piece.first * kGrain, length});
    bytes -= length;
  }
  return ranges;
}

void SharedStore::pin(const std::vector<HostRange>& ranges) {
  pin_if([&](std::uint32_t, const HostMapping& slab) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const auto& range) { return range.address - slab.address() < slab.bytes(); });
  });
}

void SharedStore::pin_if(const std::function<bool(std::uint32_t, const HostMapping&)>& wanted) {
  for (;;) {
    const Lock one_at_a_time(pin_mutex_);
    HostMapping* slab = nullptr;
    {
      const Lock lock(mutex_);
      const auto found = std::find_if(slabs_.begin(), slabs_.end(), [&](const auto& each) {
        return !each.second.pinned() && wanted(each.first, each.second);
      });
      if (found == slabs_.end()) return;
      slab = &found->second;
    }
    slab->pin(driver_);
  }
}

SharedStore::Slabs SharedStore::take_out(const std::vector<std::uint32_t>& slabs) {
  Slabs taken;
  const Lock lock(mutex_);
  for (const std::uint32_t slab : slabs) {
    if (auto node = slabs_.extract(slab)) taken.push_back(std::move(node.mapped()));
  }
  return taken;
}

void SharedStore::unmap(Slabs slabs) {
  Slabs again;
  {
    const Lock lock(mutex_);
    again.swap(still_pinned_);
  }
  for (Slabs* const list : {&again, &slabs}) {
    for (; !list->empty(); list->pop_front()) {
      try {
        list->front().unpin();
      } catch (const Error& error) {
        warn(std::string("memory of the shared store stays pinned: ") + error.what());
        const Lock lock(mutex_);
        still_pinned_.push_back(std::move(list->front()));
      }
    }
  }
}

std::vector<HostRange> SharedStore::take(std::uint32_t entry, std::size_t bytes, std::size_t expected, int numa_node) {
  for (bool fragmented = false;; fragmented = true) {
    if (!lock_index()) return {};
    const bool taken = index_->take(entry, bytes);
    const std::vector<SharedIndex::Piece> pieces = index_->pieces_of(entry);
    const std::size_t free = index_->slab_bytes() - index_->used_bytes();
    const std::size_t missing = fragmented || bytes <= free ? bytes : bytes - free;
    // Other processes may be writing part of what this one expects.
    const std::size_t share = expected / std::max<std::size_t>(1, index_->members());
    const auto slab = taken ? std::nullopt : index_->begin_slab(missing, std::max(bytes, share));
    index_->mutex.unlock();
    if (taken) {
      std::vector<HostRange> ranges = map(pieces, to_pages(bytes));
      pin(ranges);
      const HostRange& last = ranges.back();
      const std::size_t rest = to_pages(bytes) - bytes;
      std::memset(reinterpret_cast<char*>(last.address + last.bytes - rest), 0, rest);
      return ranges;
    }
    if (!slab) {
      throw short_of_memory("the host memory of the shared store is bounded", bytes,
                            index_->limit_bytes() - std::min(index_->limit_bytes(), index_->used_bytes()), kWhose);
    }
    make_slab(*slab, numa_node);
  }
}

void SharedStore::make_slab(std::uint32_t slab, int numa_node) {
  const std::size_t bytes = index_->bytes_of(slab);
  bool touched = false;
  const Cleanup at_end([&] {
    if (!touched) {
      {
        const Lock not_pinned(pin_mutex_);
        unmap(take_out({slab}));
      }
      free_pages(slab);
    }
    add_pending([this, slab, touched]()
                    REQUIRES(index_->mutex) { touched ? index_->end_slab(slab) : index_->end_freeing(slab); });
    apply_pending();
  });
  check_available(bytes, kWhose);
  touch(map(slab), numa_node);
  touched = true;
  pin_if([slab](std::uint32_t index, const HostMapping&) { return index == slab; });
}

void SharedStore::prepare_beyond(std::size_t bytes) {
  target_ = bytes + status().held_bytes;
  work_later();
}

void SharedStore::tidy() {
  target_ = 0;
  tidy_wanted_ = true;
  work_later();
}

void SharedStore::work_later() {
  if (background_.request()) return;
  warn("no thread can be started to pin memory of the shared store; the next operation does it");
}

void SharedStore::work() {
  if (ending_) return;
  prepare_now();
  // Content that changes on several processes, one after the other, uses some memory twice.
  const std::size_t used = index_->used_bytes();
  if (tidy_wanted_.exchange(false) && index_->slab_bytes() > used + used / 32) trim();
}

void SharedStore::prepare_now() {
  auto until = std::chrono::steady_clock::now() + kSlabTimeout;
  while (!ending_) {
    pin_if([](std::uint32_t, const HostMapping&) { return true; });
    if (status().pinned_bytes >= target_) return;
    const std::uint32_t seen = index_->changes();
    if (!map_another()) {
      if (!lock_index()) return;
      const std::size_t missing = target_ - std::min<std::size_t>(target_, index_->slab_bytes());
      const auto slab = missing > 0 ? index_->begin_slab(kGrain, missing) : std::nullopt;
      index_->mutex.unlock();
      if (slab) {
        make_slab(*slab, -1);
      } else if (missing > 0 || std::chrono::steady_clock::now() > until) {
        return;  // at the limit; or another process does not complete its slab
      } else {
        wait_for_change(seen);
        continue;
      }
    }
    until = std::chrono::steady_clock::now() + kSlabTimeout;
  }
}

bool SharedStore::map_another() {
  const Lock lock(map_mutex_);
  if (!lock_index()) return false;
  const std::vector<std::uint32_t> others = index_->unmapped_slabs();
  if (!others.empty()) index_->set_mapped(others.front());
  index_->mutex.unlock();
  if (others.empty()) return false;
  map(others.front());
  return true;
}

void SharedStore::trim() {
  apply_pending();
  Slabs unneeded;
  {
    const Lock no_other(map_mutex_);
    const Lock not_pinned(pin_mutex_);
    if (!lock_index()) return;
    std::vector<std::uint32_t> entries;
    {
      const Lock lock(mutex_);
      for (const auto& [entry, uses] : uses_) entries.push_back(entry);
    }
    unneeded = take_out(index_->unmap_unneeded(entries));
    index_->mutex.unlock();
  }
  unmap(std::move(unneeded));
  free_unused([] {});
}

void SharedStore::free_pages(std::uint32_t slab) {
  sys::punch_hole(file_, SharedLayout::slabs_at() + slab * kSlabBytes, kSlabBytes);
}

void SharedStore::free_unused(const std::function<void()>& between) {
  if (!lock_index()) return;
  index_->drop_dead_members();
  const std::vector<std::uint32_t> slabs = index_->begin_freeing();
  index_->mutex.unlock();
  for (const std::uint32_t slab : slabs) {
    between();
    free_pages(slab);
  }
  if (slabs.empty() || !lock_index()) return;
  for (const std::uint32_t slab : slabs) index_->end_freeing(slab);
  index_->mutex.unlock();
}

void give_host_memory(Block& block, HostPool& pool, SharedStore* store) {
  const std::vector<HostRange> ranges = std::exchange(block.host, {});
  if (block.shared) {
    store->give(*std::exchange(block.shared, std::nullopt));
  } else if (!ranges.empty()) {
    pool.give(ranges);
  }
}

}  // namespace memsaver
