#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "driver/faulty.hpp"
#include "driver/host.hpp"
#include "ledger_driver.hpp"
#include "vmm/saver.hpp"

namespace memsaver {

inline constexpr std::size_t kPage = 4096;

// A saver on a faulty driver on a ledger, and a model of what must be in its memory: page by page, what was written
// there, zeros, or anything.
class World {
 public:
  struct Options {
    int devices = 1;
    Settings settings;
    std::size_t capacity = std::size_t{4} << 20;
  };

  // Thousands of small files: not on a disk.
  static inline std::string file_folder = "/dev/shm";

  explicit World(const Options& options) {
    auto ledger_driver = std::make_unique<LedgerDriver>(
        open_host_driver(std::vector<std::string>(static_cast<std::size_t>(options.devices)), options.capacity));
    ledger = ledger_driver.get();
    ledger->report_to(&end_report_);
    auto faulty_driver = std::make_unique<FaultyDriver>(std::move(ledger_driver));
    faulty = faulty_driver.get();
    Settings settings = options.settings;
    settings.file_folder = file_folder;
    saver = std::make_unique<Saver>(std::move(faulty_driver), settings);
    devices_ = options.devices;
  }

  // Allocates and writes content that is different for each allocation. Returns its number.
  std::size_t allocate(const std::string& tag, Restore restore, std::size_t pages, int device = 0) {
    const std::size_t bytes = pages * kPage;
    const Address address = saver->allocate({device, tag, restore}, bytes);
    memories_.push_back({address, tag, restore, ++seeds_, std::vector<Expect>(pages, Expect::written),
                         std::vector<unsigned>(pages, 0), true});
    for (std::size_t page = 0; page < pages; ++page) write(memories_.back(), page);
    return memories_.size() - 1;
  }
  void free(std::size_t number) {
    if (!memories_[number].alive) return;
    saver->free(memories_[number].address);
    memories_[number].alive = false;
  }
  // Writes other content, as an engine at work does.
  void rewrite(std::size_t number, std::size_t first_page, std::size_t pages) {
    for (std::size_t page = first_page; page < first_page + pages; ++page) write(memories_[number], page);
  }
  void write_zeros(std::size_t number) {
    Memory& memory = memories_[number];
    std::memset(reinterpret_cast<void*>(memory.address), 0, memory.pages.size() * kPage);
    memory.pages.assign(memory.pages.size(), Expect::zeros);
  }
  // Content of these pages is not worth keeping at the next releases.
  void mark_dead(std::size_t number, std::size_t first_page, std::size_t pages) {
    dead_.push_back({memories_[number].address + first_page * kPage, pages * kPage});
  }

