#include "vmm/rewrite.hpp"

namespace memsaver {

namespace {

constexpr std::size_t kThreads = 8;
// How long to wait for another process that writes the same content to the shared store.
constexpr std::chrono::seconds kOthersTimeout{1};

// Returns what `content` packs to, rounded as a release does; nothing if it is not to be packed.
std::vector<unsigned char> packed_form(const void* content, std::size_t bytes, std::size_t& packed_bytes) {
  ExponentSample sample;
  sample_on_host(content, bytes, sample);
  const PackPlan plan = plan_packing(sample, bytes).plan;
  std::vector<unsigned char> packed(plan.worth_it() ? packed_limit(bytes) : 0);
  packed_bytes = packed.empty() ? 0 : pack_on_host(plan, content, bytes, packed.data(), packed.size());
  packed.resize(round_up(packed_bytes, kBlockBytes / 128));
  return packed;
}

SharedStore::Answer found_in(SharedStore& store, const Digest& digest, std::size_t bytes) {
  const auto until = std::chrono::steady_clock::now() + kOthersTimeout;
  for (;;) {
    const bool alone = std::chrono::steady_clock::now() > until;
    const std::uint32_t seen = store.changes();
    store.apply_pending();
    const SharedStore::Answer answer = store.find_or_claim(digest, bytes, alone);
    if (alone || answer.found != SharedStore::Found::awaited) return answer;
    store.wait_for_change(seen);
  }
}

}  // namespace

Rewrite::Rewrite(Saver& saver, const std::vector<NewContent>& contents) : saver_(saver) {
  saver_.check_usable();
  plan(contents);
  Cleanup undo([this] { give_back(); });
  try {
    for_each_item([this](Item& item) { digest(item); });
    make_room();
    for_each_item([this](Item& item) {
      if (item.changed) keep(item);
      madvise(reinterpret_cast<void*>(item.content + item.before.offset), item.before.bytes, MADV_DONTNEED);
    });
  } catch (Error& error) {
    throw error.with_tag(items_.front().arena->key().tag);
  }
  if (SharedStore* const store = saver_.backups_.shared()) store->tidy();
  undo.dismiss();
}

void Rewrite::plan(const std::vector<NewContent>& contents) {
  const Lock lock(saver_.map_.mutex);
  for (const auto& [address, content] : contents) {
    Arena* const arena = saver_.map_.arena_of(address);
    if (arena == nullptr || !arena->alive(address) || arena->busy()) {
      throw Error(ErrorKind::configuration, "this is no idle allocation of a region").with_address(address);
    }
    const std::vector<Block>& blocks = arena->allocations().at(address).blocks;
    const bool released = std::all_of(blocks.begin(), blocks.end(), [&, base = address](const Block& block) {
      const bool in_memory = block.kept == Kept::host || block.kept == Kept::zero;
      return in_memory && !arena->is_mapped(base + block.offset, block.bytes);
    });
    if (blocks.empty() || !released) {
      throw Error(ErrorKind::configuration, "only released memory that is kept in host memory gets new content")
          .with_tag(arena->key().tag)
          .with_address(address);
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) items_.push_back({arena, address, i, content, blocks[i], {}});
  }
}

void Rewrite::digest(Item& item) const {
  Digest digest;
  for (const auto& extent : item.before.extents) {
    digest += digest_on_host(saver_.backups_.key(),
                             {item.content + extent.offset, extent.bytes, extent.offset / kDigestWord});
  }
  item.after.offset = item.before.offset;
  item.after.bytes = item.before.bytes;
  item.after.extents = item.before.extents;
  item.after.adopted = item.before.adopted;
  item.after.digest = digest;
  item.changed = !(item.before.digest == digest);
}

void Rewrite::make_room() {
  std::map<HostPool*, std::size_t> wanted;
  for (const auto& item : items_) {
    if (!item.changed || item.after.digest->any == 0) continue;
    const std::size_t content = to_pages(item.before.content_bytes());
    const std::size_t bytes = item.before.packed_bytes == 0 ? content : sum_of(item.before.host);
    wanted[&saver_.backups_.pool_of(item.arena->key().device)] += bytes;
    left_bytes_ += bytes;
  }
  if (saver_.backups_.shared() != nullptr) return;  // what it lacks shows only as it is looked for
  for (const auto& [pool, bytes] : wanted) pool->check(bytes);
  for (const auto& [pool, bytes] : wanted) pool->start_growth(bytes);
}

void Rewrite::keep(Item& item) {
  Block& block = item.after;
  const std::size_t content_bytes = block.content_bytes();
  const auto* content = reinterpret_cast<const unsigned char*>(item.content);
  block.kept = Kept::zero;
  if (block.digest->any == 0) return;
  std::vector<Extent> extents = block.extents;
  std::vector<unsigned char> packed;
  if (item.before.packed_bytes != 0) {
    packed = packed_form(content + extents.front().offset, content_bytes, block.packed_bytes);
  }
  if (!packed.empty()) {
    content = packed.data();
    extents = {{0, packed.size()}};
  }
  const std::size_t bytes = sum_of(extents);
  if (!share(item, bytes)) {
    if (block.host.empty()) block.host = saver_.backups_.pool_of(item.arena->key().device).take(bytes);
    for_each_piece(extents, block.host, [&](std::size_t offset, std::uintptr_t memory, std::size_t part) {
      std::memcpy(reinterpret_cast<void*>(memory), content + offset, part);
    });
    if (block.shared) saver_.backups_.shared()->publish(*block.shared, block.packed_bytes);
  }
  block.kept = Kept::host;
  block.expected_bytes = block.packed_bytes == 0 ? 0 : block.kept_bytes();
  left_bytes_ -= std::min<std::size_t>(left_bytes_, bytes);
}

bool Rewrite::share(Item& item, std::size_t bytes) {
  using Found = SharedStore::Found;
  SharedStore* const store = saver_.backups_.shared();
  if (store == nullptr) return false;
  Block& block = item.after;
  const SharedStore::Answer answer = found_in(*store, *block.digest, block.content_bytes());
  if (answer.found != Found::kept && answer.found != Found::claimed) return false;
  block.shared = answer.entry;
  if (answer.found == Found::kept) {
    block.host = store->memory_of(answer);
    block.packed_bytes = answer.packed_bytes;
    return true;
  }
  const int node = saver_.backups_.pool_of(item.arena->key().device).numa_node();
  block.host = store->take(answer.entry, bytes, left_bytes_, node);
  if (block.host.empty()) store->give(*std::exchange(block.shared, std::nullopt));
  return false;
}

void Rewrite::commit() {
  const Lock operation(saver_.backups_.operation_mutex);
  {
    const Lock lock(saver_.map_.mutex);
    for (const auto& item : items_) {
      if (is_as_before(item)) continue;
      throw Error(ErrorKind::configuration, "the memory was resumed, freed or released anew, so it has other content")
          .with_tag(item.arena->key().tag)
          .with_address(item.base);
    }
    for (auto& item : items_) {
      if (item.changed) std::swap(item.arena->allocations().at(item.base).blocks[item.number], item.after);
    }
  }
  give_back();
  saver_.backups_.trim_excess();
}

bool Rewrite::is_as_before(const Item& item) const {
  if (!item.arena->alive(item.base)) return false;
  const std::vector<Block>& blocks = item.arena->allocations().at(item.base).blocks;
  if (item.number >= blocks.size()) return false;
  const Block& now = blocks[item.number];
  return now.kept == item.before.kept && now.digest == item.before.digest && now.extents == item.before.extents &&
         !item.arena->is_mapped(item.base + now.offset, now.bytes);
}

void Rewrite::for_each_item(const std::function<void(Item&)>& work) {
  std::atomic<std::size_t> next{0};
  sys::run_in_threads(std::min(kThreads, items_.size()), [&](std::size_t) {
    for (std::size_t i = next++; i < items_.size(); i = next++) work(items_[i]);
  });
}

void Rewrite::give_back() noexcept {
  attempt("while new backups are given up", [this] {
    for (auto& item : items_) saver_.backups_.give_back(item.after, item.arena->key().device);
    items_.clear();
    saver_.backups_.flush();
  });
}

}  // namespace memsaver
