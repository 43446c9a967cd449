// The program that keeps the weights in a shared store for processes that start later. Its arguments are the name of
// the store, how many bytes to keep, and the limit of the store if this process creates it. SIGTERM and SIGINT end it
// with code 0.

#include <csignal>

#include "backup/shared_store.hpp"

namespace {

std::atomic<bool> ending{false};
void end(int) { ending = true; }

}  // namespace

int main(int count, char** arguments) {
  using memsaver::SharedStore;
  if (count != 4) return 2;
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // for the store's threads: a signal is to interrupt this one's wait
  for (const int signal : {SIGTERM, SIGINT}) std::signal(signal, end);
  try {
    const std::size_t limit = std::strtoull(arguments[2], nullptr, 10);
    const auto driver = memsaver::open_host_driver({}, memsaver::page_bytes());
    SharedStore store(*driver, arguments[1], std::strtoull(arguments[3], nullptr, 10), SharedStore::Kind::keeper);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    store.keep(limit);  // what the store has already is held once the line is there
    constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    auto size = static_cast<double>(limit);
    int unit = 0;
    for (; size >= 1024 && unit < 4; size /= 1024) ++unit;
    std::printf("keeping weights of the store %s, up to %.4g %s\n", arguments[1], size, units[unit]);
    std::fflush(stdout);
    while (!ending) {
      const std::uint32_t seen = store.changes();
      store.keep(limit);
      store.wait_for_change(seen, SharedStore::kUpkeep);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memsaver-keeper: %s\n", error.what());
    return 1;
  }
}
