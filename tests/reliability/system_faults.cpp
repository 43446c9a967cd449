// Failures of calls to the operating system, for the Python programs of this folder: they plan them through ctypes, in
// a build of the Python module that has this file beside its own.

#include "system_faults.hpp"

#define MEMSAVER_TEST_FACE extern "C" __attribute__((visibility("default")))

// The `nth` call from now (1: the next) of `call`, and those behind it, `times` in all, fail with `code` (see
// sys::Hook).
MEMSAVER_TEST_FACE void memsaver_fail_system_call(const char* call, std::size_t nth, int code, std::size_t times) {
  memsaver::system_faults().plan(call, nth, code, times);
  memsaver::sys::hook = memsaver::on_system_call;
}

// Returns whether one of them happened.
MEMSAVER_TEST_FACE bool memsaver_system_call_failed() { return memsaver::system_faults().met(); }

// Cancels failures that did not happen. Returns whether any did.
MEMSAVER_TEST_FACE bool memsaver_heal_system_calls() { return memsaver::system_faults().heal(); }
