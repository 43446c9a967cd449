#pragma once

#include <pthread.h>

#include <chrono>
#include <functional>
#include <utility>

#include "support/mutex.hpp"

namespace memsaver {

// Mutexes in memory that several processes share (pthread_mutexattr_setrobust(3)). A mutex belongs to the thread that
// locked it. If that thread dies, the next one that locks it learns so, and has it.
namespace robust {

enum class Result { busy, locked, owner_died };  // the last until pthread_mutex_consistent(3)

// Initializes a mutex in memory that is zero. Throws configuration.
void initialize(pthread_mutex_t& mutex);
[[nodiscard]] Result try_lock(pthread_mutex_t& mutex);

}  // namespace robust

// One thread's access to a robust mutex that protects data; owns neither.
class MEMSAVER_THREAD_ANNOTATION(capability("mutex")) RobustMutex {
 public:
  // `repair` makes the data consistent if an owner died.
  RobustMutex(pthread_mutex_t& mutex, std::function<void()> repair) : mutex_(mutex), repair_(std::move(repair)) {}

  // Returns false if the mutex was not free within `timeout`: its owner is stopped.
  [[nodiscard]] bool lock_within(std::chrono::milliseconds timeout) TRY_ACQUIRE(true);
  void unlock() RELEASE() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t& mutex_;
  const std::function<void()> repair_;
};

}  // namespace memsaver
