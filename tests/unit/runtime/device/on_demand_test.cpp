// A program that asks LibTorch about CUDA before it asks smp. The driver is one that shows a GPU and can do nothing else.
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "runtime/device/loaded_devices.h"

namespace smp::runtime {
namespace {

TEST(CudaOnDemand, IsLoadedForAProgramThatAsksLibTorchFirst) {
  ASSERT_NE(dlopen(SMP_DRIVER_OF_TESTS, RTLD_NOW | RTLD_GLOBAL), nullptr) << dlerror();
  ASSERT_TRUE(has_gpu());
  at::manual_seed(1);
  std::string refusal;
  try {
    at::globalContext().lazyInitDevice(c10::kCUDA);
  } catch (const c10::Error& error) {
    refusal = error.what_without_backtrace();
  }
  EXPECT_NE(refusal, "") << "of a GPU that is none";
  EXPECT_EQ(refusal.find("without ATen_cuda library"), std::string::npos) << refusal;
}

}  // namespace
}  // namespace smp::runtime
