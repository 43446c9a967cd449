#pragma once

#include <pthread.h>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <functional>

#include "support/error.hpp"
#include "support/mutex.hpp"

namespace memsaver {

// Mutexes in memory that several processes share (pthread_mutexattr_setrobust(3)). A mutex belongs to the thread that
// locked it. If that thread dies, the next one that locks it gets EOWNERDEAD, and owns it.
namespace robust {

// Initializes a mutex in memory that is zero. Throws configuration.
inline void initialize(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int code = pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (code != 0) throw Error(ErrorKind::configuration, "this system has no robust mutexes between processes");
}

// Returns whether the mutex was free, or its owner had died; then the caller has it.
[[nodiscard]] inline bool try_lock(pthread_mutex_t& mutex) {
  const int code = pthread_mutex_trylock(&mutex);
  if (code == EOWNERDEAD) pthread_mutex_consistent(&mutex);
  return code == 0 || code == EOWNERDEAD;
}

}  // namespace robust

// One thread's access to a robust mutex that protects data; owns neither.
class MEMSAVER_THREAD_ANNOTATION(capability("mutex")) RobustMutex {
 public:
  // `repair` makes the data consistent if an owner died.
  RobustMutex(pthread_mutex_t& mutex, std::function<void()> repair) : mutex_(mutex), repair_(std::move(repair)) {}

  // Returns false if the mutex was not free within `timeout`: its owner is stopped.
  [[nodiscard]] bool lock_within(std::chrono::milliseconds timeout) TRY_ACQUIRE(true) {
    int code = pthread_mutex_trylock(&mutex_);
    if (code == EBUSY) {
      // pthread_mutex_clocklock, which a change of the clock does not affect, needs glibc 2.30.
      timespec until{};
      clock_gettime(CLOCK_REALTIME, &until);
      const auto nanoseconds = until.tv_nsec + std::chrono::nanoseconds(timeout).count();
      until.tv_sec += static_cast<time_t>(nanoseconds / 1'000'000'000);
      until.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
      code = pthread_mutex_timedlock(&mutex_, &until);
    }
    if (code == EOWNERDEAD) {
      repair_();
      pthread_mutex_consistent(&mutex_);
    }
    return code == 0 || code == EOWNERDEAD;
  }
  void unlock() RELEASE() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t& mutex_;
  const std::function<void()> repair_;
};

}  // namespace memsaver
