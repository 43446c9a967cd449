#pragma once

#include <list>

#include "backup/shared_store.hpp"

namespace memsaver {

// A process on whose device nothing is in use lends the device's link to another member of its store, for the time of
// one restore: it copies content of the store to a buffer on its device, from which the borrower takes it (over NVLink,
// between GPUs that have it). So content comes over several links at once.
//
// On a connection of the two, the lender sends the descriptor of its buffer, then an answer to each request, in order.
// A request is the number of an entry that the borrower holds; the answer is 1 once it is in the buffer, or 0 if the
// lender has not pinned all of it. Request n is for slot n % kLinkSlots, and is sent once the borrower has taken what
// was there. Either of them may end at any time, or stop: the other one sees the end of the connection, or nothing for
// kLinkPatience.

inline constexpr std::size_t kLinkSlots = 4;  // of the buffer, a block each
inline constexpr std::chrono::milliseconds kLinkPatience{1000};

[[nodiscard]] inline std::size_t link_buffer_bytes(const DeviceInfo& device) {
  return round_up(kLinkSlots * kBlockBytes, device.granularity);
}

// Owns one end of a connection for messages of one number, and waits for none. One thread.
class LinkSocket {
 public:
  explicit LinkSocket(int file) : file_(file) {}
  LinkSocket(const LinkSocket&) = delete;
  // Ends the connection, also if a forked child has this end, too.
  ~LinkSocket() {
    shutdown(file_, SHUT_RDWR);
    close(file_);
  }

  [[nodiscard]] int file() const { return file_; }
  // Returns whether nothing more will come.
  [[nodiscard]] bool ended() const { return ended_; }
  // Returns the next message, if there is one.
  [[nodiscard]] std::optional<std::uint32_t> receive() {
    std::uint32_t message = 0;
    const ssize_t bytes = recv(file_, &message, sizeof message, MSG_DONTWAIT);
    if (bytes == static_cast<ssize_t>(sizeof message)) return message;
    note_end(bytes);
    return std::nullopt;
  }
  // Likewise; the caller is to close the descriptor.
  [[nodiscard]] std::optional<int> receive_descriptor() {
    errno = 0;
    const int file = StoreSockets::receive_descriptor(file_);
    if (file >= 0) return file;
    note_end(-1);
    return std::nullopt;
  }
  // If that fails, the other side has ended, or does not read: nothing more comes from it.
  void send(std::uint32_t message) {
    if (::send(file_, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) ended_ = true;
  }
  void send_descriptor(int file) { StoreSockets::send_descriptor(file_, file); }
  // Lets the other side see that nothing more comes, and waits up to `timeout` until it ends the connection.
  void end(std::chrono::milliseconds timeout) {
    shutdown(file_, SHUT_WR);
    while (!ended_ && StoreSockets::readable(file_, timeout)) (void)receive();
  }

 private:
  void note_end(ssize_t received) { ended_ = ended_ || received >= 0 || (errno != EAGAIN && errno != EINTR); }

  const int file_;
  bool ended_ = false;
};

// Owns a thread that lends the link of this process's device to one borrower after the other.
class LinkLender {
 public:
  // `idle` returns whether this process uses no memory of the device; it is called by the thread. Lends nothing if the
  // system refuses what it needs. Throws driver errors.
  LinkLender(Driver& driver, SharedStore& store, int device, std::function<bool()> idle)
      : driver_(driver), store_(store), device_(device), info_(driver.device_info(device)), idle_(std::move(idle)) {
    if (!store_.sockets().offer_link(store_.index().member())) return;
    if (auto thread = sys::start_thread([this] { run(); })) {
      thread_ = std::move(*thread);
    } else {
      store_.sockets().end_offer();
    }
  }
  LinkLender(const LinkLender&) = delete;
  // Waits until nothing is under way and the memory of the buffer is free: some milliseconds, or what one registration
  // of memory takes. A borrower that does not run keeps the memory; it is not waited for longer than kReturn.
  ~LinkLender() {
    ending_ = true;
    store_.sockets().end_offer();
    if (thread_.joinable()) thread_.join();
  }

 private:
  static constexpr std::chrono::milliseconds kUpkeep{1000};  // how soon new content of the store is pinned
  static constexpr std::chrono::milliseconds kReturn{50};    // for a borrower to give the buffer up
  static constexpr std::size_t kSpareShare = 4;              // of the device's memory, that must be free

