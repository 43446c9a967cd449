#pragma once

#include <sstream>

#include "backup/block.hpp"
#include "backup/host_pool.hpp"
#include "backup/shared_index.hpp"
#include "backup/store_sockets.hpp"
#include "support/background.hpp"

namespace memsaver {

struct SharedStoreStatus {
  std::string name;             // empty: this process uses no store
  std::size_t processes = 0;    // that use it
  std::size_t held_bytes = 0;   // of blocks that this process uses
  std::size_t share_bytes = 0;  // the same, each block divided among the processes that use it
  std::size_t used_bytes = 0;   // of blocks that any process uses
  std::size_t total_bytes = 0;  // memory of the store
  std::size_t limit_bytes = 0;
  std::size_t pinned_bytes = 0;  // of it, ready for copies in this process
};

// Owns one process's membership in a store: host memory that processes of one user share, and that holds a block of
// equal content once (docs/architecture.md, "The shared store"). Any thread may call any function. If a process is
// stopped while it has the index locked, functions that need the index wait for it for at most a second; then they
// return Found::no_room, or make their change later.
class SharedStore {
 public:
  using Found = SharedIndex::Found;
  using Answer = SharedIndex::Answer;

  using Kind = SharedLayout::Member::Kind;
  static constexpr std::chrono::milliseconds kPoll{10};
  static constexpr std::chrono::milliseconds kOthersTimeout{1000};  // for another process that writes the same content
  static constexpr std::chrono::milliseconds kUpkeep{1000};  // how soon the memory of a dead process is given back

  // Joins the store of this name, or creates it with `limit_bytes`, which then holds for all; 0 only joins. Throws
  // configuration if neither is possible, after a few seconds if its processes do not answer. Delegates, so that a
  // throw runs the destructor.
  SharedStore(Driver& driver, const std::string& name, std::size_t limit_bytes, Kind kind = Kind::engine)
      : SharedStore(driver, name) {
    {
      const Lock lock(Forks::instance().mutex);
      Forks::instance().stores.insert(this);  // before anything is open that a child would keep
    }
    std::promise<void> joined;
    auto thread = sys::start_thread([this, limit_bytes, kind, &joined] {
      const std::exception_ptr failure = sys::failure_of([&] { join(limit_bytes, kind); });
      if (failure) return joined.set_exception(failure);
      joined.set_value();
      run_member();
    });
    if (!thread) throw no_store("no thread can be started for it");
    member_thread_ = std::move(*thread);
    joined.get_future().get();
  }
  // Drops all that this process holds, and leaves. Does nothing in a forked child, which is no member.
  ~SharedStore() {
    if (getpid() != process_) {
      member_thread_.detach();
      background_.abandon();
      return;
    }
    {
      const Lock lock(Forks::instance().mutex);
      Forks::instance().stores.erase(this);
    }
    ending_ = true;
    background_.join();
    sockets_.stop();
    if (member_thread_.joinable()) member_thread_.join();
    if (layout_ != nullptr) munmap(layout_, sizeof(SharedLayout));
    if (file_ >= 0) close(file_);
  }

  [[nodiscard]] const DigestKey& key() const { return index_->key(); }