  void release(const Saver::Tags& tags = {}, const std::map<std::string, Restore>& overrides = {}) {
    const auto before = mapped_pages();
    const auto settle = [&] {
      const auto after = mapped_pages();
      for (auto& memory : memories_) {
        const auto override_ = overrides.find(memory.tag);
        const Restore restore = override_ == overrides.end() ? memory.restore : override_->second;
        for (std::size_t page = 0; page < memory.pages.size(); ++page) {
          const Address address = memory.address + page * kPage;
          if (before.count(address) == 0 || after.count(address) != 0) continue;
          if (restore == Restore::zero) memory.pages[page] = Expect::zeros;
          if (restore == Restore::discard || is_dead(address)) memory.pages[page] = Expect::anything;
        }
      }
    };
    try {
      saver->release(tags, dead_, overrides);
    } catch (...) {
      settle();
      throw;
    }
    settle();
    const auto here = mapped_pages();
    for (const auto& memory : memories_) {
      if (!memory.alive || !selected(tags, memory.tag)) continue;
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        if (here.count(memory.address + page * kPage) != 0) report("released memory is still mapped", memory, page);
      }
    }
  }
  void resume(const Saver::Tags& tags = {}) {
    const auto before = mapped_pages();
    try {
      saver->resume(tags);
    } catch (...) {
      if (faulty->failures() > 0 && mapped_pages() != before && saver->status().failure.empty() && !undo_may_fail) {
        problems.push_back("a failed resume was not undone");
      }
      throw;
    }
    const auto here = mapped_pages();
    for (const auto& memory : memories_) {
      if (!memory.alive || !selected(tags, memory.tag)) continue;
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        if (here.count(memory.address + page * kPage) == 0) report("resumed memory is not mapped", memory, page);
      }
    }
  }

  // The invariants of the design, on the saver's own structures, the ledger's account and the content of every page.
  void check() {
    for (const auto& misuse : ledger->misuses()) problems.push_back("misuse of the driver: " + misuse);
    if (ledger->pending() != 0) problems.push_back("work is still under way on the device");
    if (ledger->events() != 0) problems.push_back("events were not recycled");
    for (auto& problem : saver->audit({})) problems.push_back(std::move(problem));
    const SaverStatus status = saver->status();
    if (status.state == "releasing" || status.state == "resuming") problems.push_back("it is still " + status.state);
    for (int device = 0; device < devices_; ++device) {
      const MemoryInfo memory = ledger->memory_info(device);
      if (memory.total_bytes - memory.free_bytes != ledger->created_bytes(device)) {
        problems.push_back("the device's own count is not what was created");
      }
    }
    if (undo_may_fail) return;  // what was not undone is mapped, but holds nothing yet
    const auto here = mapped_pages();
    for (const auto& memory : memories_) {
      if (!memory.alive) continue;
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        const Address address = memory.address + page * kPage;
        if (here.count(address) == 0) continue;
        const auto* const data = reinterpret_cast<const unsigned char*>(address);
        bool right = true;
        if (memory.pages[page] == Expect::zeros) right = std::all_of(data, data + kPage, [](auto c) { return c == 0; });
        if (memory.pages[page] == Expect::written) right = std::memcmp(data, pattern(memory, page).data(), kPage) == 0;
        if (!right) report(memory.pages[page] == Expect::zeros ? "zeros are owed" : "content is lost", memory, page);
      }
    }
  }

  // Frees everything, takes the saver down and checks that nothing is left.
  void end(bool context_lost) {
    if (!context_lost) {
      for (std::size_t number = 0; number < memories_.size(); ++number) free(number);
      saver->release({}, {}, {});  // what a failed free left, and what a failed release did
      check();
      const SaverStatus status = saver->status();
      for (int device = 0; device < devices_; ++device) {
        if (ledger->created_bytes(device) != 0) problems.push_back("device memory is left after everything was freed");
      }
      if (status.pool.used_bytes != 0) problems.push_back("host memory is left after everything was freed");
      if (status.file_bytes != 0) problems.push_back("file space is left after everything was freed");
    }
    saver.reset();
    if (!context_lost) problems.insert(problems.end(), end_report_.begin(), end_report_.end());
  }

  std::unique_ptr<Saver> saver;
  FaultyDriver* faulty = nullptr;
  LedgerDriver* ledger = nullptr;
  bool undo_may_fail = false;  // a failure of the undo is planned too
  std::vector<std::string> problems;

 private:
  enum class Expect : unsigned char { written, zeros, anything };
  struct Memory {
    Address address;
    std::string tag;
    Restore restore;
    unsigned seed;
    std::vector<Expect> pages;
    std::vector<unsigned> versions;
    bool alive;
  };

  static bool selected(const Saver::Tags& tags, const std::string& tag) {
    return tags.empty() || std::find(tags.begin(), tags.end(), tag) != tags.end();
  }
  static std::vector<unsigned char> pattern(const Memory& memory, std::size_t page) {
    std::vector<unsigned char> content(kPage);
    std::uint64_t state = (memory.seed * 1009u + memory.versions[page]) * 1000003u + page + 1;
    for (std::size_t at = 0; at < kPage; at += 8) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      std::memcpy(content.data() + at, &state, 8);
    }
    return content;
  }
  void write(Memory& memory, std::size_t page) {
    ++memory.versions[page];
    const auto content = pattern(memory, page);
    std::memcpy(reinterpret_cast<void*>(memory.address + page * kPage), content.data(), kPage);
    memory.pages[page] = Expect::written;
  }
  [[nodiscard]] std::set<Address> mapped_pages() const {
    std::set<Address> pages;
    for (const auto& [address, mapping] : ledger->mappings()) {
      if (!mapping.accessible) continue;
      for (std::size_t at = 0; at < mapping.bytes; at += kPage) pages.insert(pages.end(), address + at);
    }
    return pages;
  }
  [[nodiscard]] bool is_dead(Address address) const {
    return std::any_of(dead_.begin(), dead_.end(), [&](const auto& range) {
      return address >= range.begin && address < range.begin + range.bytes;
    });
  }
  void report(const std::string& what, const Memory& memory, std::size_t page) {
    problems.push_back(what + ": tag '" + memory.tag + "', " + name_of(memory.restore) + ", page " +
                       std::to_string(page) + " of " + std::to_string(memory.pages.size()));
  }

  std::vector<std::string> end_report_;
  std::vector<Memory> memories_;
  std::vector<RangeSet::Range> dead_;
  unsigned seeds_ = 0;
  int devices_ = 0;
};

}  // namespace memsaver
