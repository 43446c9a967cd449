#include "backup/shared_store.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <set>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/scope_exit.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kGatePatience{5000};    // for those that look for the store before this one
constexpr milliseconds kAnswerPatience{5000};  // for one of those that have it
constexpr milliseconds kIndexPatience{1000};
constexpr milliseconds kUpkeep{1000};  // how soon memory of a dead process is given back by itself
constexpr milliseconds kPoll{10};

Error no_store(const std::string& name, const std::string& why) {
  return Error(ErrorKind::configuration, "the shared backup store '" + name + "' cannot be used: " + why)
      .with_advice("set MEMSAVER_SHARED_BACKUPS to another name, or unset it");
}

}  // namespace

// The stores of this process. A forked child takes no part, and must not keep their memory.
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

SharedStore::SharedStore(Driver& driver, const std::string& name, std::size_t limit_bytes)
    : driver_(driver), name_(name), door_(name) {
  auto& forks = SharedStoreForks::instance();
  forks.add(this);  // before anything is open that a child would keep
  std::promise<void> joined;
  auto keeper = sys::start_thread([this, limit_bytes, &joined] {
    try {
      join(limit_bytes);
    } catch (...) {
      return joined.set_exception(std::current_exception());
    }
    joined.set_value();
    keep();
  });
  if (!keeper) {
    forks.remove(this);
    throw no_store(name, "no thread can be started for it");
  }
  keeper_ = std::move(*keeper);
  try {
    joined.get_future().get();
  } catch (...) {
    keeper_.join();
    forks.remove(this);
    if (layout_ != nullptr) munmap(layout_, sizeof(SharedLayout));
    if (file_ >= 0) close(file_);
    throw;
  }
}

SharedStore::~SharedStore() {
  if (getpid() != process_) {
    keeper_.detach();
    if (worker_.joinable()) worker_.detach();
    (void)mapping_.release();
    return;
  }
  SharedStoreForks::instance().remove(this);
  ending_ = true;
  if (worker_.joinable()) worker_.join();
  mapping_.reset();
  door_.stop();
  keeper_.join();
  munmap(layout_, sizeof(SharedLayout));
  close(file_);
}

void SharedStore::abandon() {
  door_.abandon();
  if (file_ >= 0) close(std::exchange(file_, -1));
}

// Any process of the store has the file; if there is none, this one makes it. Nobody else looks meanwhile, so that two
// do not make one each. A second store of one name would double what its limit allows.
void SharedStore::open_file(std::size_t limit_bytes) {
  const std::optional<int> found = door_.ask(kAnswerPatience);
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
  if (!door_.enter_gate(kGatePatience))
    throw no_store(name_, "its name is in use, by another user or a stopped process");
  const ScopeExit at_end([this] { door_.leave_gate(); });
  open_file(limit_bytes);
  index_ = std::make_unique<SharedIndex>(*layout_);
  mapping_ = std::make_unique<SharedMapping>(driver_, file_);
  if (!lock_index()) throw no_store(name_, "a process that uses it does not go on");
  const bool joined = index_->join();
  index_->mutex.unlock();
  if (!joined) throw no_store(name_, "it has " + std::to_string(kMembers) + " processes already");
  if (door_.listen()) return;
  if (lock_index()) {
    index_->leave();
    index_->mutex.unlock();
  }
  throw no_store(name_, std::string("it cannot be offered to others: ") + std::strerror(errno));
}

// The life of the thread that takes part for the process.
void SharedStore::keep() {
  while (!ending_) {
    door_.serve(file_, kUpkeep);
    if (ending_) break;
    settle();
    give_back_unused([this] { door_.serve(file_, milliseconds(0)); });
  }
  // If a stopped process is in the way, the others see to it as after a death.
  if (!lock_index()) return;
  index_->drop_all();
  index_->mutex.unlock();
  give_back_unused([] {});
  if (!lock_index()) return;
  index_->leave();
  index_->mutex.unlock();
}

// Once in vain, then without waiting, until it is free again.
bool SharedStore::lock_index() {
  const bool locked = index_->mutex.lock_within(stuck_ ? milliseconds(0) : kIndexPatience);
  stuck_ = !locked;
  return locked;
}

SharedStore::Answer SharedStore::want(const Digest& digest, std::size_t content_bytes, bool alone) {
  if (!lock_index()) return {Found::no_room, {}, {}, {}, {}};
  Answer answer = index_->want(digest, content_bytes, alone);
  if (answer.found == Found::kept || answer.found == Found::claimed) {
    const Lock lock(mutex_);
    ++uses_[answer.entry];
  }
  index_->mutex.unlock();
  return answer;
}

void SharedStore::map(const std::vector<SharedIndex::Piece>& pieces) {
  for (const auto& piece : pieces) mapping_->map(piece.slab, index_->bytes_of(piece.slab));
}

std::vector<HostRange> SharedStore::memory_of(const Answer& kept) {
  map(kept.pieces);
  return mapping_->ranges_of(kept.pieces, to_pages(kept.bytes));
}

void SharedStore::publish(std::uint32_t entry, std::size_t packed_bytes) {
  owe({Owed::publish, entry, packed_bytes});
  settle();
}

void SharedStore::give(std::uint32_t entry) { owe({Owed::drop, entry}); }

void SharedStore::owe(Owed change) {
  const Lock lock(mutex_);
  owed_.push_back(change);
}

void SharedStore::settle() {
  {
    const Lock lock(mutex_);
    if (owed_.empty()) return;
  }
  if (!lock_index()) return;
  std::vector<Owed> changes;
  {
    const Lock lock(mutex_);
    changes.swap(owed_);
  }
  for (const auto& change : changes) apply(change);
  index_->mutex.unlock();
}

void SharedStore::apply(const Owed& change) {
  if (change.what == Owed::publish) return index_->publish(change.which, change.packed_bytes);
  if (change.what == Owed::made) return index_->end_slab(change.which);
  if (change.what == Owed::gone) return index_->gone(change.which);
  {
    const Lock lock(mutex_);
    const auto use = uses_.find(change.which);
    if (use == uses_.end() || --use->second > 0) return;
    uses_.erase(use);
  }
  index_->drop(change.which);
}

void SharedStore::wait_for_change(std::uint32_t seen) {
  index_->wait_for_change(seen, kPoll);
  if (changes() != seen || !lock_index()) return;
  index_->bury();
  index_->mutex.unlock();
}

SharedStoreStatus SharedStore::status() const {
  SharedStoreStatus status;
  status.name = name_;
  status.processes = index_->members();
  status.used_bytes = index_->used_bytes();
  status.total_bytes = index_->slab_bytes();
  status.limit_bytes = index_->limit_bytes();
  status.pinned_bytes = mapping_->pinned_bytes();
  const Lock lock(mutex_);
  for (const auto& [entry, uses] : uses_) {
    const std::size_t bytes = index_->stored_bytes(entry);
    status.held_bytes += bytes;
    status.share_bytes += bytes / index_->holders(entry);
  }
  return status;
}

}  // namespace memsaver
