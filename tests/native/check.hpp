#pragma once

#include <cstdio>
#include <cstdlib>

// The whole test framework: a failed check prints its place and ends the program.
#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

#define CHECK_THROWS(expression, error_kind)                                               \
  do {                                                                                     \
    bool thrown = false;                                                                   \
    try {                                                                                  \
      (void)(expression);                                                                  \
    } catch (const memsaver::Error& error) {                                               \
      thrown = error.kind == (error_kind);                                                 \
      if (!thrown) std::fprintf(stderr, "another error: %s\n", error.what());              \
    }                                                                                      \
    if (!thrown) {                                                                         \
      std::fprintf(stderr, "%s:%d: no such error: %s\n", __FILE__, __LINE__, #expression); \
      std::exit(1);                                                                        \
    }                                                                                      \
  } while (false)
