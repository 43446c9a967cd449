#pragma once

#include "backup/pipeline.hpp"

namespace memsaver {

// A process on whose device nothing is in use lends the device's link to another member of its store, for the time of
// one restore: it copies content of the store to a buffer on its device, from which the borrower takes it over a direct
// link of the two devices (NVLink). So content comes over several links at once.
//
// On a connection of the two, the lender sends the descriptor of its buffer, then an answer to each request, in order.
// A request is the number of an entry that the borrower holds; the answer is 1 once it is in the buffer, or 0 if the
// lender has not pinned all of it. Request n is for slot n % kLinkSlots, and is sent once the borrower has taken what
// was there. Either of them may end at any time, or stop: the other one sees the end of the connection, or nothing for
// kLinkPatience.

inline constexpr std::size_t kLinkSlots = 4;  // of the buffer, a block each
inline constexpr std::chrono::milliseconds kLinkPatience{1000};
inline constexpr std::chrono::milliseconds kLastPatience{50};  // for the last blocks, and for the buffer to be given up

[[nodiscard]] inline std::size_t link_buffer_bytes(Driver& driver, int device) {
  return round_up(kLinkSlots * kBlockBytes, driver.device_info(device).granularity);
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
    ended_ = ended_ || bytes >= 0 || (errno != EAGAIN && errno != EINTR);
    return std::nullopt;
  }
  // Likewise; the caller is to close the descriptor.
  [[nodiscard]] std::optional<int> receive_descriptor() {
    errno = 0;
    const int file = StoreSockets::receive_descriptor(file_);
    if (file >= 0) return file;
    ended_ = ended_ || (errno != EAGAIN && errno != EINTR);
    return std::nullopt;
  }
  // If that fails, the other side has ended, or does not read: nothing more comes from it.
  void send(std::uint32_t message) {
    if (::send(file_, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) ended_ = true;
  }
  // Lets the other side see that nothing more comes, and waits up to `timeout` until it ends the connection.
  void end(std::chrono::milliseconds timeout) {
    shutdown(file_, SHUT_WR);
    while (!ended_ && StoreSockets::readable(file_, timeout)) (void)receive();
  }

 private:
  const int file_;
  bool ended_ = false;
};

// Owns a thread that lends the link of this process's device to one borrower after the other.
class LinkLender {
 public:
  // Lends nothing if the system refuses what it needs. Throws driver errors.
  LinkLender(Driver& driver, SharedStore& store, int device)
      : driver_(driver), store_(store), device_(device), buffer_bytes_(link_buffer_bytes(driver, device)) {
    if (!store_.sockets().offer_link(store_.index().member())) return;
    auto thread = sys::start_thread([this] { run(); });
    if (thread) thread_ = std::move(*thread);
    if (!thread) store_.sockets().close_offer();
  }
  // Waits until nothing is under way and the memory of the buffer is free: some milliseconds, or what one registration
  // of memory takes. A borrower that does not run keeps the memory; it is not waited for longer than kLastPatience.
  ~LinkLender() {
    ending_ = true;
    store_.sockets().end_offer();
    if (thread_.joinable()) thread_.join();
    store_.sockets().close_offer();
  }

 private:
  static constexpr std::size_t kSpareShare = 4;  // of the device's memory, that must be free

