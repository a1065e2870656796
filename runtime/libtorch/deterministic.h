// LibTorch's switch for operators that have several ways, for a while.
#pragma once

#include <ATen/Context.h>

#include <mutex>

namespace smp::runtime {

/// While one lives, operators take a way that gives the same bits in every run, where they have one and LibTorch does not
/// ask for more than a warning otherwise. A setting of the process: what ranks that are its threads compute meanwhile may
/// have other bits, where operators have several ways.
class DeterministicScope {
 public:
  DeterministicScope() {
    const std::lock_guard<std::mutex> lock(setting().mutex);
    if (setting().num_scopes++ > 0) return;
    auto& context = at::globalContext();
    setting().was_on = context.deterministicAlgorithms();
    setting().was_on_in_cudnn = context.deterministicCuDNN();
    if (!setting().was_on) context.setDeterministicAlgorithms(true, /*warn_only=*/true);
    context.setDeterministicCuDNN(true);
  }
  ~DeterministicScope() {
    const std::lock_guard<std::mutex> lock(setting().mutex);
    if (--setting().num_scopes > 0) return;
    auto& context = at::globalContext();
    if (!setting().was_on) context.setDeterministicAlgorithms(false, /*warn_only=*/false);
    context.setDeterministicCuDNN(setting().was_on_in_cudnn);
  }
  DeterministicScope(const DeterministicScope&) = delete;
  DeterministicScope& operator=(const DeterministicScope&) = delete;

  /// What the program has asked for, whether or not one lives.
  static bool is_on_without() {
    const std::lock_guard<std::mutex> lock(setting().mutex);
    return setting().num_scopes > 0 ? setting().was_on : at::globalContext().deterministicAlgorithms();
  }
  static bool is_on_in_cudnn_without() {
    const std::lock_guard<std::mutex> lock(setting().mutex);
    return setting().num_scopes > 0 ? setting().was_on_in_cudnn : at::globalContext().deterministicCuDNN();
  }

 private:
  struct Setting {
    std::mutex mutex;
    int num_scopes = 0;
    bool was_on = false, was_on_in_cudnn = false;
  };
  static Setting& setting() {
    static Setting setting;
    return setting;
  }
};

}  // namespace smp::runtime
