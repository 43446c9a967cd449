#pragma once

#include <mutex>

// Lock rules that clang checks at compile time (-Wthread-safety); other compilers ignore them.
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html
#if defined(__clang__)
#define MEMSAVER_THREAD_ANNOTATION(...) __attribute__((__VA_ARGS__))
#else
#define MEMSAVER_THREAD_ANNOTATION(...)
#endif

#define GUARDED_BY(mutex) MEMSAVER_THREAD_ANNOTATION(guarded_by(mutex))
#define REQUIRES(...) MEMSAVER_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) MEMSAVER_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) MEMSAVER_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) MEMSAVER_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) MEMSAVER_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define ACQUIRED_BEFORE(...) MEMSAVER_THREAD_ANNOTATION(acquired_before(__VA_ARGS__))
#define ACQUIRED_AFTER(...) MEMSAVER_THREAD_ANNOTATION(acquired_after(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS MEMSAVER_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace memsaver {

// A std::mutex that the analysis knows.
class MEMSAVER_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

// Holds a Mutex, or a RobustMutex, for a scope; unlock() and lock() free and take it in between.
template <typename Held = Mutex>
class MEMSAVER_THREAD_ANNOTATION(scoped_lockable) Lock {
 public:
  explicit Lock(Held& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  // Takes over a mutex that the caller has locked, for example with try_lock().
  Lock(Held& mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex_(mutex) {}
  Lock(const Lock&) = delete;
  ~Lock() RELEASE() {
    if (held_) mutex_.unlock();
  }

  void unlock() RELEASE() {
    mutex_.unlock();
    held_ = false;
  }
  void lock() ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Held& mutex_;
  bool held_ = true;
};

}  // namespace memsaver