  // Looks for content, as SharedIndex::find_or_claim(). The entry in the answer is this process's until give().
  [[nodiscard]] Answer find_or_claim(const Digest& digest, std::size_t content_bytes, bool alone = false) {
    if (!lock_index()) return {Found::no_room};
    const Lock index(index_->mutex, std::adopt_lock);
    Answer answer = index_->find_or_claim(digest, content_bytes, alone);
    if (answer.found == Found::kept || answer.found == Found::claimed) {
      const Lock lock(mutex_);
      ++uses_[answer.entry];
    }
    return answer;
  }
  // Returns the addresses of what was found kept. Throws out_of_host_memory.
  [[nodiscard]] std::vector<HostRange> memory_of(const Answer& kept) { return map(kept.pieces, to_pages(kept.bytes)); }
  // Takes pinned memory for what was claimed, rounded up to pages and zero beyond `bytes`; `expected` bytes will be
  // needed in all. Returns nothing if the index is not free. Throws out_of_host_memory, backup (as check_available())
  // or driver errors: the caller owns no memory of the claim.
  [[nodiscard]] std::vector<HostRange> take(std::uint32_t entry, std::size_t bytes, std::size_t expected,
                                            int numa_node) {
    const auto until = std::chrono::steady_clock::now() + kKeeperTimeout;
    for (bool fragmented = false;; fragmented = true) {
      if (!lock_index()) return {};
      Lock index(index_->mutex, std::adopt_lock);
      const bool taken = index_->take(entry, bytes);
      const std::vector<SharedIndex::Piece> pieces = index_->pieces_of(entry);
      const std::size_t free = index_->slab_bytes() - index_->used_bytes();
      const std::size_t missing = fragmented || bytes <= free ? bytes : bytes - free;
      // Other processes may be writing part of what this one expects.
      const std::size_t share = expected / std::max<std::size_t>(1, index_->members());
      const auto slab = taken ? std::nullopt : index_->begin_slab(missing, std::max(bytes, share));
      const bool asked = !taken && !slab && std::chrono::steady_clock::now() < until && index_->ask_keepers(bytes);
      index.unlock();
      if (taken) {
        std::vector<HostRange> ranges = map(pieces, to_pages(bytes));
        pin(ranges);
        zero_rest(ranges, bytes);
        return ranges;
      }
      if (asked) {
        index_->wait_for_change(changes(), kPoll);
        continue;
      }
      if (!slab) {
        throw short_of_memory("too little memory is left under the limit of the shared store", bytes,
                              index_->limit_bytes() - std::min(index_->limit_bytes(), index_->used_bytes()), kWhose);
      }
      make_slab(*slab, numa_node);
    }
  }
  // Looks for the content of a block without host memory, as find_or_claim(). The block has what is kept; the caller is
  // to take(), to write and to publish() what is claimed. Throws out_of_host_memory.
  [[nodiscard]] Found find(Block& block, const Digest& digest, bool alone = false) {
    const Answer answer = find_or_claim(digest, block.content_bytes(), alone);
    if (answer.found == Found::kept || answer.found == Found::claimed) block.shared = answer.entry;
    if (answer.found == Found::kept) {
      block.host = memory_of(answer);
      block.packed_bytes = answer.packed_bytes;
    }
    return answer.found;
  }
  // Takes memory for a block that is claimed. Returns false, with the claim given up, if the index is not free. Throws
  // as the other take().
  [[nodiscard]] bool take(Block& block, std::size_t bytes, std::size_t expected, int numa_node) {
    block.host = take(*block.shared, bytes, expected, numa_node);
    if (block.host.empty()) give(*std::exchange(block.shared, std::nullopt));
    return !block.host.empty();
  }
  // Lets other processes find a claim whose content is written.
  void publish(std::uint32_t entry, std::size_t packed_bytes = 0) {
    add_pending([=]() REQUIRES(index_->mutex) { index_->publish(entry, packed_bytes); });
    apply_pending();
  }
  // Hides a held entry from all searches: its content is damaged. Processes that hold it keep it.
  void spoil(std::uint32_t entry) { index_->spoil(entry); }
  // Publishes a text that was claimed by its name: find_or_claim() without content bytes. Returns once a keeper, if
  // there is one, holds it and what it names, so that this process may give that up; after kHoldTimeout in any case.
  // Throws as take(), or out_of_host_memory if the index is not free.
  void publish_text(std::uint32_t entry, const std::string& text) {
    const std::vector<HostRange> memory = take(entry, text.size(), text.size(), -1);
    if (memory.empty()) throw Error(ErrorKind::out_of_host_memory, "the index of the shared store is not free");
    copy_to_ranges(text.data(), {{0, text.size()}}, memory);
    publish(entry);
    const auto until = std::chrono::steady_clock::now() + kHoldTimeout;
    while (std::chrono::steady_clock::now() < until) {
      const std::uint32_t seen = changes();
      if (!lock_index()) return;
      Lock index(index_->mutex, std::adopt_lock);
      if (!index_->lacks_keeper(entry)) return;
      index.unlock();
      wait_for_change(seen);
    }
  }
  // A text, and the entries of the content that it names. It begins with two words and the number of blocks; then, for
  // each block, the lanes of its digest and the bytes of its content (0: all zeros, which are not kept). Numbers are
  // hexadecimal. The rest is for its writer alone.
  struct Text : SharedIndex::Text {
    std::string text;
    std::vector<std::uint32_t> blocks;
    std::size_t bytes = 0;  // of these, as stored
    bool complete = true;   // all of them are kept
    bool used = true;       // processes that are no keepers hold all of them
  };
  // Returns the texts that can be found now; none if the index is not free.
  [[nodiscard]] std::vector<Text> texts() {
    if (!lock_index()) return {};
    const Lock index(index_->mutex, std::adopt_lock);
    return read_texts();
  }
  // Marks the text of this name. Returns false if there is none, or the index is not free.
  [[nodiscard]] bool mark_text(const std::string& name, SharedLayout::Entry::Mark mark) {
    if (!lock_index()) return false;
    const Lock index(index_->mutex, std::adopt_lock);
    for (const auto& text : index_->texts()) {
      if (text.name != name) continue;
      index_->mark_text(text.entry, mark);
      return true;
    }
    return false;
  }
  // As a keeper: holds the texts that are complete, and their content, up to `limit` bytes as stored: first what is
  // pinned, then what was used last. Drops the rest. May be killed at any instant.
  void keep(std::size_t limit) {
    if (!lock_index()) return;
    const Lock index(index_->mutex, std::adopt_lock);
    index_->drop_dead_members();
    const std::set<std::uint32_t> wanted = wanted_of_texts(limit);
    bool changed = false;
    for (const auto entry : wanted) {
      if (!held_.insert(entry).second) continue;
      index_->hold(entry);
      changed = true;
    }
    changed = changed || wanted.size() < held_.size();
    for (auto entry = held_.begin(); entry != held_.end();) {
      const bool dropped = wanted.count(*entry) == 0;
      if (dropped) index_->drop(*entry);
      entry = dropped ? held_.erase(entry) : std::next(entry);
    }
    if (changed) index_->wake();  // a member may wait for room, or until its text is held
  }
  // Ends the use of an entry, kept or claimed. Makes no system call: apply_pending() does.
  void give(std::uint32_t entry) {
    add_pending([this, entry]() REQUIRES(index_->mutex) { drop_use(entry); });
  }
  // Makes the changes of the index that are pending, in order.
  void apply_pending() {
    {
      const Lock lock(mutex_);
      if (pending_.empty()) return;
    }
    if (!lock_index()) return;
    const Lock index(index_->mutex, std::adopt_lock);
    std::vector<std::function<void()>> changes;
    {
      const Lock lock(mutex_);
      changes.swap(pending_);
    }
    for (const auto& change : changes) change();
  }
  // Waits up to `at_most` for another process to publish or give up something after changes() was `seen`; if none does,
  // drops what dead processes had.
  void wait_for_change(std::uint32_t seen, std::chrono::milliseconds at_most = kPoll) {
    index_->wait_for_change(seen, at_most);
    if (changes() != seen || !lock_index()) return;
    const Lock index(index_->mutex, std::adopt_lock);
    index_->drop_dead_members();
  }
  [[nodiscard]] std::uint32_t changes() const { return index_->changes(); }

