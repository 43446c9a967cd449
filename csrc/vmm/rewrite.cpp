#include "vmm/rewrite.hpp"

namespace memsaver {

namespace {

Digest digest_of(const DigestKey& key, const std::vector<Extent>& extents, std::uintptr_t content) {
  Digest digest;
  for (const auto& extent : extents) {
    digest += digest_on_host(key, {content + extent.offset, extent.bytes, extent.offset / kDigestWord});
  }
  return digest;
}

// Returns what `content` packs to, rounded as a release does; nothing if it is not to be packed.
std::vector<unsigned char> packed_form(const void* content, std::size_t bytes, std::size_t& packed_bytes) {
  ExponentSample sample;
  sample_on_host(content, bytes, sample);
  const PackPlan plan = plan_packing(sample, bytes).plan;
  std::vector<unsigned char> packed(plan.worth_it() ? packed_limit(bytes) : 0);
  packed_bytes = packed.empty() ? 0 : pack_on_host(plan, content, bytes, packed.data(), packed.size());
  packed.resize(round_packed(packed_bytes));
  return packed;
}

}  // namespace

Rewrite::Rewrite(Saver& saver, const std::vector<NewContent>& contents) : saver_(saver) {
  saver_.check_usable();
  plan(contents);
  Cleanup undo([this] { give_back(); });
  try {
    for_each_item([this](Item& item) {
      item.after.digest = digest_of(saver_.backups_.key(), item.before.extents, item.content);
      item.changed = !(item.before.digest == item.after.digest);
    });
    make_room();
    for_each_item([this](Item& item) {
      if (item.changed) keep(item);
      madvise(reinterpret_cast<void*>(item.content + item.before.offset), item.before.bytes, MADV_DONTNEED);
    });
  } catch (Error& error) {
    std::size_t bytes = 0;
    for (const auto& item : items_) bytes += item.before.bytes;
    throw error.with_tag(items_.front().arena->key().tag).with_bytes(bytes);
  }
  if (SharedStore* const store = saver_.backups_.shared()) store->tidy();
  undo.dismiss();
}

void Rewrite::plan(const std::vector<NewContent>& contents) {
  const Lock lock(saver_.map_.mutex);
  for (const auto& [address, content] : contents) {
    Arena* const arena = saver_.map_.arena_of(address);
    const bool idle = arena != nullptr && arena->alive(address) && !arena->busy();
    const std::vector<Block> blocks = idle ? arena->allocations().at(address).blocks : std::vector<Block>();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      Block after;
      after.offset = blocks[i].offset;
      after.bytes = blocks[i].bytes;
      after.extents = blocks[i].extents;
      after.adopted = blocks[i].adopted;
      items_.push_back({arena, address, i, content, blocks[i], std::move(after)});
    }
    const bool kept = std::all_of(blocks.begin(), blocks.end(), [&, base = address](const Block& block) {
      return (block.kept == Kept::host || block.kept == Kept::zero) &&
             !arena->is_mapped(base + block.offset, block.bytes);
    });
    if (!kept || blocks.empty()) {
      throw Error(ErrorKind::configuration, "new content is only for released memory whose backup is in host memory")
          .with_address(address);
    }
  }
}

void Rewrite::make_room() {
  std::map<HostPool*, std::size_t> wanted;
  for (const auto& item : items_) {
    if (!item.changed || item.after.digest->any == 0) continue;
    const Block& before = item.before;
    const std::size_t bytes = before.packed_bytes == 0 ? to_pages(before.content_bytes()) : before.kept_bytes();
    wanted[&pool_of(item)] += bytes;
    left_bytes_ += bytes;
  }
  if (saver_.backups_.shared() != nullptr) return;  // what it lacks is known only after a search for each block
  for (const auto& [pool, bytes] : wanted) pool->check(bytes);
  for (const auto& [pool, bytes] : wanted) pool->start_growth(bytes);
}

void Rewrite::keep(Item& item) {
  Block& block = item.after;
  block.kept = block.digest->any == 0 ? Kept::zero : Kept::host;
  if (block.kept == Kept::zero) return;
  const auto* content = reinterpret_cast<const unsigned char*>(item.content);
  std::vector<Extent> extents = block.extents;
  std::vector<unsigned char> packed;
  if (item.before.packed_bytes != 0) {
    packed = packed_form(content + extents.front().offset, extents.front().bytes, block.packed_bytes);
  }
  if (!packed.empty()) {
    content = packed.data();
    extents = {{0, packed.size()}};
  }
  const std::size_t bytes = sum_of(extents);
  HostPool& pool = pool_of(item);
  if (!share(block, bytes, pool.numa_node())) {
    if (block.host.empty()) block.host = pool.take(bytes);
    copy_to_ranges(content, extents, block.host);
    if (block.shared) saver_.backups_.shared()->publish(*block.shared, block.packed_bytes);
  }
  block.expected_bytes = block.packed_bytes == 0 ? 0 : block.kept_bytes();
}

bool Rewrite::share(Block& block, std::size_t bytes, int numa_node) {
  using Found = SharedStore::Found;
  SharedStore* const store = saver_.backups_.shared();
  if (store == nullptr) return false;
  const auto until = std::chrono::steady_clock::now() + SharedStore::kOthersTimeout;
  Found found = Found::awaited;
  for (bool alone = false; found == Found::awaited && !alone;) {
    alone = std::chrono::steady_clock::now() > until;
    const std::uint32_t seen = store->changes();
    store->apply_pending();
    found = store->find(block, *block.digest, alone);
    if (found == Found::awaited) store->wait_for_change(seen);
  }
  if (found == Found::claimed) {
    const std::size_t left = left_bytes_.fetch_sub(std::min<std::size_t>(bytes, left_bytes_));
    static_cast<void>(store->take(block, bytes, left, numa_node));
  }
  return found == Found::kept;
}

void Rewrite::commit() {
  const Lock operation(saver_.backups_.operation_mutex);
  {
    const Lock lock(saver_.map_.mutex);
    for (const auto& item : items_) {
      if (still(item) != nullptr) continue;
      throw Error(ErrorKind::configuration, "the memory was resumed, freed or released anew, so it has other content")
          .with_tag(item.arena->key().tag)
          .with_address(item.base);
    }
    for (auto& item : items_) {
      if (item.changed) std::swap(*still(item), item.after);
    }
  }
  give_back();
  saver_.backups_.trim_excess();
}

Block* Rewrite::still(const Item& item) const {
  const auto found = item.arena->allocations().find(item.base);
  if (!item.arena->alive(item.base) || item.number >= found->second.blocks.size()) return nullptr;
  Block& now = found->second.blocks[item.number];
  const bool same = now.kept == item.before.kept && now.digest == item.before.digest;
  return same && !item.arena->is_mapped(item.base + now.offset, now.bytes) ? &now : nullptr;
}

void Rewrite::for_each_item(const std::function<void(Item&)>& work) {
  constexpr std::size_t kThreads = 16;
  sys::for_each_in_threads(items_.size(), kThreads, [&](std::size_t i) { work(items_[i]); });
}

void Rewrite::give_back() noexcept {
  attempt("while new backups are given up", [this] {
    for (auto& item : items_) saver_.backups_.give_back(item.after, item.arena->key().device);
    items_.clear();
    saver_.backups_.flush();
  });
}

}  // namespace memsaver
