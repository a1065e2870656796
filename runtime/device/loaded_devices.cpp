// The driver and our own library by dlopen.
#include "runtime/device/loaded_devices.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <string>

namespace smp::runtime {
namespace {

constexpr const char* kDriver = "libcuda.so.1";
constexpr const char* kOwnLibrary = "libsmp_cuda.so";
constexpr const char* kOrOnCpu = ", or set device to \"cpu\".";

std::string last_dl_error() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

/// GPUs that the driver shows to this process. Throws where there is no driver.
int num_gpus() {
  void* const driver = dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(driver != nullptr, "device: expected NVIDIA's driver (", kDriver,
              ") for \"cuda\", got none: ", last_dl_error(),
              ". Start on a machine with a GPU (in a container with --gpus all)", kOrOnCpu);
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  if (init == nullptr || get_count == nullptr || init(0) != 0 || get_count(&count) != 0) return 0;
  return count;
}

void* load_own_library() {
  // Global, as LibTorch's own Python package loads it: its parts find one another by their names.
  void* const library = dlopen(kOwnLibrary, RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(library != nullptr, "device: expected ", kOwnLibrary, " for \"cuda\", got: ", last_dl_error(),
              ". Build smp on a torch with CUDA (SMP_WITH_CUDA=ON)", kOrOnCpu);
  return library;
}

// LibTorch looks for its part for CUDA once, at the first call that has to do with CUDA, and goes without for good where it
// is not there. torch::manual_seed is such a call, and programs make it before smp::init: then the part is loaded there.
constexpr const char* kHooks = "CUDAHooks";
std::unique_ptr<at::CUDAHooksInterface> hooks_on_demand(at::CUDAHooksArgs args) {
  static std::atomic<bool> was_asked = false;
  if (was_asked.exchange(true)) return nullptr;  // by itself: the library has brought another LibTorch than this one
  try {
    if (is_device_chosen() || !has_gpu()) return nullptr;  // a rank that has chosen the CPU stays small
    load_own_library();                                    // and asks it nothing: LibTorch waits for these hooks
  } catch (const c10::Error&) {                            // whoever asks for the device hears why
    return nullptr;
  }
  return at::CUDAHooksRegistry()->Create(kHooks, args);  // of that part, which has taken this one's place
}

[[maybe_unused]] const bool are_on_demand = [] {
  const bool is_loaded = at::CUDAHooksRegistry()->Has(kHooks);
  if (!is_loaded) at::CUDAHooksRegistry()->Register(kHooks, hooks_on_demand, c10::REGISTRY_FALLBACK);
  return !is_loaded;
}();

}  // namespace

bool has_gpu() {
  try {
    return num_gpus() > 0;
  } catch (const c10::Error&) {
    return false;
  }
}

const Device& cuda_device() {
  static const Device& loaded = []() -> const Device& {
    TORCH_CHECK(num_gpus() > 0,
                "device: expected a GPU for \"cuda\", got a driver that shows none to this process. Look at ",
                "nvidia-smi and CUDA_VISIBLE_DEVICES", kOrOnCpu);
    const auto make = reinterpret_cast<const Device* (*)()>(dlsym(load_own_library(), "smp_cuda_device"));
    TORCH_CHECK(make != nullptr, "device: expected ", kOwnLibrary,
                " of this version of smp, got another: ", last_dl_error());
    return *make();
  }();
  return loaded;
}

}  // namespace smp::runtime
