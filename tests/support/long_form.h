// Owns which form of a test runs: the short one of `make test`, or the long one that `make test-long` adds.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace smp::support {

/// CTest says so (smp_long_tests in cmake/SmpTest.cmake).
inline bool is_long() {
  const char* form = std::getenv("SMP_TEST_LONG");
  return form != nullptr && std::string_view(form) == "1";
}

/// How many of so many random models run: the short form takes the first hundred.
inline int num_random(int all) { return is_long() ? all : std::min(all, 100); }

}  // namespace smp::support
