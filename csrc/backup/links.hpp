#pragma once

#include "backup/shared_store.hpp"

namespace memsaver {

// A process on whose device nothing is in use lends its link to another member of its store, for the time of one
// restore: it copies content of the store to a buffer on its device, from which the borrower takes it (over NVLink,
// between GPUs that have it). So content comes over several links at once. The two speak by messages: the lender sends
// the descriptor of the buffer, then one answer for each block that it is asked for.

inline constexpr std::size_t kLinkSlots = 4;  // blocks of the buffer
inline const std::size_t kLinkBytes = kLinkSlots * kBlockBytes;

struct LinkAsks {
  std::uint32_t slot;  // to copy the parts to, one after the other
  std::uint32_t parts;
  SharedStore::Part part[kPieces];
};
struct LinkAnswer {
  std::uint32_t slot;
  std::uint32_t there;  // 0: this member has not pinned all parts
};

// Owns a socket. A forked child keeps no connection open: its end is shut down first.
class LinkSocket {
 public:
  explicit LinkSocket(int file) : file_(file) {}
  LinkSocket(const LinkSocket&) = delete;
  ~LinkSocket() {
    if (file_ < 0) return;
    shutdown(file_, SHUT_RDWR);
    close(file_);
  }
  [[nodiscard]] int file() const { return file_; }
  template <typename Value>
  void say(const Value& value) const {
    (void)!send(file_, &value, sizeof value, MSG_NOSIGNAL);  // if it fails, the other end is closed
  }
  // Returns false without a message; `ended` if there will be none.
  template <typename Value>
  [[nodiscard]] bool hear(Value& value, bool& ended) const {
    const ssize_t bytes = recv(file_, &value, sizeof value, 0);
    ended = bytes != static_cast<ssize_t>(sizeof value) && !(bytes < 0 && (errno == EAGAIN || errno == EINTR));
    return bytes == static_cast<ssize_t>(sizeof value);
  }

