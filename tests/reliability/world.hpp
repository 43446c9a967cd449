#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "audit.hpp"
#include "driver/driver.hpp"
#include "faults/faulty_driver.hpp"
#include "ledger_driver.hpp"
#include "support/cleanup.hpp"
#include "vmm/rewrite.hpp"
#include "vmm/saver.hpp"
#include "vmm/shared_buffer.hpp"

namespace memsaver {

inline constexpr std::size_t kPage = 4096;

// A saver on a faulty driver on a ledger, and a model of its memory: for each page the content written there, zeros, or
// undefined.
class World {
 public:
  struct Options {
    int devices = 1;
    Settings settings;
    std::size_t capacity = std::size_t{4} << 20;
    bool digests = true;   // the device has them
    bool weights = false;  // the content is like weights in bfloat16, and can be packed
  };

  // In memory, because there are thousands of small files.
  static inline std::string file_folder = "/dev/shm";
  static inline std::string other_folder = "/dev/shm";

  explicit World(const Options& options) {
    std::vector<std::string> names(static_cast<std::size_t>(options.devices));
    auto ledger_driver = std::make_unique<LedgerDriver>(open_host_driver(names, options.capacity), options.digests);
    ledger = ledger_driver.get();
    ledger->report_to(&report_);
    auto faulty_driver = std::make_unique<FaultyDriver>(std::move(ledger_driver));
    faulty = faulty_driver.get();
    settings_ = options.settings;
    settings_.file_folder = file_folder;
    // Far more than there is to keep, and not asked of the control groups for each of thousands of worlds.
    if (settings_.host_backup_limit == 0) settings_.host_backup_limit = std::size_t{64} << 20;
    saver = std::make_unique<Saver>(std::move(faulty_driver), settings_);
    devices_ = options.devices;
    weights_ = options.weights;
  }

  // Allocates, and writes content that differs for each allocation. Returns its number.
  std::size_t allocate(const std::string& tag, Restore restore, std::size_t pages, int device = 0,
                       std::size_t chunk_pages = 0) {
    const std::size_t bytes = pages * kPage;
    concerned_ = {tag};
    const Address address = saver->allocate({device, tag, restore, chunk_pages * kPage}, bytes);
    for (std::size_t page = 0; page < pages; ++page) shrunk_.erase(address + page * kPage);
    memories_.push_back({address, tag, restore, ++seeds_, std::vector<Expect>(pages, Expect::written),
                         std::vector<unsigned>(pages, 0)});
    for (std::size_t page = 0; page < pages; ++page) write(memories_.back(), page);
    return memories_.size() - 1;
  }
  void free(std::size_t number) {
    if (!memories_[number].alive) return;
    saver->free(memories_[number].address);
    memories_[number].alive = false;
  }
  // Writes other content, as a running engine does.
  void rewrite(std::size_t number, std::size_t first_page, std::size_t pages) {
    for (std::size_t page = first_page; page < first_page + pages; ++page) write(memories_[number], page);
  }
  void rewrite_what_is_here() {
    const auto here = mapped_pages(true);
    for (auto& memory : memories_) {
      for (std::size_t page = 0; memory.alive && page < memory.pages.size(); ++page) {
        if (here.count(memory.address + page * kPage) != 0) write(memory, page);
      }
    }
  }
  // Writes other content, in pages from the second on, into what a resume of released allocations brings back.
  void write_asleep(const std::vector<std::size_t>& numbers) {
    concerned_.clear();
    const std::vector<Memory> before = memories_;
    std::vector<NewContent> contents;
    const Cleanup at_end([&] {
      for (std::size_t i = 0; i < contents.size(); ++i) {
        munmap(reinterpret_cast<void*>(contents[i].second), memories_[numbers[i]].pages.size() * kPage);
      }
    });
    try {
      for (const std::size_t number : numbers) {
        Memory& memory = memories_[number];
        concerned_.insert(memory.tag);
        const std::size_t bytes = memory.pages.size() * kPage;
        void* const content = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        contents.emplace_back(memory.address, reinterpret_cast<std::uintptr_t>(content));
        if (saver->backup_of(memory.address, bytes, content).kept != Kept::host) problems.push_back("nothing is kept");
        for (std::size_t page = 1; page < memory.pages.size(); ++page) {
          write(memory, page, contents.back().second + page * kPage);
        }
      }
      Rewrite rewrite(*saver, contents);
      rewrite.commit();
    } catch (...) {
      memories_ = before;
      throw;
    }
  }
  // Frees a released allocation whose content is in the shared store, and unmaps what this process uses no more of it.
  void leave_in_store(std::size_t number) {
    for (const auto& [address, bytes, blocks] : saver->saved(memories_[number].tag)) {
      if (address == memories_[number].address) in_store_ = blocks;
    }
    free(number);
    ledger->allow_unpinned_copies();  // if memory cannot be pinned, what is to be brought in is copied all the same
    saver->trim_backup_memory();
    saver->wait_until_prepared();
  }
  // Brings it in from there, released, unless it is.
  void take_from_store(std::size_t number) {
    Memory& memory = memories_[number];
    concerned_ = {memory.tag};
    if (memory.alive) return;
    memory.address = saver->adopt({0, memory.tag, memory.restore, 0}, memory.pages.size() * kPage, in_store_);
    memory.alive = true;
  }
  void write_zeros(std::size_t number) {
    Memory& memory = memories_[number];
    std::memset(reinterpret_cast<void*>(memory.address), 0, memory.pages.size() * kPage);
    memory.pages.assign(memory.pages.size(), Expect::zeros);
  }
  // The next releases need not keep the content of these pages.
  void mark_dead(std::size_t number, std::size_t first_page, std::size_t pages) {
    dead_.push_back({memories_[number].address + first_page * kPage, pages * kPage});
  }
  void mark_nothing_dead() { dead_.clear(); }

