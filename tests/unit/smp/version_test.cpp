// The version of the library equals the version of its header.
#include "smp/version.h"

#include <gtest/gtest.h>

#include <string>

namespace {

TEST(Version, OfTheLibraryEqualsTheHeader) {
  EXPECT_EQ(smp::version(), std::to_string(SMP_VERSION_MAJOR) + "." + std::to_string(SMP_VERSION_MINOR) + "." +
                                std::to_string(SMP_VERSION_PATCH));
}

}  // namespace