  // Registers memory of entries with the driver, for fast copies. Throws as Driver::register_host(): some may not be
  // registered.
  void pin(const std::vector<HostRange>& ranges) EXCLUDES(mutex_, pin_mutex_) {
    pin_if([&](std::uint32_t, const HostMapping& slab) { return contains_any(slab, ranges); });
  }
  [[nodiscard]] bool is_pinned(const std::vector<HostRange>& ranges) const EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return std::all_of(slabs_.begin(), slabs_.end(),
                       [&](const auto& each) { return each.second.pinned() || !contains_any(each.second, ranges); });
  }
  // For links of members (backup/links.hpp).
  [[nodiscard]] StoreSockets& sockets() { return sockets_; }
  [[nodiscard]] SharedIndex& index() { return *index_; }
  // Held while copies are under way from memory that pinned_memory_of() returned: none is unmapped. Taken before other
  // locks.
  Mutex lending;
  // Maps and pins the memory of the store that holds anything, until `stop` returns true. Returns whether all of it is
  // pinned. Throws out_of_host_memory or driver errors: a part is pinned.
  [[nodiscard]] bool pin_used(const std::function<bool()>& stop) EXCLUDES(mutex_, pin_mutex_) {
    while (!stop() && map_another(true)) {
    }
    pin_if([&stop](std::uint32_t, const HostMapping&) { return !stop(); });
    return !stop();
  }
  // Unmaps what only pin_used() needs. Until it is called again, nothing is unmapped in the background.
  void unmap_lent() EXCLUDES(lending, mutex_) {
    lending.lock();
    unmap_unneeded([](bool lent, bool) { return lent; });
    const Lock lock(mutex_);
    lent_.clear();
  }
  // Returns the addresses of an entry that a member holds, as memory_of(); nothing unless all of it is pinned here.
  [[nodiscard]] std::vector<HostRange> pinned_memory_of(std::uint32_t entry) REQUIRES(lending) EXCLUDES(mutex_) {
    if (entry >= kEntries || !lock_index()) return {};
    const Lock index(index_->mutex, std::adopt_lock);
    const Lock lock(mutex_);
    std::vector<HostRange> ranges;
    std::size_t bytes = to_pages(index_->stored_bytes(entry));
    for (const auto& piece : index_->pieces_of(entry)) {
      const auto slab = slabs_.find(piece.slab);
      if (slab == slabs_.end() || !slab->second.pinned()) return {};
      const std::size_t length = std::min(bytes, piece.grains * kGrain);
      ranges.push_back({slab->second.address() + piece.first * kGrain, length});
      bytes -= length;
    }
    return bytes == 0 ? ranges : std::vector<HostRange>();
  }
  // Makes and pins memory in the background for `bytes` beyond what this process uses, as far as others leave some.
  void prepare_beyond(std::size_t bytes) {
    target_ = bytes + status().held_bytes;
    background_.request();
  }
  // In the background: pins what this process uses; trims if the store exceeds what all processes use by over 1/32.
  void tidy() {
    target_ = 0;
    tidy_wanted_ = true;
    background_.request();
  }
  // Waits until nothing is being prepared. Throws what stopped it.
  void wait_until_prepared() { background_.wait(); }
  // Gives back the memory that no process uses, and what this one has mapped and does not need, not even to lend it.
  void trim() EXCLUDES(lending) {
    apply_pending();
    lending.lock();
    unmap_unneeded([](bool lent, bool empty) { return !lent || empty; });
    free_unused([] {});
  }

