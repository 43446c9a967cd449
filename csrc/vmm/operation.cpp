#include "vmm/operation.hpp"

#include <algorithm>
#include <exception>
#include <set>
#include <thread>
#include <utility>

#include "support/scope_exit.hpp"
#include "support/system.hpp"

namespace memsaver {

void DeviceWork::sort() {
  std::sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) { return a.chunk.address < b.chunk.address; });
  std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) { return a.begin() < b.begin(); });
}

std::string DeviceWork::tags() const {
  std::set<std::string> names;
  for (const auto* list : {&kept, &others}) {
    for (const auto& planned : *list) names.insert(planned.arena->key().tag);
  }
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::size_t DeviceWork::bytes() const {
  std::size_t sum = 0;
  for (const auto* list : {&kept, &others}) {
    for (const auto& planned : *list) sum += planned.chunk.bytes;
  }
  return sum;
}

OperationResult Operation::perform(const MemoryMap::Tags& tags) {
  core_.check_process();
  const Lock one_at_a_time(core_.backups.operation_mutex);
  core_.check_usable();
  OperationResult result;
  {
    const ScopeExit at_end([this] { end(); });
    try {
      core_.orphans.retry(core_.map);
      core_.backups.clean_up();
      core_.check_usable();
      begin(tags);
      core_.backups.settle();
      run();
      core_.check_usable();  // a failure that was only logged may have been the loss of the context
      const Lock lock(core_.map.mutex);
      result = this->result();
    } catch (Error& error) {
      name_work(error, tags);
      throw;
    }
  }
  result.seconds = seconds();
  return result;
}

void Operation::begin(const MemoryMap::Tags& tags) {
  const Lock lock(core_.map.mutex);
  const std::vector<Arena*> selected = core_.map.select(tags);
  for (const Arena* const arena : selected) core_.orphans.check_none_mapped(core_.map, *arena);
  core_.map.set_operation(kind_);
  for (Arena* const arena : selected) {
    arenas_.push_back(arena);
    owed_before_.push_back(arena->owed());
    arena->begin_operation();
    plan(*arena);
  }
}

void Operation::end() {
  core_.progress.end();
  std::vector<std::pair<Arena*, std::vector<Chunk>>> freed;
  {
    const Lock lock(core_.map.mutex);
    for (Arena* const arena : arenas_) {
      for (const Address address : arena->end_operation()) freed.emplace_back(arena, core_.forget(*arena, address));
    }
  }
  for (const auto& [arena, chunks] : freed) core_.physical.give_back(*arena, chunks);
  core_.backups.settle();
}

void Operation::name_work(Error& error, const MemoryMap::Tags& tags) const {
  std::string names;
  for (const auto& tag : tags) names += (names.empty() ? "" : ", ") + tag;
  for (const auto& [index, device] : devices_) {
    if (tags.empty()) names += (names.empty() ? "" : ", ") + device.tags();
  }
  error.with_tag(names).with_bytes(bytes());
}

std::size_t Operation::bytes() const {
  std::size_t sum = 0;
  for (const auto& [index, device] : devices_) sum += device.bytes();
  return sum;
}

DeviceWork& Operation::on(int device) {
  DeviceWork& work = devices_[device];
  work.device = device;
  return work;
}

void Operation::on_each_device(const std::function<void(DeviceWork&)>& work) {
  std::vector<std::exception_ptr> failures(devices_.size());
  std::vector<std::function<void()>> unstarted;
  std::vector<std::thread> threads;
  std::size_t index = 0;
  for (auto& [device, each] : devices_) {
    const auto task = [&work, &each = each, &failure = failures[index++]] {
      try {
        work(each);
      } catch (Error& error) {
        error.with_tag(each.tags()).with_device(each.device).with_bytes(each.bytes());
        failure = std::current_exception();
      } catch (...) {
        failure = std::current_exception();
      }
    };
    if (index == devices_.size()) {
      task();  // on this thread; with one device there is no other
    } else if (auto thread = sys::start_thread(task)) {
      threads.push_back(std::move(*thread));
    } else {
      unstarted.emplace_back(task);
    }
  }
  for (const auto& task : unstarted) task();
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

double Operation::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

OperationResult Operation::result() const {
  const bool releasing = kind_ == Progress::Operation::release;
  OperationResult result;
  std::map<std::string, TagOutcome> tags;
  for (std::size_t i = 0; i < arenas_.size(); ++i) {
    const Arena* const arena = arenas_[i];
    TagOutcome& outcome = tags[arena->key().tag];
    outcome.tag = arena->key().tag;
    const std::set<Restore> owed = releasing ? arena->owed() : owed_before_[i];
    const std::string restore =
        owed.size() > 1 ? "mixed" : name_of(owed.empty() ? arena->key().restore : *owed.begin());
    if (outcome.bytes == 0) outcome.restore = restore;
    if (arena->live_bytes() > 0 && outcome.restore != restore) outcome.restore = "mixed";
    outcome.bytes += arena->live_bytes();
    if (!arena->released_runs().empty()) outcome.state = "released";
  }
  for (const auto& [index, device] : devices_) {
    result.devices.push_back(index);
    result.first_memory_seconds = std::max(result.first_memory_seconds, device.first_memory_seconds);
    result.work.raise_to(device.seconds);
    for (const auto& [tag, bytes] : device.done_bytes) {
      (releasing ? tags[tag].released_bytes : tags[tag].resumed_bytes) += bytes;
      tags[tag].already = false;
    }
    for (const auto& content : device.blocks) {
      TagOutcome& outcome = tags[content.tag];
      const std::size_t bytes = content.block->content_bytes();
      using Outcome = ContentBlock::Outcome;
      if (content.outcome == Outcome::copied) (releasing ? outcome.backed_up_bytes : outcome.restored_bytes) += bytes;
      if (releasing && content.outcome == Outcome::copied) outcome.kept_bytes += content.block->kept_bytes();
      if (content.outcome == Outcome::found) outcome.shared_bytes += bytes;
      if (content.outcome == Outcome::unchanged) outcome.unchanged_bytes += bytes;
      if (content.outcome == Outcome::zero) outcome.zero_bytes += bytes;
    }
  }
  for (auto& [tag, outcome] : tags) {
    if (outcome.state.empty()) outcome.state = "resident";
    result.tags.push_back(std::move(outcome));
  }
  return result;
}

}  // namespace memsaver
