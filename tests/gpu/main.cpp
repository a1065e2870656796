// GoogleTest's main on a GPU: a machine without one fails, it skips nothing.
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <iostream>

#include "runtime/device/loaded_devices.h"

int main(int argc, char** argv) {
  at::manual_seed(0);  // as programs do before smp::init
  try {                // first: whoever lists the tests asks whether they can run
    const smp::runtime::Device& device = smp::runtime::cuda_device();
    smp::runtime::use_device(device);
    device.use(0);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  if (smp::runtime::this_ranks_device().type == smp::runtime::host().type) {
    std::cerr << "a test has chosen the CPU, and those behind it have shown nothing of a GPU\n";
    return 1;
  }
  return result;
}
