// The version of smp, at compile time and at run time. CMake reads its own from the three numbers here.
#pragma once

#define SMP_VERSION_MAJOR 0
#define SMP_VERSION_MINOR 1
#define SMP_VERSION_PATCH 0

namespace smp {

/// Version of the library that the program runs with, "major.minor.patch". It differs from the
/// macros only if the program was compiled against the headers of another version.
const char* version() noexcept;

}  // namespace smp
