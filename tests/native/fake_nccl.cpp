// A library in the place of libnccl.so.2 with the functions that memsaver calls, for processes without a GPU. What it
// does is real: a communicator's memory is pages of this process, resident or given back; and no rank leaves a suspend
// or a resume before every rank has entered it, as in NCCL's own. Compiled with FAKE_NCCL_VERSION below 22907 it lacks
// the functions that NCCL before 2.29.7 lacks.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <new>
#include <string>

namespace {

// NCCL's own numbers (nccl.h).
enum Result { success = 0, system_error = 2, invalid_argument = 4, invalid_usage = 5 };
constexpr int kSuspendMemory = 1;

constexpr std::size_t kSuspendableBytes = std::size_t{8} << 20;
constexpr std::size_t kPersistentBytes = std::size_t{1} << 20;

// In a file that all ranks map.
struct Meeting {
  std::atomic<unsigned> arrived;
  std::atomic<unsigned> generation;
};

void* pages(void* at, std::size_t bytes, int protection) {
  const int fixed = at != nullptr ? MAP_FIXED : 0;
  return mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | fixed, -1, 0);
}

}  // namespace

struct ncclComm {
  Meeting* meeting = nullptr;
  unsigned ranks = 0;
  void* suspendable = nullptr;
  void* persistent = nullptr;
  bool suspended = false;
  std::map<std::string, int> faults;  // result of the next call, by its name

  void meet() {
    const unsigned generation = meeting->generation;
    if (++meeting->arrived == ranks) {
      meeting->arrived = 0;
      ++meeting->generation;
    }
    while (meeting->generation == generation) usleep(200);
  }

  int fault(const char* call) {
    const auto found = faults.find(call);
    if (found == faults.end()) return success;
    const int result = found->second;
    faults.erase(found);
    if (result < 0) pause();  // until the process ends
    return result;
  }
};

struct ncclUniqueId {
  char internal[128];  // the path of the file in which the ranks meet
};

extern "C" {

int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return success;
}

const char* ncclGetErrorString(int result) { return result == invalid_usage ? "invalid usage" : "injected error"; }

int ncclCommInitRank(ncclComm** comm, int ranks, ncclUniqueId id, int) {
  const int file = open(id.internal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Meeting)) != 0) return system_error;
  void* const shared = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return system_error;
  auto* const made = new ncclComm;
  made->meeting = static_cast<Meeting*>(shared);
  made->ranks = static_cast<unsigned>(ranks);
  made->suspendable = pages(nullptr, kSuspendableBytes, PROT_READ | PROT_WRITE);
  made->persistent = pages(nullptr, kPersistentBytes, PROT_READ | PROT_WRITE);
  made->meet();
  *comm = made;
  return success;
}

int ncclCommDestroy(ncclComm* comm) {
  munmap(comm->meeting, sizeof(Meeting));
  munmap(comm->suspendable, kSuspendableBytes);
  munmap(comm->persistent, kPersistentBytes);
  delete comm;
  return success;
}

// Lets the next `call` ("suspend" or "resume") of this rank return `result` before it meets the others; -1: hang.
void fake_nccl_fail(ncclComm* comm, const char* call, int result) { comm->faults[call] = result; }

#if FAKE_NCCL_VERSION >= 22907

int ncclCommSuspend(ncclComm* comm, int flags) {
  if (const int result = comm->fault("suspend")) return result;
  if (flags != kSuspendMemory || comm->suspended) return invalid_usage;
  comm->meet();
  pages(comm->suspendable, kSuspendableBytes, PROT_NONE);
  comm->suspended = true;
  return success;
}

int ncclCommResume(ncclComm* comm) {
  if (const int result = comm->fault("resume")) return result;
  if (!comm->suspended) return invalid_usage;
  if (pages(comm->suspendable, kSuspendableBytes, PROT_READ | PROT_WRITE) == MAP_FAILED) return system_error;
  comm->meet();
  comm->suspended = false;
  comm->meet();
  return success;
}

int ncclCommMemStats(ncclComm* comm, int statistic, std::uint64_t* value) {
  const std::uint64_t values[] = {kSuspendableBytes, comm->suspended ? 1u : 0u, kPersistentBytes,
                                  kSuspendableBytes + kPersistentBytes};
  if (statistic < 0 || statistic > 3) return invalid_argument;
  *value = values[statistic];
  return success;
}

#endif
}  // extern "C"
