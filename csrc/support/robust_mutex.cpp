#include "support/robust_mutex.hpp"

#include <cerrno>
#include <ctime>

#include "support/error.hpp"

namespace memsaver {

namespace robust {

namespace {

Taken taken(int code) { return code == 0 ? Taken::yes : code == EOWNERDEAD ? Taken::from_the_dead : Taken::no; }

}  // namespace

void initialize(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int code = pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (code != 0) throw Error(ErrorKind::configuration, "this system has no robust mutexes between processes");
}

Taken try_lock(pthread_mutex_t& mutex) { return taken(pthread_mutex_trylock(&mutex)); }

Taken lock_within(pthread_mutex_t& mutex, std::chrono::milliseconds patience) {
  if (const Taken at_once = try_lock(mutex); at_once != Taken::no) return at_once;
  // pthread_mutex_clocklock, which a change of the clock does not affect, needs glibc 2.30.
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  const auto nanoseconds = until.tv_nsec + std::chrono::nanoseconds(patience).count();
  until.tv_sec += static_cast<time_t>(nanoseconds / 1'000'000'000);
  until.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
  return taken(pthread_mutex_timedlock(&mutex, &until));
}

}  // namespace robust

bool RobustMutex::lock_within(std::chrono::milliseconds patience) {
  const robust::Taken taken = robust::lock_within(mutex_, patience);
  if (taken == robust::Taken::from_the_dead) {
    repair_();
    pthread_mutex_consistent(&mutex_);
  }
  return taken != robust::Taken::no;
}

}  // namespace memsaver
