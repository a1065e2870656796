// Known devices, by the names that drivers give them.
#include "partitioner/cost/device_table.h"

#include <gtest/gtest.h>

namespace smp::partitioner {
namespace {

std::string_view found_by(std::string_view name) {
  const KnownDevice* device = find_known_device(name);
  return device == nullptr ? "" : device->name;
}

TEST(KnownDevices, AreFoundByTheLongestNameInWholeWords) {
  EXPECT_EQ(found_by("H100"), "H100");
  EXPECT_EQ(found_by("NVIDIA H100 80GB HBM3"), "H100");
  EXPECT_EQ(found_by("NVIDIA H100 PCIe"), "H100 PCIe");
  EXPECT_EQ(found_by("NVIDIA A100-SXM4-80GB"), "A100");
  EXPECT_EQ(found_by("NVIDIA A100-SXM4-40GB"), "A100-SXM4-40GB");
  EXPECT_EQ(found_by("NVIDIA A100 80GB PCIe"), "A100 80GB PCIe");
  EXPECT_EQ(found_by("Tesla V100-SXM2-16GB"), "V100");
  EXPECT_EQ(found_by("NVIDIA GeForce RTX 4090"), "RTX 4090");
  EXPECT_EQ(found_by("NVIDIA L4"), "L4");
  EXPECT_EQ(found_by("NVIDIA H100 NVL"), "H100 NVL");
  EXPECT_EQ(found_by("Tesla V100-PCIE-32GB"), "V100-PCIE-32GB");
  for (const char* none :
       {"NVIDIA L40", "A100 40GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"}) {
    EXPECT_EQ(found_by(none), "") << none;
  }
  EXPECT_EQ(found_by(""), "");
}

TEST(KnownDevices, ComputeAsTheJobUsesThem) {
  const KnownDevice& h100 = *find_known_device("H100");
  const DeviceModel plain = device_model(h100, {}), tf32 = device_model(h100, {.tf32 = true}),
                    launched = device_model(h100, {.graphs = false}), direct = device_model(h100, {.direct = true});
  EXPECT_GT(plain.half_gflops, 5 * plain.peak_gflops);
  EXPECT_GT(tf32.peak_gflops, 5 * plain.peak_gflops);
  EXPECT_EQ(tf32.half_gflops, plain.half_gflops);
  EXPECT_GT(launched.forward_overhead_us, plain.forward_overhead_us);
  EXPECT_LT(direct.message_us(1 << 20), plain.message_us(1 << 20));
}

}  // namespace
}  // namespace smp::partitioner
