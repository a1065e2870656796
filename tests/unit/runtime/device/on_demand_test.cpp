// A program that asks LibTorch about CUDA before it asks smp. The driver is one that shows a GPU and can do nothing else.
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "runtime/device/loaded_devices.h"

namespace smp::runtime {
namespace {

TEST(CudaOnDemand, IsRefusedAndNotLoadedWhereNoGpuIsShown) {
  void* const driver = dlopen(SMP_DRIVER_OF_TESTS, RTLD_NOW | RTLD_GLOBAL);
  ASSERT_NE(driver, nullptr) << dlerror();
  auto& num_gpus = *static_cast<int*>(dlsym(driver, "smp_gpus_of_tests"));
  num_gpus = 0;
  std::string refusal;
  try {
    cuda_device();
  } catch (const c10::Error& error) {
    refusal = error.what_without_backtrace();
  }
  num_gpus = 1;
  EXPECT_EQ(refusal,
            "device: expected a GPU for \"cuda\", got a driver that shows none to this process. Look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or set device to \"cpu\".");
  EXPECT_EQ(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), nullptr) << "a rank of the CPU stays small";
}

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
