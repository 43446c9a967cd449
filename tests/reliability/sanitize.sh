#!/usr/bin/env bash
# Builds the native tests with sanitizers and runs them: address, leak and undefined behaviour beside threads.
# Nothing is suppressed. `make sanitize` runs this; STRIDE=1 runs every case of every_call instead of one in some.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
stride=${STRIDE:-11}

check() (
  sanitizer=$1
  folder=build/sanitize-${sanitizer%%,*}
  trap 'cat "$folder"/report.* 2>/dev/null || true' EXIT
  cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=None -DMEMSAVER_NATIVE_TESTS=ON -DMEMSAVER_SANITIZE="$sanitizer" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" >/dev/null
  cmake --build "$folder" --parallel 2 --target driver_contract packing packing_lanes saver_threads shared_store links every_call >/dev/null
  # In files: every_call closes its stderr, for what the core says of all those failures.
  rm -f "$folder"/report.*
  report=log_path=$PWD/$folder/report
  export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:$report UBSAN_OPTIONS=print_stacktrace=1:$report
  export TSAN_OPTIONS=second_deadlock_stack=1:$report
  "$folder/driver_contract" host
  "$folder/driver_contract" faulty
  "$folder/packing"
  "$folder/saver_threads"
  "$folder/links" threads
  if [ "$sanitizer" != thread ]; then
    # The kernels that pack, on the CPU: coroutines of one thread.
    "$folder/packing_lanes"
    # Its processes fork while they have threads, which the thread sanitizer does not support.
    "$folder/shared_store"
    "$folder/links"
  fi
  "$folder/every_call" --stride "$stride"
)

# Side by side: each needs one core for the most part.
{ check address,undefined | sed 's/^/address, undefined: /'; } & first=$!
{ check thread | sed 's/^/thread: /'; } & second=$!
failed=0
wait "$first" || failed=1
wait "$second" || failed=1
exit "$failed"
