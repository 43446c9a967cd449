#pragma once

#include "vmm/saver.hpp"

namespace memsaver {

// New content of a released allocation: its address, and that of private anonymous memory of the same size.
using NewContent = std::pair<Address, std::uintptr_t>;

// Owns new backups of released allocations, until commit() puts them in the place of what a resume would bring back.
// Until then nothing has changed, and the destructor gives them back. One thread at a time; the Saver must live longer.
class Rewrite {
 public:
  // Keeps `contents`, each of a different allocation: packed if the present backup is, in the shared store if there is
  // one, and not at all where they equal the present backup. Gives their pages to the system as it goes. Throws
  // configuration unless all are live allocations that are released and kept in host memory, out_of_host_memory, backup
  // or driver errors: nothing is kept.
  Rewrite(Saver& saver, const std::vector<NewContent>& contents);
  Rewrite(const Rewrite&) = delete;
  ~Rewrite() { give_back(); }

  // Waits for an operation under way. Throws configuration if a backup is not the one that this object was made for,
  // because its memory was resumed, freed or released anew: nothing has changed.
  void commit();

 private:
  struct Item {
    Arena* arena;
    Address base;  // of the allocation
    std::size_t number;
    std::uintptr_t content;  // of the allocation
    Block before;            // a copy: the memory is the map's
    Block after;             // with the memory of the new backup; after a commit, of the old one
    bool changed = false;
  };

  void plan(const std::vector<NewContent>& contents) EXCLUDES(saver_.map_.mutex);
  void make_room();
  void keep(Item& item);
  // Takes what the shared store has of the content, or memory there for `bytes` of it. Returns whether it is written.
  [[nodiscard]] bool share(Block& block, std::size_t bytes, int numa_node);
  // Returns the block in the map; null if it is freed or resident, or its backup is not `before`.
  [[nodiscard]] Block* still(const Item& item) const REQUIRES(saver_.map_.mutex);
  [[nodiscard]] HostPool& pool_of(const Item& item) { return saver_.backups_.pool_of(item.arena->key().device); }
  void for_each_item(const std::function<void(Item&)>& work);
  void give_back() noexcept;

  Saver& saver_;
  std::vector<Item> items_;
  std::atomic<std::size_t> left_bytes_{0};  // to be kept
};

}  // namespace memsaver
