#include "support/robust_mutex.hpp"

#include <cerrno>
#include <ctime>

#include "support/error.hpp"

namespace memsaver {

namespace robust {

static Result result_of(int code) {
  return code == 0 ? Result::locked : code == EOWNERDEAD ? Result::owner_died : Result::busy;
}

void initialize(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int code = pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (code != 0) throw Error(ErrorKind::configuration, "this system has no robust mutexes between processes");
}

Result try_lock(pthread_mutex_t& mutex) { return result_of(pthread_mutex_trylock(&mutex)); }

}  // namespace robust

bool RobustMutex::lock_within(std::chrono::milliseconds timeout) {
  robust::Result result = robust::try_lock(mutex_);
  if (result == robust::Result::busy) {
    // pthread_mutex_clocklock, which a change of the clock does not affect, needs glibc 2.30.
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    const auto nanoseconds = until.tv_nsec + std::chrono::nanoseconds(timeout).count();
    until.tv_sec += static_cast<time_t>(nanoseconds / 1'000'000'000);
    until.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
    result = robust::result_of(pthread_mutex_timedlock(&mutex_, &until));
  }
  if (result == robust::Result::owner_died) {
    repair_();
    pthread_mutex_consistent(&mutex_);
  }
  return result != robust::Result::busy;
}

}  // namespace memsaver