  // Until the end of the offer, or a lost context.
  void run() {
    pthread_setname_np(pthread_self(), "memsaver-link");
    while (!ending_ && driver_.loss().empty()) {
      attempt("not all of the shared store is pinned to be lent", [this] { pin(); });
      const int connection = store_.sockets().accept_link(SharedStore::kUpkeep);
      if (connection < 0) continue;
      LinkSocket borrower(connection);
      attempt("a link is not lent", [&] { serve(borrower); });
    }
    store_.sockets().end_offer();
  }
  // Pins what the store holds, once for each change, unless no member can borrow the link, or one waits for it.
  void pin() {
    const std::uint32_t changes = store_.changes();
    const auto peers = store_.index().peers();
    const auto linked = [this](const auto& peer) { return driver_.links_directly(device_, peer.second); };
    if (changes == pinned_ || std::none_of(peers.begin(), peers.end(), linked)) return;
    pinned_ = changes;  // also if it fails: what made it fail now will do so again
    if (!store_.pin_used([this] { return ending_ || store_.sockets().link_is_wanted(); })) pinned_.reset();
  }
  [[nodiscard]] bool goes_on(const LinkSocket& borrower) const {
    return !borrower.ended() && !ending_ && !store_.index().device_in_use();
  }
  // Copies what the borrower asks for, until it ends or is silent, or something is to use the device; nothing if much
  // of the device's memory is in use. Throws driver errors: nothing is under way.
  void serve(LinkSocket& borrower) {
    const MemoryInfo memory = driver_.memory_info(device_);
    if (!goes_on(borrower) || memory.free_bytes < memory.total_bytes / kSpareShare) return;
    const OwnStream stream(driver_, device_);
    DeviceRange buffer(driver_, device_, buffer_bytes_);
    buffer.map(buffer_bytes_, [this] { return driver_.create(device_, buffer_bytes_, true); });
    const int file = driver_.export_handle(device_, *buffer.handle());
    StoreSockets::send_descriptor(borrower.file(), file);
    close(file);
    {
      const Lock lending(store_.lending);
      const Cleanup at_end([&] { settle(driver_, device_, stream); });
      std::size_t requests = 0;
      std::deque<Recorded> copies;  // null: something is missing
      while (goes_on(borrower) && (!copies.empty() || store_.sockets().await(borrower.file(), kLinkPatience))) {
        while (const auto request = borrower.receive()) {
          const Address slot = buffer.address() + requests++ % kLinkSlots * kBlockBytes;
          const bool copied = copy(*request, slot, stream);
          copies.push_back(copied ? std::make_shared<RecordedEvent>(driver_, device_, stream) : nullptr);
        }
        if (copies.empty()) continue;
        if (copies.front()) copies.front()->wait();
        borrower.send(copies.front() ? 1 : 0);
        copies.pop_front();
      }
    }
    buffer.close();
    borrower.end(kLastPatience);
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

  Driver& driver_;
  SharedStore& store_;
  const int device_;
  const std::size_t buffer_bytes_;
  std::optional<std::uint32_t> pinned_;  // what changes() was
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

// Owns the links of other members that one restore uses, and knows which blocks are under way on them. One thread.
class BorrowedLinks {
 public:
  // Asks members whose devices are idle and linked with this one for their links, one of each device.
  // `arrived(block, from, stream)` queues on `stream` what becomes of a block that lies at `from`; `lost(block)`
  // restores one that did not come. Throws driver errors.
  BorrowedLinks(Pipeline& pipeline, std::function<void(std::size_t, Address, Stream)> arrived,
                std::function<void(std::size_t)> lost)
      : pipeline_(pipeline), arrived_(std::move(arrived)), lost_(std::move(lost)) {
    for (const auto& [member, of] : pipeline_.store->index().peers()) {
      const bool taken =
          std::any_of(links_.begin(), links_.end(), [&of = of](const Link& each) { return each.device == of; });
      if (taken || !pipeline_.store->index().is_idle(member) || pipeline_.link_failures[of] >= kMostFailures) continue;
      if (!pipeline_.driver.links_directly(pipeline_.device, of)) continue;
      const int connection = pipeline_.store->sockets().borrow_link(member);
      if (connection >= 0) links_.emplace_back(connection, member, of);  // else it has ended, or does not lend
    }
  }
  // Waits until nothing is under way.
  ~BorrowedLinks() { settle(pipeline_.driver, pipeline_.device, stream_); }

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
      const bool usable =
          pipeline_.store->index().is_idle(link->member) && (link->buffer ? take_answers(*link) : open(*link));
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
    pipeline_.record(stream_)->wait();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kMostFailures = 3;

  struct Link {
    Link(int file, std::uint32_t number, std::string of) : lender(file), member(number), device(std::move(of)) {}

    LinkSocket lender;
    const std::uint32_t member;
    const std::string device;
    std::optional<DeviceRange> buffer;  // closed before the connection, whose end says so to the lender
    std::size_t answers = 0;
    std::deque<std::size_t> asked;           // blocks without an answer, in order
    std::deque<Recorded> taken;              // slots of the answers before: in use until these events
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
      const std::size_t bytes = link_buffer_bytes(pipeline_.driver, pipeline_.device);
      DeviceRange& buffer = link.buffer.emplace(pipeline_.driver, pipeline_.device, bytes);
      buffer.map(bytes, [&] { return pipeline_.driver.import_handle(pipeline_.device, *file, bytes); });
    });
    std::size_t& failures = pipeline_.link_failures[link.device];
    failures = opened ? 0 : failures + 1;
    return opened;
  }
  // Returns false if the link cannot be used any more.
  [[nodiscard]] bool take_answers(Link& link) {
    while (const auto answer = link.lender.receive()) {
      if (link.asked.empty()) return false;
      const std::size_t block = link.asked.front();
      link.asked.pop_front();
      link.since = Clock::now();
      const Address slot = link.buffer->address() + link.answers++ % kLinkSlots * kBlockBytes;
      *answer != 0 ? arrived_(block, slot, stream_) : lost_(block);
      link.taken.push_back(pipeline_.record(stream_));
    }
    while (!link.taken.empty() && link.taken.front()->done()) link.taken.pop_front();
    return true;
  }
  void drop(std::list<Link>::iterator link) {
    pipeline_.record(stream_)->wait();
    const std::deque<std::size_t> asked = std::move(link->asked);
    links_.erase(link);
    for (const std::size_t block : asked) lost_(block);
  }

  Pipeline& pipeline_;
  const OwnStream stream_{pipeline_.driver, pipeline_.device};
  const std::function<void(std::size_t, Address, Stream)> arrived_;
  const std::function<void(std::size_t)> lost_;
  std::list<Link> links_;
};

}  // namespace memsaver
