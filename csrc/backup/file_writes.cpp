#include "backup/file_writes.hpp"

#include "support/error.hpp"
#include "support/progress.hpp"
#include "support/scope_exit.hpp"
#include "support/system.hpp"

namespace memsaver {

std::shared_future<void> FileWrites::start(const FileRange& range, Address base, const std::vector<Extent>& extents) {
  limit(kFileTransfers - 1);
  FileTransfer& transfer = transfers_.emplace_back();  // if anything below throws, settle() returns its memory
  transfer.bounce = take_bounce(sum_of(extents));
  staging_.copy(Staging::Direction::to_host, base, extents, transfer.bounce);
  Driver& driver = staging_.driver();
  const int device = staging_.device();
  const Event copied = driver.record(device, staging_.copies());
  transfer.done =
      sys::run_beside([&driver, device, &files = staging_.files(), copied, range, memory = transfer.bounce] {
        const ScopeExit recycle([&] { driver.recycle(device, copied); });
        driver.wait(device, copied);
        files.write(range, memory);
      });
  return transfer.done;
}

// Bounce memory for the last of transfers_. If there is too little for several at once, waits for the older ones; a
// single transfer is always served.
std::vector<HostRange> FileWrites::take_bounce(std::size_t bytes) {
  const Stopwatch watch(seconds_.host_memory);
  for (;;) {
    const std::size_t count = transfers_.size();
    try {
      return staging_.pool().take(bytes, count > 1 ? HostPool::Use::passing : HostPool::Use::must_pass);
    } catch (const Error& error) {
      if (count == 1 || error.kind != ErrorKind::out_of_host_memory) throw;
    }
    limit(count - 1);
    if (transfers_.size() == count) transfers_.front().done.get();  // a failed one keeps its memory: throw its error
  }
}

// Waits for the oldest transfers until at most `count` are left besides failed ones. A failed one keeps its memory,
// since copies into it may still run; its error comes with its result.
void FileWrites::limit(std::size_t count) {
  auto oldest = transfers_.begin();
  for (std::size_t failed = 0; transfers_.size() > failed + count;) {
    try {
      oldest->done.get();
    } catch (const std::exception&) {
      ++failed;
      ++oldest;
      continue;
    }
    staging_.pool().give(oldest->bounce, HostPool::Use::passing);
    oldest = transfers_.erase(oldest);
  }
}

}  // namespace memsaver
