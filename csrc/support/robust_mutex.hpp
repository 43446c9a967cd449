#pragma once

#include <pthread.h>

#include <chrono>
#include <functional>

#include "support/mutex.hpp"

namespace memsaver {

// A mutex in memory that several processes share. It survives the death of its owner: the next thread that locks it is
// told (pthread_mutexattr_setrobust(3)). It belongs to the thread that locked it, and is free when that thread ends.
namespace robust {

enum class Taken { no, yes, from_the_dead };  // the last until pthread_mutex_consistent(3)

// Of memory that is zero.
void initialize(pthread_mutex_t& mutex);
[[nodiscard]] Taken lock_within(pthread_mutex_t& mutex, std::chrono::milliseconds patience);
[[nodiscard]] Taken try_lock(pthread_mutex_t& mutex);

}  // namespace robust

// One thread's way to such a mutex that protects data: `repair` makes the data consistent if an owner died.
class MEMSAVER_THREAD_ANNOTATION(capability("mutex")) RobustMutex {
 public:
  RobustMutex(pthread_mutex_t& mutex, std::function<void()> repair) : mutex_(mutex), repair_(std::move(repair)) {}

  // False if the mutex was not free for that long: its owner is stopped.
  [[nodiscard]] bool lock_within(std::chrono::milliseconds patience) TRY_ACQUIRE(true);
  void unlock() RELEASE() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t& mutex_;
  const std::function<void()> repair_;
};

}  // namespace memsaver
