// Numbers of a device of which the host learns without waiting for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "runtime/device/device.h"

namespace smp::runtime {

class ToldNumbers {
 public:
  /// numbers: dense Float ones, as they are when this rank's device comes here.
  explicit ToldNumbers(const at::Tensor& numbers);
  /// Memory to which the device may still write stays until the process ends.
  ~ToldNumbers();
  ToldNumbers(const ToldNumbers&) = delete;
  ToldNumbers& operator=(const ToldNumbers&) = delete;

  bool are_there() const { return device_.has_reached(end_); }
  /// Once they are there.
  float* data() const { return static_cast<float*>(memory_.get()); }

 private:
  const Device& device_;
  c10::DataPtr memory_;  // of the host, pinned
  Event end_;
};

}  // namespace smp::runtime