  void release(const Saver::Tags& tags = {}, const std::map<std::string, Restore>& overrides = {}) {
    const auto before = mapped_pages(true);
    note_concerned(tags, before, true);
    try {
      saver->release(tags, dead_, overrides);
    } catch (...) {
      note_released(tags, overrides, before, false);
      check_undone(before);
      throw;
    }
    note_released(tags, overrides, before, true);
    const auto here = mapped_pages();
    for (const auto& memory : memories_) {
      if (!memory.alive || !selected(tags, memory.tag)) continue;
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        if (here.count(memory.address + page * kPage) != 0) report("released memory is still mapped", memory, page);
      }
    }
    for (const int device : saver->devices()) {
      if (faulty->failures() > 0 || ledger->created_bytes(device) > 0 || ledger->stack_limit(device) == 16) continue;
      problems.push_back("stacks are held on a device without memory");
    }
  }
  void resume(const Saver::Tags& tags = {}) {
    const auto before = mapped_pages(true);
    const auto before_but_held = mapped_pages();
    note_concerned(tags, before, false);
    try {
      saver->resume(tags);
    } catch (const Error& error) {
      for (auto& memory : memories_) {
        if (error.kind == ErrorKind::backup && selected(tags, memory.tag)) memory.unreadable = true;
      }
      if (faulty->failures() > 0 && mapped_pages() != before_but_held && saver->status().failure.empty() &&
          !undo_may_fail) {
        problems.push_back("a failed resume was not undone");
      }
      for (const Address address : mapped_pages(true)) {
        if (before.count(address) == 0) not_undone_.insert(address);
      }
      throw;
    }
    for (const auto& memory : memories_) {
      if (!selected(tags, memory.tag)) continue;
      for (std::size_t page = 0; page < memory.pages.size(); ++page) not_undone_.erase(memory.address + page * kPage);
    }
    if (!saver->status().reserved_by_device.empty()) problems.push_back("memory is reserved after a resume");
    const auto here = mapped_pages(true);
    for (const auto& [address, mapping] : ledger->mappings()) {
      if (before.count(address) != 0 || ledger->stack_limit(mapping.device) == 1024) continue;
      problems.push_back("the stacks of a device that has its memory again are not as before");
    }
    for (const auto& memory : memories_) {
      if (!memory.alive || !selected(tags, memory.tag)) continue;
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        const Address address = memory.address + page * kPage;
        const bool expected = shrunk_.count(address) == 0;
        if (expected != (here.count(address) != 0)) {
          report(expected ? "resumed memory is not mapped" : "a resume mapped what a resize gave back", memory, page);
        }
      }
    }
  }

  // Keeps this part of each allocation of a tag, without its first pages; pages and chunks must fit.
  void resize(const std::string& tag, double kept, std::size_t without_first = 0) {
    const auto before = mapped_pages(true);
    concerned_ = {tag};
    std::vector<RangeSet::Range> unused;
    for (const auto& memory : memories_) {
      if (memory.alive && memory.tag == tag) unused.push_back({memory.address, without_first * kPage});
    }
    const bool asleep = std::none_of(memories_.begin(), memories_.end(), [&](const Memory& memory) {
      return memory.alive && memory.tag == tag && before.count(memory.address + without_first * kPage) != 0;
    });
    bool done = false;
    const Cleanup at_end([&] {
      if (!asleep) return note_resized(tag, kept, without_first, before, done);
      if (done) note_divided(tag, kept, without_first);
    });
    saver->resize(tag, unused, kept);
    done = true;
  }

  void reserve(const Saver::Tags& tags = {}) {
    note_concerned(tags, mapped_pages(true), false);
    try {
      saver->reserve(tags);
    } catch (...) {
      if (!saver->status().reserved_by_device.empty()) problems.push_back("a failed reservation holds memory");
      throw;
    }
  }

  void prepare_backup() {
    note_concerned({}, mapped_pages(), true);
    saver->prepare_backup();
    saver->wait_until_prepared();
  }
  // The backup of released memory, as users read it.
  void read_backups() {
    const auto here = mapped_pages();
    for (const auto& memory : memories_) {
      if (!memory.alive) continue;
      concerned_ = {memory.tag};
      std::vector<unsigned char> content(memory.pages.size() * kPage);
      const BackupView view = saver->backup_of(memory.address, content.size(), content.data());
      if (view.tag != memory.tag) problems.push_back("a backup is reported under another tag: " + view.tag);
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        if (here.count(memory.address + page * kPage) != 0) continue;
        if (!view.released) report("released memory is reported as resident", memory, page);
        if (view.kept == Kept::host) {
          if (!is_right(memory, page, content.data() + page * kPage)) report("a backup is wrong", memory, page);
        } else if (memory.restore == Restore::host) {
          report("content is reported as not kept in host memory", memory, page);
        }
      }
    }
  }
  // Changes the backup of each page of a released allocation.
  void damage_backup(std::size_t number) {
    Memory& memory = memories_[number];
    memory.damaged = true;
    if (memory.restore == Restore::file) return damage_files();
    for (std::size_t page = 0; page < memory.pages.size(); ++page) {
      const void* const kept = saver->backup_of(memory.address + page * kPage, kPage, nullptr).memory;
      ++*static_cast<unsigned char*>(const_cast<void*>(kept));
    }
  }

  // Two buffers of one memory, the second an import of the first; made unless they are there.
  void share(std::size_t pages) {
    concerned_.clear();
    ledger->allow_unpinned_copies();
    sharing_ = true;
    const Cleanup at_end(
        [this] { rests_may_stay_ = rests_may_stay_ || ((undo_may_fail || fails_for_good) && !imported); });
    if (!shared) {
      shared = std::make_unique<SharedBuffer>(*saver, 0, pages * kPage);
      const std::string content(reinterpret_cast<const char*>(shared->address()), shared->bytes());
      if (content.find_first_not_of('\0') != std::string::npos) problems.push_back("a shared buffer is not zeros");
      std::memset(reinterpret_cast<void*>(shared->address()), 0x3c, shared->bytes());
    }
    if (!imported)
      with_export([&](int file) { imported = std::make_unique<ImportedBuffer>(*saver, file, shared->bytes(), 0); });
    check_shared();
  }
  void take_shared_away() {
    imported->drop();
    shared->release();
    if (ledger->created_bytes(0) != 0) problems.push_back("a shared buffer was not released");
  }
  void bring_shared_back() {
    shared->restore();
    if (!imported->mapped()) with_export([&](int file) { imported->map_again(file); });
    check_shared();
  }

  // Some of the backups of a tag must be packed.
  void check_packed(const std::string& tag) {
    for (const auto& each : saver->status().tags) {
      if (each.tag == tag && each.kept_bytes >= each.backed_up_bytes) problems.push_back("nothing was packed: " + tag);
    }
  }
  // Where the backups must lie now, in pages.
  void check_kept(std::size_t host_pages, std::size_t file_pages) {
    const SaverStatus status = saver->status();
    const auto compare = [&](const char* what, std::size_t bytes, std::size_t pages) {
      if (bytes == pages * kPage) return;
      problems.push_back(std::string("backups use ") + std::to_string(bytes / kPage) + " pages of " + what + ", not " +
                         std::to_string(pages));
    };
    compare("host memory", status.pool.used_bytes, host_pages);
    compare("the file", status.file_bytes, file_pages);
  }
  [[nodiscard]] std::size_t released_pages(Restore restore) const {
    std::size_t sum = 0;
    for (const auto& memory : memories_) {
      if (!memory.alive || memory.restore != restore) continue;
      const std::size_t pages = memory.pages.size();
      if (saver->backup_of(memory.address, pages * kPage, nullptr).released) sum += pages;
    }
    return sum;
  }
  // The tags that the last call changed.
  [[nodiscard]] const std::set<std::string>& concerned() const { return concerned_; }

  // Checks the invariants on the saver's structures, the ledger's record and the content of every page.
  void check() {
    for (const auto& misuse : ledger->misuses()) problems.push_back("misuse of the driver: " + misuse);
    if (ledger->pending() != 0 && !(sharing_ && undo_may_fail))
      problems.push_back("work is still under way on the device");
    if (ledger->events() != 0) problems.push_back("events were not recycled");
    for (auto& problem : audit(*saver)) problems.push_back(std::move(problem));
    const SaverStatus status = saver->status();
    if (status.pool.capacity_bytes > settings_.host_backup_limit + static_cast<std::size_t>(devices_) * kBlockBytes) {
      problems.push_back("more host memory is pinned than the limit and one block for each device: " +
                         std::to_string(status.pool.capacity_bytes) + " bytes");
    }
    if (status.state == "releasing" || status.state == "resuming") problems.push_back("it is still " + status.state);
    for (int device = 0; device < devices_; ++device) {
      const MemoryInfo memory = ledger->memory_info(device);
      if (memory.total_bytes - memory.free_bytes != ledger->created_bytes(device)) {
        problems.push_back("the device's own count is not what was created");
      }
    }
    const auto here = mapped_pages();
    for (const auto& memory : memories_) {
      if (!memory.alive) continue;
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        const Address address = memory.address + page * kPage;
        if (here.count(address) == 0) continue;
        if (is_right(memory, page, reinterpret_cast<const unsigned char*>(address))) continue;
        report(memory.pages[page] == Expect::zeros ? "zeros are missing" : "content is lost", memory, page);
      }
    }
  }

  // Their content, seen by both.
  void check_shared() {
    for (const Address address : {shared->address(), imported->address()}) {
      const std::string content(reinterpret_cast<const char*>(address), shared->bytes());
      if (content.find_first_not_of('\x3c') != std::string::npos) problems.push_back("a shared buffer lost content");
    }
  }

  // Frees everything, destroys the saver and checks that nothing remains.
  void end(bool context_lost) {
    imported.reset();
    shared.reset();
    if (!context_lost) {
      saver->give_back_reserved();
      for (std::size_t number = 0; number < memories_.size(); ++number) free(number);
      saver->release({}, {}, {});  // what a failed free left, and what a failed release did
      check();
      const SaverStatus status = saver->status();
      for (int device = 0; device < devices_ && !rests_may_stay_; ++device) {
        if (ledger->created_bytes(device) != 0) problems.push_back("device memory is left after everything was freed");
      }
      if (status.pool.used_bytes != 0) problems.push_back("host memory is left after everything was freed");
      if (status.file_bytes != 0) problems.push_back("file space is left after everything was freed");
    }
    for (const auto& [what, count] : take_down()) {
      const bool kept = rests_may_stay_ || (what == std::string("streams") && (streams_may_stay || sharing_));
      if (!context_lost && !kept) problems.push_back("left behind: " + std::to_string(count) + " " + what);
    }
  }
  // Destroys the saver. Returns what remains, by kind.
  std::map<std::string, std::size_t> take_down() {
    faulty = nullptr;
    ledger = nullptr;
    saver.reset();
    for (const auto& misuse : report_.misuses) problems.push_back("misuse of the driver: " + misuse);
    return report_.left_behind;
  }

  std::unique_ptr<Saver> saver;
  std::unique_ptr<SharedBuffer> shared;
  std::unique_ptr<ImportedBuffer> imported;
  FaultyDriver* faulty = nullptr;
  LedgerDriver* ledger = nullptr;
  bool undo_may_fail = false;     // a failure of the undo is planned too
  bool fails_for_good = false;    // a call is made to fail ever again
  bool streams_may_stay = false;  // one that the driver did not destroy stays to the end
  std::vector<std::string> problems;

 private:
  enum class Expect : unsigned char { written, zeros, written_or_zeros, anything };
  struct Memory {
    Address address;
    std::string tag;
    Restore restore;
    unsigned seed;
    std::vector<Expect> pages;
    std::vector<unsigned> versions;
    bool alive = true;
    bool damaged = false;     // its backup is
    bool unreadable = false;  // so it seemed to the last resume
  };

  void with_export(const std::function<void(int)>& use) const {
    const int file = shared->export_fd();
    const Cleanup at_end([file] { close(file); });
    use(file);
  }
  static bool selected(const Saver::Tags& tags, const std::string& tag) {
    return tags.empty() || std::find(tags.begin(), tags.end(), tag) != tags.end();
  }
  [[nodiscard]] std::vector<unsigned char> pattern(const Memory& memory, std::size_t page) const {
    std::vector<unsigned char> content(kPage);
    std::uint64_t state = (memory.seed * 1009u + memory.versions[page]) * 1000003u + page + 1;
    for (std::size_t at = 0; at < kPage; at += 8) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      const std::uint64_t weights = (state & 0x81ff81ff81ff81ff) | 0x3c003c003c003c00;  // four exponents
      std::memcpy(content.data() + at, weights_ ? &weights : &state, 8);
    }
    return content;
  }
  [[nodiscard]] bool is_right(const Memory& memory, std::size_t page, const unsigned char* data) const {
    const Expect expect = memory.pages[page];
    if (expect == Expect::anything) return true;
    const bool zeros = std::all_of(data, data + kPage, [](auto c) { return c == 0; });
    if (expect == Expect::zeros || (expect == Expect::written_or_zeros && zeros)) return zeros;
    return std::memcmp(data, pattern(memory, page).data(), kPage) == 0;
  }
  void write(Memory& memory, std::size_t page) { write(memory, page, memory.address + page * kPage); }
  void write(Memory& memory, std::size_t page, std::uintptr_t at) {
    ++memory.versions[page];
    const auto content = pattern(memory, page);
    std::memcpy(reinterpret_cast<void*>(at), content.data(), kPage);
    memory.pages[page] = Expect::written;
  }
  // Those that are resident: not what a failed resume left mapped, and only if `held` what the driver does not let go
  // of.
  [[nodiscard]] std::set<Address> mapped_pages(bool held = false) const {
    std::set<Address> pages;
    for (const auto& [address, mapping] : ledger->mappings()) {
      if (!mapping.accessible || (!held && ledger->is_stuck(address))) continue;
      for (std::size_t at = 0; at < mapping.bytes; at += kPage) pages.insert(pages.end(), address + at);
    }
    for (const Address address : not_undone_) pages.erase(address);
    return pages;
  }
  void note_concerned(const Saver::Tags& tags, const std::set<Address>& here, bool mapped) {
    concerned_.clear();
    std::set<std::string> all;
    for (const auto& memory : memories_) {
      if (!memory.alive || !selected(tags, memory.tag)) continue;
      all.insert(memory.tag);
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        if ((here.count(memory.address + page * kPage) != 0) == mapped) concerned_.insert(memory.tag);
      }
    }
    if (concerned_.empty()) concerned_ = all;
  }
  // What each page must hold after a resume, once a release that began with `before` mapped has run: as the release
  // said for what it released, as an earlier one said for what was gone; what no resume could restore, a release may
  // give up.
  void note_released(const Saver::Tags& tags, const std::map<std::string, Restore>& overrides,
                     const std::set<Address>& before, bool done) {
    const auto after = mapped_pages(true);
    for (auto& memory : memories_) {
      if (!selected(tags, memory.tag)) continue;
      const auto override_ = overrides.find(memory.tag);
      const Restore restore = override_ == overrides.end() ? memory.restore : override_->second;
      const bool give_up = override_ != overrides.end() && !keeps_content(restore);
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        const Address address = memory.address + page * kPage;
        Expect& expect = memory.pages[page];
        // What was marked dead may be gone and undefined after an undo, too.
        if (!done && before.count(address) != 0 && is_dead(address)) expect = Expect::anything;
        if (after.count(address) != 0) continue;
        const bool gone = before.count(address) != 0 || (give_up && memory.damaged && done);
        if (!gone && !(give_up && memory.unreadable)) continue;
        if (restore == Restore::zero && gone) expect = Expect::zeros;
        if (restore == Restore::zero && expect == Expect::written) expect = Expect::written_or_zeros;
        if (restore == Restore::discard || is_dead(address)) expect = Expect::anything;
      }
      if (give_up && done) memory.damaged = false;
    }
  }
  // A resize that is done left exactly the pages that it keeps; one that failed, those that were there, unless the undo
  // failed, too. What was given back is zero once it is there again.
  void note_resized(const std::string& tag, double kept, std::size_t without_first, const std::set<Address>& before,
                    bool done) {
    const bool undone = !undo_may_fail && !fails_for_good && saver->status().failure.empty();
    for (auto& memory : memories_) {
      if (!memory.alive || memory.tag != tag) continue;
      const auto end = static_cast<std::size_t>(kept * static_cast<double>(memory.pages.size()));
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        const Address address = memory.address + page * kPage;
        const bool used = page >= without_first && page < end;
        const bool was = before.count(address) != 0;
        const bool is = !saver->backup_of(address, kPage, nullptr).released;
        if (done && is != used) report("a resize kept the wrong pages", memory, page);
        if (!done && undone && is != was) report("a failed resize was not undone", memory, page);
        note_page(memory, page, was, is, used);
      }
    }
    const auto after = mapped_pages(true);
    for (const Address address : shrunk_) {
      if (after.count(address) == 0) continue;
      if (undone) problems.push_back("what a resize gave back is mapped");
      not_undone_.insert(address);
    }
  }
  // A resize of what is released left to the resume exactly the pages that it keeps.
  void note_divided(const std::string& tag, double kept, std::size_t without_first) {
    for (auto& memory : memories_) {
      if (!memory.alive || memory.tag != tag) continue;
      const auto end = static_cast<std::size_t>(kept * static_cast<double>(memory.pages.size()));
      for (std::size_t page = 0; page < memory.pages.size(); ++page) {
        const Address address = memory.address + page * kPage;
        if (page >= without_first && page < end) {
          shrunk_.erase(address);
        } else {
          shrunk_.insert(address);
          memory.pages[page] = Expect::zeros;
        }
      }
    }
  }
  void note_page(Memory& memory, std::size_t page, bool was, bool is, bool used) {
    const Address address = memory.address + page * kPage;
    Expect& expect = memory.pages[page];
    if (is) {
      shrunk_.erase(address);
      not_undone_.erase(address);
      if (was && !used && expect == Expect::written) expect = Expect::written_or_zeros;
    } else if (was) {
      shrunk_.insert(address);
      expect = Expect::zeros;
    }
  }
  // The backup file has no name, but this process has it open.
  static void damage_files() {
    const std::unique_ptr<DIR, int (*)(DIR*)> files(opendir("/proc/self/fd"), &closedir);
    while (const dirent* const entry = readdir(files.get())) {
      const std::string path = std::string("/proc/self/fd/") + entry->d_name;
      char target[4096] = {};
      if (readlink(path.c_str(), target, sizeof target - 1) < 0) continue;
      if (std::strncmp(target, file_folder.c_str(), file_folder.size()) != 0) continue;
      const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
      unsigned char first = 0;
      for (off_t at = 0; pread(file, &first, 1, at) == 1; at += kPage) {
        ++first;
        (void)!pwrite(file, &first, 1, at);
      }
      close(file);
    }
  }
  [[nodiscard]] bool is_dead(Address address) const {
    return std::any_of(dead_.begin(), dead_.end(), [&](const auto& range) {
      return address >= range.begin && address < range.begin + range.bytes;
    });
  }
  // A release that failed leaves everything in place, unless content that is not kept is gone, or the undo failed.
  void check_undone(const std::set<Address>& before) {
    if (undo_may_fail || fails_for_good || !saver->status().failure.empty()) return;
    const auto after = mapped_pages(true);
    std::set<std::string> kept;
    for (const auto& memory : memories_) {
      for (std::size_t page = 0; memory.alive && page < memory.pages.size(); ++page) {
        const Address address = memory.address + page * kPage;
        if (before.count(address) == 0 || after.count(address) != 0) continue;
        if (memory.pages[page] != Expect::written) return;
        kept.insert(memory.tag);
      }
    }
    for (const auto& tag : kept) problems.push_back("a failed release was not undone: tag '" + tag + "'");
  }
  void report(const std::string& what, const Memory& memory, std::size_t page) {
    problems.push_back(what + ": tag '" + memory.tag + "', " + name_of(memory.restore) + ", page " +
                       std::to_string(page) + " of " + std::to_string(memory.pages.size()));
  }

  Settings settings_;
  std::vector<SavedBlock> in_store_;  // of the allocation that was left there
  bool sharing_ = false;              // each copy of a shared buffer has a separate stream
  bool rests_may_stay_ = false;       // of a shared buffer that was never made, if its undo failed
  std::set<std::string> concerned_;
  std::set<Address> shrunk_;      // pages that a resize gave back
  std::set<Address> not_undone_;  // pages that a resume mapped whose undo failed
  LedgerDriver::Report report_;
  std::vector<Memory> memories_;
  std::vector<RangeSet::Range> dead_;
  unsigned seeds_ = 0;
  int devices_ = 0;
  bool weights_ = false;
};

}  // namespace memsaver
