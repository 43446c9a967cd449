#pragma once

#include "backup/shared_store.hpp"

namespace memsaver {

// A process whose device is idle lends its link to another member of its store, for the time of one restore: it copies
// content of the store to a buffer on its device, from which the borrower takes it (over NVLink, between GPUs that have
// it). So content comes over several links at once. The buffer has a slot for each block under way.

inline const std::size_t kLinkBytes = SharedLayout::Link::kSlots * kBlockBytes;

// Owns the thread of a member that lends the link of its device. Any thread may call any function.
class LinkLender {
 public:
  // `idle` returns whether the device has no memory of this process that an engine uses.
  LinkLender(Driver& driver, SharedStore& store, int device, std::function<bool()> idle)
      : driver_(driver),
        store_(store),
        device_(device),
        idle_(std::move(idle)),
        offer_(store.sockets().offer_link(store.index().member())) {
    if (offer_ < 0) return;
    const std::string uuid = driver_.device_info(device_).uuid;
    std::strncpy(link().device, uuid.c_str(), sizeof link().device - 1);
    auto thread = sys::start_thread([this] { run(); });
    if (thread) thread_ = std::move(*thread);
  }
  // Does nothing in a forked child, which has no thread.
  ~LinkLender() {
    if (getpid() != process_) {
      if (thread_.joinable()) thread_.detach();
      return;
    }
    refuse();
    ending_ = true;
    if (offer_ >= 0) shutdown(offer_, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    if (offer_ >= 0) close(offer_);
  }
  void lend() { lends_ = true; }
  // Stops lending, and returns once nothing of it is left on the device.
  void refuse() EXCLUDES(session_) {
    lends_ = false;
    const Lock no_session(session_);
  }

 private:
  using Link = SharedLayout::Link;
  static constexpr std::chrono::milliseconds kUpkeep{200};  // how soon new content of the store is pinned
  static constexpr std::chrono::milliseconds kPause{1};

  [[nodiscard]] Link& link() const { return store_.index().link(); }

  void run() {
    bool lent = false;
    while (!ending_) {
      const bool ready =
          lends_ && idle_() && attempt("this process does not lend its link now", [this] { store_.pin_used(); });
      if (ready || lent) attempt("memory of the shared store stays mapped", [this] { store_.unmap_empty(); });
      lent = lent || ready;
      link().lends = ready ? 1 : 0;
      const int borrower = StoreSockets::accept_link(offer_, kUpkeep);
      if (borrower < 0) continue;
      const Lock session(session_);
      if (lends_ && idle_())
        attempt("a borrower of this process's link does without it", [&]() REQUIRES(session_) { serve(borrower); });
      close(borrower);
    }
    link().lends = 0;
  }
  // Copies what the borrower asks for, until it closes the connection or this process refuses.
  void serve(int borrower) REQUIRES(session_) {
    const OwnStream stream(driver_, device_);
    const std::size_t bytes = round_up(kLinkBytes, driver_.device_info(device_).granularity);
    DeviceRange buffer(driver_, device_, bytes);
    buffer.map(bytes, [&] { return driver_.create(device_, bytes, true); });
    for (auto& slot : link().slots) slot.state = Link::Slot::free;
    const int file = driver_.export_handle(device_, *buffer.handle());
    StoreSockets::send_descriptor(borrower, file);
    close(file);
    std::deque<std::pair<Link::Slot*, RecordedEvent>> copies;
    const Cleanup at_end(
        [&] { attempt("a lent link is still in use", [&] { RecordedEvent(driver_, device_, stream).wait(); }); });
    while (lends_) {
      const std::uint32_t seen = link().asked;
      for (std::size_t i = 0; i < Link::kSlots; ++i) {
        Link::Slot& slot = link().slots[i];
        if (slot.state != Link::Slot::asked) continue;
        slot.state = Link::Slot::taken;
        if (copy(slot, buffer.address() + i * kBlockBytes, stream)) {
          copies.emplace_back(std::piecewise_construct, std::tuple(&slot),
                              std::tuple(std::ref(driver_), device_, Stream(stream)));
        } else {
          slot.state = Link::Slot::refused;
        }
      }
      while (!copies.empty() && copies.front().second.done()) {
        copies.front().first->state = Link::Slot::there;
        copies.pop_front();
      }
      if (!copies.empty()) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      } else {
        if (StoreSockets::readable(borrower, std::chrono::milliseconds(0))) return;  // it has closed its end
        wait(link().asked, seen);
      }
    }
  }
  // Returns whether all parts of a slot are being copied.
  [[nodiscard]] bool copy(const Link::Slot& slot, Address to, Stream stream) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < std::min<std::size_t>(slot.parts, kPieces); ++i) {
      const Link::Part part = slot.part[i];
      const void* const from = store_.pinned_at(part);
      if (from == nullptr || part.bytes > kBlockBytes - bytes) return false;
      driver_.copy_to_device(device_, to + bytes, from, part.bytes, stream);
      bytes += part.bytes;
    }
    return true;
  }
  static void wait(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
    const timespec time{0, std::chrono::nanoseconds(kPause).count()};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
  }

  const pid_t process_ = getpid();
  Driver& driver_;
  SharedStore& store_;
  const int device_;
  const std::function<bool()> idle_;
  const int offer_;
  std::atomic<bool> lends_{false};
  std::atomic<bool> ending_{false};
  Mutex session_;  // held while a borrower is served
  std::thread thread_;
};

