// What the facts of hosts are taken for.
#include "tools/checks/facts.h"

#include <gtest/gtest.h>

namespace smp::tools {
namespace {

Facts good(const std::string& host) {
  return {.host = host,
          .num_cores = 4,
          .memory_bytes = int64_t{8} << 30,
          .shared_bytes = int64_t{1} << 30,
          .num_files = 1024,
          .clock_s = 1000,
          .addresses = {"eth0 10.0.0.1"}};
}

void expect_warning(const std::vector<Facts>& ranks, const std::string& text) {
  const std::vector<std::string> warnings = warnings_of(ranks);
  ASSERT_EQ(warnings.size(), 1u) << text;
  EXPECT_EQ(warnings[0].substr(0, text.size()), text);
}

TEST(Warnings, AreNoneOfGoodHosts) { EXPECT_TRUE(warnings_of({good("a"), good("a"), good("b")}).empty()); }

TEST(Warnings, NameTheHostAndWhatItLacks) {
  Facts bad = good("b");
  bad.num_cores = 1;
  expect_warning({good("a"), bad, bad}, "host b: 2 ranks share 1 cores");
  bad = good("b");
  bad.shared_bytes = 64 << 20;
  expect_warning({good("a"), bad, bad}, "host b: /dev/shm has 64 MiB for 2 ranks");
  EXPECT_TRUE(warnings_of({good("a"), bad}).empty());
  bad = good("b");
  bad.num_files = 256;
  expect_warning({good("a"), bad}, "host b: 256 files may be open at once");
  bad = good("b");
  bad.addresses.clear();
  expect_warning({good("a"), bad}, "host b: no network but loopback");
  EXPECT_TRUE(warnings_of({bad}).empty());
  bad = good("b");
  bad.clock_s = 997;
  expect_warning({good("a"), bad}, "host b: its clock differs by -3 s from that of a");
}

TEST(Facts, OfThisHostAreThere) {
  const Facts facts = facts_of_this_host();
  EXPECT_FALSE(facts.host.empty());
  EXPECT_GE(facts.num_cores, 1);
  EXPECT_GT(facts.memory_bytes, 0);
  EXPECT_GT(facts.num_files, 0);
  EXPECT_GT(facts.clock_s, 1.7e9);
}

}  // namespace
}  // namespace smp::tools
