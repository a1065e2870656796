// The version that this library was compiled as.
#include "smp/version.h"

#define SMP_TEXT_OF(number) #number
#define SMP_JOIN(major, minor, patch) SMP_TEXT_OF(major) "." SMP_TEXT_OF(minor) "." SMP_TEXT_OF(patch)

namespace smp {

const char* version() noexcept { return SMP_JOIN(SMP_VERSION_MAJOR, SMP_VERSION_MINOR, SMP_VERSION_PATCH); }

}  // namespace smp
