// What ranks say of their software, and how differences are told.
#include "smp/engine/context/versions.h"

#include <gtest/gtest.h>

#include <regex>

namespace smp::engine {
namespace {

TEST(Versions, NameWhatTheLibrariesSayOfThemselves) {
  const std::regex form(R"(smp \d+\.\d+\.\d+, LibTorch \d+\.\d+\..+ of commit [0-9a-f]{7}, for CUDA (\d+\.\d+|unknown))");
  EXPECT_TRUE(std::regex_match(versions(), form)) << versions();
}

TEST(Versions, ThatDifferAreToldWithTheirRanks) {
  EXPECT_EQ(differing_versions({"A"}), "");
  EXPECT_EQ(differing_versions({"A", "A", "A"}), "");
  EXPECT_EQ(differing_versions({"A", "B", "A"}), "ranks 0, 2 have A; rank 1 has B");
}

}  // namespace
}  // namespace smp::engine
