#include "vmm/reservation.hpp"

namespace memsaver {

void Reservation::add(int device, std::size_t bytes) {
  const Lock lock(mutex_);
  auto& handles = handles_[{device, bytes}];
  handles.reserve(handles.size() + 1);
  handles.push_back(driver_.create(device, bytes));
}

std::optional<Handle> Reservation::take(int device, std::size_t bytes) {
  const Lock lock(mutex_);
  const auto found = handles_.find({device, bytes});
  if (found == handles_.end() || found->second.empty()) return std::nullopt;
  const Handle handle = found->second.back();
  found->second.pop_back();
  return handle;
}

void Reservation::give_back() noexcept {
  Handles handles;
  {
    const Lock lock(mutex_);
    handles.swap(handles_);
  }
  for (const auto& [key, list] : handles) {
    for (const Handle handle : list) orphans_.give_back(map_, {key.first, handle, key.second});
  }
}

std::map<int, std::size_t> Reservation::bytes_by_device() const {
  const Lock lock(mutex_);
  std::map<int, std::size_t> sums;
  for (const auto& [key, list] : handles_) {
    if (!list.empty()) sums[key.first] += key.second * list.size();
  }
  return sums;
}

}  // namespace memsaver