  // Returns the bytes of an entry of this process, as stored.
  [[nodiscard]] std::size_t stored_bytes(std::uint32_t entry) const { return index_->stored_bytes(entry); }
  // Never waits for another process.
  [[nodiscard]] SharedStoreStatus status() const {
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

 private:
  // How long to wait while other processes look for the store.
  static constexpr std::chrono::milliseconds kLockTimeout{5000};
  static constexpr std::chrono::milliseconds kAnswerTimeout{5000};  // of a process that has it
  static constexpr std::chrono::milliseconds kIndexTimeout{1000};
  static constexpr std::chrono::milliseconds kKeeperTimeout{1000};  // for room that a keeper is to give back
  static constexpr std::chrono::milliseconds kHoldTimeout{5000};    // for a keeper to hold a new text
  static constexpr std::chrono::milliseconds kSlabTimeout{5000};    // for a slab that another process makes
  static constexpr std::size_t kTouchers = 8;                       // 8 GiB in 1.6 s, of pages of 4 KiB
  // Follows the name of the limit in errors.
  static constexpr char kWhose[] = " of all processes of the store, which its first one sets";

  // The stores of this process. A forked child is no member of them, and must not keep their memory.
  struct Forks {
    Mutex mutex;
    std::set<SharedStore*> stores GUARDED_BY(mutex);

    static Forks& instance() {
      static auto* const forks = new Forks;
      static const int registered =
          pthread_atfork([]() NO_THREAD_SAFETY_ANALYSIS { forks->mutex.lock(); },
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
  };

  [[nodiscard]] Error no_store(const std::string& why) const {
    return Error(ErrorKind::configuration, "the shared backup store '" + name_ + "' cannot be used: " + why)
        .with_advice("set MEMSAVER_SHARED_BACKUPS to another name, or unset it");
  }
  // Allocates the pages of new memory, with several threads, on a NUMA node (-1: any). Throws out_of_host_memory: some
  // of them are allocated.
  static void touch(const HostRange& all, int numa_node) {
    prefer_node(reinterpret_cast<void*>(all.address), all.bytes, numa_node);
    const std::size_t count = std::min(sys::up_to_cores(kTouchers), all.bytes / kGrain);
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
  using Slabs = std::deque<HostMapping>;

  [[nodiscard]] std::vector<Text> read_texts() const REQUIRES(index_->mutex) {
    std::vector<Text> texts;
    for (const auto& found : index_->texts()) {
      Text& text = texts.emplace_back(Text{found, {}, {}});
      text.text = read(found.entry);
      std::istringstream words(text.text);
      std::string word;
      std::size_t count = 0;
      words >> word >> word >> std::hex >> count;
      Digest digest;
      for (std::size_t bytes = 0; count > 0 && words >> digest.lane0 >> digest.lane1 >> bytes; --count) {
        if (bytes == 0) continue;
        const auto entry = index_->find_kept(digest, bytes);
        if (!entry) break;
        text.blocks.push_back(*entry);
        text.bytes += index_->stored_bytes(*entry);
        text.used = text.used && index_->is_used(*entry);
      }
      text.complete = words && count == 0;
    }
    return texts;
  }
  // Returns the entries that this keeper is to hold. If members lack room, first marks texts that nobody uses as
  // dropped, which is seen by all keepers.
  [[nodiscard]] std::set<std::uint32_t> wanted_of_texts(std::size_t limit) REQUIRES(index_->mutex) {
    std::vector<Text> texts = read_texts();
    for (auto& text : texts) {
      if (!text.used) continue;
      index_->set_used(text.entry);
      text.unused_ms = 0;
    }
    const auto pinned = [](const Text& text) { return text.mark == SharedLayout::Entry::pinned; };
    std::stable_sort(texts.begin(), texts.end(), [&](const Text& a, const Text& b) {
      return pinned(a) != pinned(b) ? pinned(a) : a.unused_ms < b.unused_ms;
    });
    std::size_t lacking = index_->take_wanted();
    for (auto text = texts.rbegin(); text != texts.rend() && lacking > 0; ++text) {
      if (text->used || pinned(*text)) continue;
      index_->mark_text(text->entry, SharedLayout::Entry::dropped);
      text->complete = false;
      lacking -= std::min(lacking, text->bytes);
    }
    std::set<std::uint32_t> wanted;
    std::size_t sum = 0;
    for (const auto& text : texts) {
      std::size_t more = 0;
      for (const auto entry : text.blocks) more += wanted.count(entry) != 0 ? 0 : index_->stored_bytes(entry);
      if (!text.complete || more > limit - sum) continue;
      sum += more;
      wanted.insert(text.blocks.begin(), text.blocks.end());
      wanted.insert(text.entry);
    }
    return wanted;
  }
  // Returns what is stored of an entry. Maps nothing; what cannot be read is missing.
  [[nodiscard]] std::string read(std::uint32_t entry) const REQUIRES(index_->mutex) {
    std::string all;
    std::size_t left = index_->stored_bytes(entry);
    for (const auto& piece : index_->pieces_of(entry)) {
      std::string part(std::min(left, piece.grains * kGrain), '\0');
      const std::size_t at = SharedLayout::slabs_at() + piece.slab * kSlabBytes + piece.first * kGrain;
      const ssize_t bytes = pread(file_, part.data(), part.size(), static_cast<off_t>(at));
      all.append(part, 0, static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
      left -= part.size();
    }
    return all;
  }

  SharedStore(Driver& driver, const std::string& name) : driver_(driver), name_(name), sockets_(name) {}
  // Throws configuration: the destructor undoes what was done.
  void join(std::size_t limit_bytes, Kind kind) {
    if (!sockets_.lock(kLockTimeout)) throw no_store("its name is in use, by another user or a stopped process");
    const Cleanup at_end([this] { sockets_.unlock(); });
    open_file(limit_bytes);
    index_ = std::make_unique<SharedIndex>(*layout_);
    if (!lock_index()) throw no_store("a process that uses it is stopped");
    Lock index(index_->mutex, std::adopt_lock);
    if (!index_->join(kind)) throw no_store("it has " + std::to_string(kMembers) + " processes already");
    index.unlock();
    if (sockets_.listen()) return;
    const int code = errno;
    leave();
    throw no_store(std::string("it cannot be offered to others: ") + std::strerror(code));
  }
  // Gets the file from a process of the store, or makes it. Others wait meanwhile: two files would double the limit.
  // Throws as join().
  void open_file(std::size_t limit_bytes) {
    const std::optional<int> found = sockets_.request(kAnswerTimeout);
    if (!found) {
      throw no_store(
          "processes of this user have it, and none of them answers; continue or end those that are "
          "stopped, and start this one again");
    }
    file_ = *found;
    const bool creating = file_ < 0;
    if (creating && limit_bytes == 0) {
      throw Error(ErrorKind::configuration, "no process of this user has the shared backup store '" + name_ + "'");
    }
    if (creating) file_ = make_store_file(SharedLayout::file_bytes());
    if (file_ < 0) throw no_store(std::string("memfd: ") + std::strerror(errno));
    if (!is_store_file(file_, SharedLayout::file_bytes())) throw no_store("a process uses another format for it");
    void* const memory = mmap(nullptr, sizeof(SharedLayout), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) throw no_store(std::string("mmap: ") + std::strerror(errno));
    madvise(memory, sizeof(SharedLayout), MADV_DONTFORK);
    layout_ = static_cast<SharedLayout*>(memory);
    if (creating) SharedIndex::create(*layout_, random_digest_key(), limit_bytes);
    if (!SharedIndex::is_valid(*layout_)) throw no_store("a process of another version of memsaver uses it");
  }
  // What the thread that joined does until the destructor ends it.
  void run_member() {
    while (sockets_.serve(file_, kUpkeep)) {
      apply_pending();
      // Copies may be under way for long, and new processes wait for this thread.
      if (lends() && lending.try_lock()) unmap_unneeded([](bool lent, bool empty) { return lent && empty; });
      free_unused([this] { sockets_.serve(file_, std::chrono::milliseconds(0)); });
    }
    Lock own(mutex_);
    still_pinned_.clear();
    slabs_.clear();
    own.unlock();
    // If a stopped process has the index, other members do this later, as for a dead member.
    if (!lock_index()) return;
    Lock index(index_->mutex, std::adopt_lock);
    index_->drop_all();
    index.unlock();
    free_unused([] {});
    leave();
  }
  void leave() {
    if (!lock_index()) return;
    const Lock index(index_->mutex, std::adopt_lock);
    index_->leave();
  }
  // Returns false if the index was not free for a second. Until a call finds it free, later ones do not wait.
  [[nodiscard]] bool lock_index() TRY_ACQUIRE(true, index_->mutex) {
    const bool locked = index_->mutex.lock_within(index_busy_ ? std::chrono::milliseconds(0) : kIndexTimeout);
    index_busy_ = !locked;
    return locked;
  }
  // Adds a change of the index, which is made as soon as the index is free.
  void add_pending(std::function<void()> change) EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    pending_.push_back(std::move(change));
  }
  // Changes the index only if this was the last use of the entry in this process.
  void drop_use(std::uint32_t entry) REQUIRES(index_->mutex) EXCLUDES(mutex_) {
    {
      const Lock lock(mutex_);
      const auto use = uses_.find(entry);
      if (use == uses_.end() || --use->second > 0) return;
      uses_.erase(use);
    }
    index_->drop(entry);
  }

  // Maps the slab unless it is. Throws out_of_host_memory.
  HostRange map(std::uint32_t slab) EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    auto found = slabs_.find(slab);
    if (found == slabs_.end()) {
      const std::size_t bytes = index_->bytes_of(slab);
      void* const memory = sys::map(bytes, 0, file_, SharedLayout::slabs_at() + slab * kSlabBytes);
      madvise(memory, bytes, MADV_DONTFORK);
      madvise(memory, bytes, MADV_HUGEPAGE);  // if the machine has them for shared memory (shmem_enabled)
      found = slabs_.emplace(slab, HostMapping(memory, bytes)).first;
    }
    return {found->second.address(), found->second.bytes()};
  }
  // Maps the slabs of pieces, and returns the addresses of the pieces, `bytes` in all. Throws out_of_host_memory.
  [[nodiscard]] std::vector<HostRange> map(const std::vector<SharedIndex::Piece>& pieces, std::size_t bytes) {
    std::vector<HostRange> ranges;
    for (const auto& piece : pieces) {
      const std::size_t length = std::min(bytes, piece.grains * kGrain);
      ranges.push_back({map(piece.slab).address + piece.first * kGrain, length});
      bytes -= length;
    }
    return ranges;
  }
  // Maps one more slab that other processes made, with `used` one that holds anything, to be lent. Returns false if
  // there is none. Throws out_of_host_memory.
  [[nodiscard]] bool map_another(bool used = false) EXCLUDES(map_mutex_, mutex_) {
    const Lock lock(map_mutex_);
    if (!lock_index()) return false;
    Lock index(index_->mutex, std::adopt_lock);
    const std::optional<std::uint32_t> slab = index_->map_another(used);
    index.unlock();
    if (!slab) return false;
    if (used) {
      const Lock own(mutex_);
      lent_.insert(*slab);
    }
    map(*slab);
    return true;
  }
  [[nodiscard]] bool lends() const EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return !lent_.empty();
  }
  [[nodiscard]] static bool contains_any(const HostMapping& slab, const std::vector<HostRange>& ranges) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const auto& range) { return range.address - slab.address() < slab.bytes(); });
  }
  // Registers the mapped slabs that are wanted and not registered yet. Throws as pin().
  void pin_if(const std::function<bool(std::uint32_t, const HostMapping&)>& wanted) EXCLUDES(mutex_, pin_mutex_) {
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
  // Takes the mapped ones of `slabs` out of slabs_, and returns them. A later map() maps them anew.
  [[nodiscard]] Slabs take_out(const std::vector<std::uint32_t>& slabs) REQUIRES(pin_mutex_) EXCLUDES(mutex_) {
    Slabs taken;
    const Lock lock(mutex_);
    for (const std::uint32_t slab : slabs) {
      lent_.erase(slab);
      if (auto node = slabs_.extract(slab)) taken.push_back(std::move(node.mapped()));
    }
    return taken;
  }
  // Unmaps the slabs that no entry of this process needs and for which `wanted(lent, empty)` returns true: pin_used()
  // has mapped it; it holds nothing. Unlocks `lending`.
  void unmap_unneeded(const std::function<bool(bool, bool)>& wanted) RELEASE(lending)
      EXCLUDES(map_mutex_, pin_mutex_, mutex_) {
    Slabs slabs;
    {
      const Lock not_lent(lending, std::adopt_lock);
      const Lock no_other(map_mutex_);
      const Lock not_pinned(pin_mutex_);
      if (!lock_index()) return;
      const Lock index(index_->mutex, std::adopt_lock);
      std::vector<std::uint32_t> entries;
      std::set<std::uint32_t> lent;
      {
        const Lock lock(mutex_);
        for (const auto& [entry, uses] : uses_) entries.push_back(entry);
        lent = lent_;
      }
      std::set<std::uint32_t> needed;
      for (const std::uint32_t entry : entries) {
        for (const auto& piece : index_->pieces_of(entry)) needed.insert(piece.slab);
      }
      slabs = take_out(index_->unmap_if([&](std::uint32_t slab, bool empty) {
        return needed.count(slab) == 0 && wanted(lent.count(slab) != 0, empty);
      }));
    }
    unmap(std::move(slabs));
  }
  // Unregisters and unmaps. The next call tries again what the driver does not unregister.
  void unmap(Slabs slabs) EXCLUDES(mutex_) {
    Slabs again;
    {
      const Lock lock(mutex_);
      again.swap(still_pinned_);
    }
    for (Slabs* const list : {&again, &slabs}) {
      for (; !list->empty(); list->pop_front()) {
        if (attempt("memory of the shared store stays pinned", [list] { list->front().unpin(); })) continue;
        const Lock lock(mutex_);
        still_pinned_.push_back(std::move(list->front()));
      }
    }
  }

  // Completes a slab that begin_slab() gave this process. Throws out_of_host_memory, backup or driver errors: it is
  // complete, or given up. No process uses one without pages, because a write to it may find no memory.
  void make_slab(std::uint32_t slab, int numa_node) {
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
  void free_pages(std::uint32_t slab) {
    sys::punch_hole(file_, SharedLayout::slabs_at() + slab * kSlabBytes, kSlabBytes);
  }
  // Calls `between` before each slab: to free one takes 20 ms.
  void free_unused(const std::function<void()>& between) {
    if (!lock_index()) return;
    Lock index(index_->mutex, std::adopt_lock);
    index_->drop_dead_members();
    const std::vector<std::uint32_t> slabs = index_->begin_freeing();
    index.unlock();
    for (const std::uint32_t slab : slabs) {
      between();
      free_pages(slab);
    }
    if (slabs.empty() || !lock_index()) return;
    const Lock again(index_->mutex, std::adopt_lock);
    for (const std::uint32_t slab : slabs) index_->end_freeing(slab);
  }
  void work() {
    if (ending_) return;
    prepare_now();
    // While processes replace content one after the other, the store has the old and the new.
    const std::size_t used = index_->used_bytes();
    if (tidy_wanted_.exchange(false) && index_->slab_bytes() > used + used / 32) trim();
  }
  // Processes that prepare at the same time make slabs side by side, together no more than the one that needs most.
  void prepare_now() {
    auto until = std::chrono::steady_clock::now() + kSlabTimeout;
    while (!ending_) {
      pin_if([](std::uint32_t, const HostMapping&) { return true; });
      if (status().pinned_bytes >= target_) return;
      const std::uint32_t seen = index_->changes();
      if (!map_another()) {
        if (!lock_index()) return;
        Lock index(index_->mutex, std::adopt_lock);
        const std::size_t missing = target_ - std::min<std::size_t>(target_, index_->slab_bytes());
        const auto slab = missing > 0 ? index_->begin_slab(kGrain, missing) : std::nullopt;
        index.unlock();
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
  // In a forked child: closes what it inherited.
  void abandon() {
    sockets_.close_all();
    if (file_ >= 0) close(std::exchange(file_, -1));
  }

  const pid_t process_ = getpid();
  Driver& driver_;
  const std::string name_;
  StoreSockets sockets_;
  int file_ = -1;
  SharedLayout* layout_ = nullptr;
  std::unique_ptr<SharedIndex> index_;
  std::atomic<bool> index_busy_{false};  // the last lock_index() failed
  std::atomic<bool> ending_{false};
  std::thread member_thread_;  // holds the liveness mutex of this process, and serves the store's file to others

  mutable Mutex mutex_;  // taken after that of the index, and never held across a wait
  std::map<std::uint32_t, std::size_t> uses_ GUARDED_BY(mutex_);   // of entries, by blocks of this process
  std::vector<std::function<void()>> pending_ GUARDED_BY(mutex_);  // in order
  std::set<std::uint32_t> held_ GUARDED_BY(index_->mutex);         // entries that keep() holds
  std::map<std::uint32_t, HostMapping> slabs_ GUARDED_BY(mutex_);
  Slabs still_pinned_ GUARDED_BY(mutex_);  // that unmap() failed to unregister

  std::set<std::uint32_t> lent_ GUARDED_BY(mutex_);  // slabs that pin_used() has mapped
  Mutex map_mutex_;                                  // held while a slab without entries is mapped, or given up
  Mutex pin_mutex_ ACQUIRED_BEFORE(mutex_);          // held while a slab is registered, and is in slabs_
  std::atomic<std::size_t> target_{0};
  std::atomic<bool> tidy_wanted_{false};
  Background background_{"pin memory of the shared store; the next operation does it", [this] { work(); }};
};

// Ends a block's use of host memory, of the pool or of the store. Makes no system call.
inline void give_host_memory(Block& block, HostPool& pool, SharedStore* store) {
  const std::vector<HostRange> ranges = std::exchange(block.host, {});
  if (block.shared) {
    store->give(*std::exchange(block.shared, std::nullopt));
  } else if (!ranges.empty()) {
    pool.give(ranges);
  }
}

}  // namespace memsaver