// Owns the use of one link that another member lends. One thread.
class BorrowedLink {
 public:
  using Slot = SharedLayout::Link::Slot;

  // Returns the links that members on other devices lend now. What cannot be borrowed is left out.
  [[nodiscard]] static std::vector<std::unique_ptr<BorrowedLink>> all(Driver& driver, SharedStore& store, int device) {
    std::vector<std::unique_ptr<BorrowedLink>> links;
    const DeviceInfo info = driver.device_info(device);
    for (const auto& [member, link] : store.index().lent_links(info.uuid)) {
      const auto [connection, file] = store.sockets().borrow_link(member, kPatience);
      if (file < 0) continue;
      const Cleanup at_end([file = file] { close(file); });
      attempt_unless_lost("a link is not borrowed", [&, link = link, connection = connection, file = file] {
        links.push_back(std::make_unique<BorrowedLink>(driver, device, *link, connection, file, info.granularity));
      });
    }
    return links;
  }
  // Owns `connection`. Throws driver errors.
  BorrowedLink(Driver& driver, int device, SharedLayout::Link& link, int connection, int file, std::size_t granularity)
      : connection_(connection), link_(link), buffer_(driver, device, round_up(kLinkBytes, granularity)) {
    Cleanup undo([this] { close(connection_); });
    const std::size_t bytes = round_up(kLinkBytes, granularity);
    buffer_.map(bytes, [&] { return driver.import_handle(device, file, bytes); });
    undo.dismiss();
  }
  // Returns once the lender has given the buffer back, or after kPatience.
  ~BorrowedLink() {
    attempt("the buffer of a borrowed link stays mapped", [this] { buffer_.close(); });
    shutdown(connection_, SHUT_WR);
    wake();
    (void)StoreSockets::readable(connection_, kPatience);
    close(connection_);
  }

  [[nodiscard]] Address address(std::size_t slot) const { return buffer_.address() + slot * kBlockBytes; }
  [[nodiscard]] std::uint32_t state(std::size_t slot) const { return link_.slots[slot].state; }
  // Asks for content of the store, at most a block, to be copied to a slot, which is free.
  void ask(std::size_t slot, const std::vector<SharedLayout::Link::Part>& parts) {
    Slot& to = link_.slots[slot];
    to.parts = static_cast<std::uint32_t>(parts.size());
    std::copy(parts.begin(), parts.end(), to.part);
    to.state = Slot::asked;
    wake();
  }
  void give(std::size_t slot) { link_.slots[slot].state = Slot::free; }
  // Returns whether the lender has stopped: slots that it has not filled stay so.
  [[nodiscard]] bool ended() const { return StoreSockets::readable(connection_, std::chrono::milliseconds(0)); }

 private:
  static constexpr std::chrono::milliseconds kPatience{100};

  void wake() {
    ++link_.asked;
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&link_.asked), FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

  const int connection_;
  SharedLayout::Link& link_;
  DeviceRange buffer_;
};

}  // namespace memsaver