  // Until the end of the offer, or a lost context, after which nothing is lent.
  void run() {
    pthread_setname_np(pthread_self(), "memsaver-link");
    attempt("this process does not lend its link until its next operation", [this] {
      while (!ending_) {
        attempt_unless_lost("not all of the shared store is pinned to be lent", [this] { pin(); });
        const int connection = store_.sockets().accept_link(kUpkeep);
        if (connection < 0) continue;
        LinkSocket borrower(connection);
        attempt_unless_lost("the link is not lent", [&] {
          if (may_lend()) serve(borrower);
        });
      }
    });
    store_.sockets().end_offer();
  }
  // Pins what the store holds, once for each change, unless a borrower waits.
  void pin() {
    const std::uint32_t changes = store_.changes();
    const auto stop = [this] { return ending_ || store_.sockets().link_is_wanted(); };
    if (changes == pinned_ || !is_reachable()) return;
    pinned_ = changes;  // also if it fails: what made it fail now will do so again
    if (!store_.pin_used(stop)) pinned_.reset();
  }
  // Returns whether there are members that could borrow the link.
  [[nodiscard]] bool is_reachable() {
    const auto peers = store_.index().peers();
    return std::any_of(peers.begin(), peers.end(),
                       [this](const auto& peer) { return driver_.links_directly(device_, peer.second); });
  }
  // Returns whether nothing uses the device, as far as this process knows, and much of its memory is free.
  [[nodiscard]] bool may_lend() {
    if (!idle_() || store_.index().device_in_use()) return false;
    const MemoryInfo memory = driver_.memory_info(device_);
    return memory.free_bytes >= memory.total_bytes / kSpareShare;
  }
  [[nodiscard]] bool goes_on(const LinkSocket& borrower) const {
    return !borrower.ended() && !ending_ && !store_.index().device_in_use();
  }
  // Copies what the borrower asks for, until it ends or is silent, or something is to use the device. Throws driver
  // errors: nothing is under way.
  void serve(LinkSocket& borrower) {
    const OwnStream stream(driver_, device_);
    DeviceRange buffer(driver_, device_, link_buffer_bytes(info_));
    buffer.map(link_buffer_bytes(info_), [this] { return driver_.create(device_, link_buffer_bytes(info_), true); });
    {
      const int file = driver_.export_handle(device_, *buffer.handle());
      borrower.send_descriptor(file);
      close(file);
    }
    std::size_t requests = 0;
    while (goes_on(borrower) && store_.sockets().await(borrower.file(), kLinkPatience)) {
      const Lock lending(store_.lending);
      const Cleanup at_end([&] { finish(stream); });
      std::deque<Recorded> copies;  // null: something is missing
      while (goes_on(borrower)) {
        while (const auto request = borrower.receive()) {
          const Address slot = buffer.address() + requests++ % kLinkSlots * kBlockBytes;
          const bool copied = copy(*request, slot, stream);
          copies.push_back(copied ? std::make_shared<RecordedEvent>(driver_, device_, stream) : nullptr);
        }
        if (copies.empty()) break;
        if (copies.front()) copies.front()->wait();
        borrower.send(copies.front() ? 1 : 0);
        copies.pop_front();
      }
    }
    buffer.close();
    borrower.end(kReturn);
  }
  // Returns whether the entry is being copied.
  [[nodiscard]] bool copy(std::uint32_t entry, Address to, Stream stream) REQUIRES(store_.lending) {
    const std::vector<HostRange> memory = store_.pinned_memory_of(entry);
    if (memory.empty() || sum_of(memory) > kBlockBytes) return false;
    for (const auto& range : memory) {
      driver_.copy_to_device(device_, to, reinterpret_cast<const void*>(range.address), range.bytes, stream);
      to += range.bytes;
    }
    return true;
  }
  void finish(Stream stream) {
    if (attempt("while waiting for a lent link", [&] { RecordedEvent(driver_, device_, stream).wait(); })) return;
    attempt("while waiting for the device", [this] { driver_.synchronize(device_); });
  }

  Driver& driver_;
  SharedStore& store_;
  const int device_;
  const DeviceInfo info_;
  const std::function<bool()> idle_;
  std::optional<std::uint32_t> pinned_;  // what changes() was
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

// Owns the links of other members that one restore uses, and knows which blocks are under way on them. One thread.
class BorrowedLinks {
 public:
  // How often it fails in a row to reach the memory of a device, by its UUID.
  using Failures = std::map<std::string, std::size_t>;

  // Asks members whose devices are idle and linked with this one for their links, one of each device.
  // `arrived(block, from, stream)` queues on `stream` what becomes of a block that lies at `from`; `lost(block)`
  // restores one that did not come. Throws driver errors.
  BorrowedLinks(Driver& driver, SharedStore& store, int device, Failures& failures,
                std::function<void(std::size_t, Address, Stream)> arrived, std::function<void(std::size_t)> lost)
      : driver_(driver),
        index_(store.index()),
        device_(device),
        buffer_bytes_(link_buffer_bytes(driver.device_info(device))),
        stream_(driver, device),
        failures_(failures),
        arrived_(std::move(arrived)),
        lost_(std::move(lost)) {
    for (const auto& [member, of] : index_.peers()) {
      const bool taken =
          std::any_of(links_.begin(), links_.end(), [&of = of](const Link& each) { return each.device == of; });
      if (taken || !index_.is_idle(member) || failures[of] >= kMostFailures) continue;
      const int connection = driver.links_directly(device, of) ? store.sockets().borrow_link(member) : -1;
      if (connection >= 0) links_.emplace_back(connection, member, of);  // else it has ended, or does not lend
    }
  }
  BorrowedLinks(const BorrowedLinks&) = delete;
  // Waits until nothing is under way.
  ~BorrowedLinks() {
    if (attempt("while waiting for borrowed links", [this] { RecordedEvent(driver_, device_, stream_).wait(); }))
      return;
    attempt("while waiting for the device", [this] { driver_.synchronize(device_); });
  }