 private:
  const int file_;
};

// Owns the thread of a member that lends the link of its device. Any thread may call any function.
class LinkLender {
 public:
  // `idle` returns whether this process uses no memory of the device. Throws driver errors.
  LinkLender(Driver& driver, SharedStore& store, int device, std::function<bool()> idle)
      : driver_(driver),
        store_(store),
        device_(device),
        info_(driver.device_info(device)),
        idle_(std::move(idle)),
        offer_(store.sockets().offer_link(store.index().member())) {
    auto thread = offer_.file() >= 0 ? sys::start_thread([this] { run(); }) : std::nullopt;
    if (thread) thread_ = std::move(*thread);
  }
  ~LinkLender() {
    ending_ = true;
    refuse();
    if (offer_.file() >= 0) shutdown(offer_.file(), SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
  }
  void lend() { lends_ = true; }
  // Stops lending, and returns once this process does nothing for it any more. A borrower keeps what is left of the
  // buffer until it sees that, some milliseconds.
  void refuse() EXCLUDES(working_) {
    lends_ = false;
    link().lends = 0;
    const Lock nothing_under_way(working_);
  }

 private:
  static constexpr std::chrono::milliseconds kUpkeep{200};  // how soon new content of the store is pinned
  static constexpr std::size_t kSpareShare = 4;             // of the device, which must be free

  [[nodiscard]] SharedLayout::Link& link() const { return store_.index().link(); }

  // Returns whether no process uses the device, as far as this one knows.
  [[nodiscard]] bool may_lend() const {
    if (!lends_ || !idle_()) return false;
    const auto uses = [this](const SharedLayout::Link& link, const std::string& device) {
      return link.used != 0 && device == info_.uuid;
    };
    if (!store_.index().members_with(uses).empty()) return false;
    const MemoryInfo memory = driver_.memory_info(device_);
    return memory.free_bytes >= memory.total_bytes / kSpareShare;
  }

  void run() {
    while (!ending_) {
      bool ready = false;
      {
        const Lock working(working_);
        ready = lends_ && attempt("this process does not lend its link now", [this] {
                  if (may_lend()) store_.pin_used([this] { return !lends_; });
                });
        link().lends = ready && may_lend() ? 1 : 0;
        failed_ = lends_ && !ready;
      }
      if (!StoreSockets::readable(offer_.file(), failed_ ? 50 * kUpkeep : kUpkeep)) continue;
      const LinkSocket borrower(StoreSockets::accept_link(offer_.file()));
      if (borrower.file() < 0) {
        if (!ending_) std::this_thread::sleep_for(kUpkeep);  // no descriptor is free, or it was another user's
        continue;
      }
      const Lock working(working_);
      const Lock lending(store_.lending);
      attempt("a borrower of this process's link does without it", [&]() REQUIRES(store_.lending) {
        if (may_lend()) serve(borrower);
      });
    }
  }
  // Copies what the borrower asks for, until it ends, or this process refuses.
  void serve(const LinkSocket& borrower) REQUIRES(store_.lending) {
    const OwnStream stream(driver_, device_);
    const std::size_t bytes = round_up(kLinkBytes, info_.granularity);
    DeviceRange buffer(driver_, device_, bytes);
    buffer.map(bytes, [&] { return driver_.create(device_, bytes, true); });
    const int file = driver_.export_handle(device_, *buffer.handle());
    StoreSockets::send_descriptor(borrower.file(), file);
    close(file);
    std::deque<std::pair<std::uint32_t, Recorded>> copies;  // by slot
    const Cleanup at_end([&] { finish(stream); });
    for (bool ended = false; lends_ && !ended;) {
      LinkAsks asks{};
      while (borrower.hear(asks, ended)) {
        if (copy(asks, buffer.address(), stream)) {
          copies.emplace_back(asks.slot, std::make_shared<RecordedEvent>(driver_, device_, stream));
        } else {
          borrower.say(LinkAnswer{asks.slot, 0});
        }
      }
      for (; !copies.empty() && copies.front().second->done(); copies.pop_front()) {
        borrower.say(LinkAnswer{copies.front().first, 1});
      }
      if (!copies.empty()) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      } else if (!ended) {
        (void)StoreSockets::readable(borrower.file(), std::chrono::milliseconds(1));
      }
    }
  }
  // Returns whether all parts are being copied.
  [[nodiscard]] bool copy(const LinkAsks& asks, Address buffer, Stream stream) REQUIRES(store_.lending) {
    std::size_t bytes = 0;
    if (asks.slot >= kLinkSlots) return false;
    for (std::size_t i = 0; i < std::min<std::size_t>(asks.parts, kPieces); ++i) {
      const void* const from = store_.pinned_at(asks.part[i]);
      if (from == nullptr || asks.part[i].bytes > kBlockBytes - bytes) return false;
      driver_.copy_to_device(device_, buffer + asks.slot * kBlockBytes + bytes, from, asks.part[i].bytes, stream);
      bytes += asks.part[i].bytes;
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
  const LinkSocket offer_;
  std::atomic<bool> lends_{false};
  std::atomic<bool> ending_{false};
  bool failed_ = false;
  Mutex working_ ACQUIRED_BEFORE(store_.lending);  // held while the thread uses the device or the store
  std::thread thread_;
};

// Owns the use of one link that another member lends. One thread.
class BorrowedLink {
 public:
  // Returns the links that members on other devices lend now, one of each device. What cannot be borrowed within
  // kPatience is left out. Throws context_lost.
  [[nodiscard]] static std::vector<std::unique_ptr<BorrowedLink>> all(Driver& driver, SharedStore& store, int device) {
    std::vector<std::unique_ptr<BorrowedLink>> links;
    attempt_unless_lost("no link is borrowed", [&] {
      const DeviceInfo info = driver.device_info(device);
      std::set<std::string> devices{info.uuid};
      const auto lends = [&](const SharedLayout::Link& link, const std::string& of) {
        return link.lends != 0 && devices.insert(of).second;
      };
      std::vector<std::unique_ptr<LinkSocket>> lenders;
      for (const std::uint32_t member : store.index().members_with(lends)) {
        lenders.push_back(std::make_unique<LinkSocket>(store.sockets().borrow_link(member)));
      }
      const auto until = std::chrono::steady_clock::now() + kPatience;
      for (auto& lender : lenders) {
        const auto left =
            std::max(std::chrono::steady_clock::duration::zero(), until - std::chrono::steady_clock::now());
        const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left);
        if (lender->file() < 0 || !StoreSockets::readable(lender->file(), ms)) continue;
        const int file = StoreSockets::receive_descriptor(lender->file());
        if (file < 0) continue;
        const Cleanup at_end([file] { close(file); });
        attempt_unless_lost("a link is not borrowed", [&] {
          links.push_back(std::make_unique<BorrowedLink>(driver, device, std::move(lender), file, info.granularity));
        });
      }
    });
    return links;
  }
  // Throws driver errors.
  BorrowedLink(Driver& driver, int device, std::unique_ptr<LinkSocket> lender, int file, std::size_t granularity)
      : lender_(std::move(lender)), buffer_(driver, device, round_up(kLinkBytes, granularity)) {
    const std::size_t bytes = round_up(kLinkBytes, granularity);
    buffer_.map(bytes, [&] { return driver.import_handle(device, file, bytes); });
  }
  // Only while nothing uses the buffer.
  ~BorrowedLink() {
    attempt("the buffer of a borrowed link stays mapped", [this] { buffer_.close(); });
  }

  [[nodiscard]] Address address(std::size_t slot) const { return buffer_.address() + slot * kBlockBytes; }
  // Asks for content of the store, at most a block, to be copied to a slot.
  void ask(std::size_t slot, const std::vector<SharedStore::Part>& parts) const {
    LinkAsks asks{static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(parts.size()), {}};
    std::copy(parts.begin(), parts.end(), asks.part);
    lender_->say(asks);
  }
  // Returns the next answer, if there is one now; `ended` if there will be none.
  [[nodiscard]] std::optional<LinkAnswer> answer(bool& ended) const {
    LinkAnswer answer{};
    return lender_->hear(answer, ended) ? std::optional(answer) : std::nullopt;
  }

 private:
  static constexpr std::chrono::milliseconds kPatience{50};

  const std::unique_ptr<LinkSocket> lender_;
  DeviceRange buffer_;
};

}  // namespace memsaver