  // Returns whether there are links, or there may soon be.
  [[nodiscard]] bool any() const { return !links_.empty(); }
  // Asks a link that is free for a block, which has an entry. Returns false if none is free.
  [[nodiscard]] bool ask(std::size_t block, std::uint32_t entry) {
    const auto link = std::find_if(links_.begin(), links_.end(), [](const Link& each) { return each.is_free(); });
    if (link == links_.end()) return false;
    if (link->asked.empty()) link->since = Clock::now();
    link->asked.push_back(block);
    link->lender.send(entry);
    return true;
  }
  // Takes what has come, and restores what links did not bring that have ended, or are silent for longer than
  // `patience`. Likewise for members that are to use their device: they wait for this. Throws driver errors and what
  // the callbacks throw.
  void pump(std::chrono::milliseconds patience = kLinkPatience) {
    for (auto next = links_.begin(); next != links_.end();) {
      const auto link = next++;
      const bool usable = index_.is_idle(link->member) && (link->buffer ? take_answers(*link) : open(*link));
      if (!usable || link->lender.ended() || link->is_late(patience)) drop(link);
    }
  }
  // Waits until no block is under way, but not long: the own link could bring them. Throws as pump().
  void wait() {
    const auto asked = [this] {
      return std::find_if(links_.begin(), links_.end(), [](const Link& each) { return !each.asked.empty(); });
    };
    for (pump(kLastPatience); asked() != links_.end(); pump(kLastPatience)) {
      (void)StoreSockets::readable(asked()->lender.file(), kLastPatience);
    }
    RecordedEvent(driver_, device_, stream_).wait();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kMostFailures = 3;
  static constexpr std::chrono::milliseconds kLastPatience{50};  // a lender brings a block in less than 3 ms

  struct Link {
    Link(int connection, std::uint32_t number, std::string of)
        : lender(connection), member(number), device(std::move(of)) {}

    LinkSocket lender;
    const std::uint32_t member;
    const std::string device;
    std::optional<DeviceRange> buffer;  // closed before the connection, whose end says so to the lender
    std::size_t answers = 0;
    std::deque<std::size_t> asked;           // blocks without an answer, in order
    std::deque<Recorded> taken;              // slots of the answers before: in use until these events; null: not used
    Clock::time_point since = Clock::now();  // when the buffer, or the next answer, was first waited for

    [[nodiscard]] bool is_free() const { return buffer && asked.size() + taken.size() < kLinkSlots; }
    [[nodiscard]] bool is_late(std::chrono::milliseconds patience) const {
      return (!buffer || !asked.empty()) && Clock::now() - since > patience;
    }
  };

  // Maps the lender's buffer, if its descriptor has come. Returns false if the link cannot be used.
  [[nodiscard]] bool open(Link& link) {
    const auto file = link.lender.receive_descriptor();
    if (!file) return true;
    const Cleanup at_end([&] { close(*file); });
    const bool opened = attempt_unless_lost("a link is not borrowed", [&] {
      DeviceRange& buffer = link.buffer.emplace(driver_, device_, buffer_bytes_);
      buffer.map(buffer_bytes_, [&] { return driver_.import_handle(device_, *file, buffer_bytes_); });
    });
    failures_[link.device] = opened ? 0 : failures_[link.device] + 1;
    return opened;
  }
  // Returns false if the link cannot be used any more.
  [[nodiscard]] bool take_answers(Link& link) {
    while (const auto answer = link.lender.receive()) {
      if (link.asked.empty()) return false;
      const std::size_t block = link.asked.front();
      link.asked.pop_front();
      link.since = Clock::now();
      if (*answer != 0) {
        arrived_(block, link.buffer->address() + link.answers % kLinkSlots * kBlockBytes, stream_);
        link.taken.push_back(std::make_shared<RecordedEvent>(driver_, device_, stream_));
      } else {
        lost_(block);
        link.taken.push_back(nullptr);
      }
      ++link.answers;
    }
    while (!link.taken.empty() && (!link.taken.front() || link.taken.front()->done())) link.taken.pop_front();
    return true;
  }
  void drop(std::list<Link>::iterator link) {
    RecordedEvent(driver_, device_, stream_).wait();
    const std::deque<std::size_t> asked = std::move(link->asked);
    links_.erase(link);
    for (const std::size_t block : asked) lost_(block);
  }

  Driver& driver_;
  const SharedIndex& index_;
  const int device_;
  const std::size_t buffer_bytes_;
  const OwnStream stream_;
  Failures& failures_;
  const std::function<void(std::size_t, Address, Stream)> arrived_;
  const std::function<void(std::size_t)> lost_;
  std::list<Link> links_;
};

}  // namespace memsaver
