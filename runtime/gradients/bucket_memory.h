// The gradients of one bucket in flat memory, where replicas sum them. Sums and sends nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "runtime/device/device.h"

namespace smp::runtime {

enum class Backward : uint8_t { kGoesOn, kIsOver };

/// Parameters of one type, and how their gradients lie in a flat tensor: one after another, complex numbers as pairs; then a
/// flag for each, which becomes how many replicas have one.
class BucketMemory {
 public:
  /// Copies means, from an element of the flat tensor on, to a dense tensor.
  using Read = std::function<void(int64_t first, const at::Tensor& to)>;

  /// nonfinite: gets the numbers of parameters whose gradients hold NaN or infinity here; null: nobody looks. lane: that on
  /// which all this is done, new gradients being the lane's, or null.
  BucketMemory(std::vector<size_t>* nonfinite, DeviceLane* lane) : nonfinite_(nonfinite), lane_(lane) {}

  /// Whether it is of their type, and takes at most so many bytes with it.
  bool has_room_for(const at::Tensor& parameter, int64_t most_bytes) const;
  void add(size_t number, const at::Tensor& parameter);

  int64_t num_flags() const { return static_cast<int64_t>(parameters_.size()); }
  int64_t num_gradients() const { return num_gradients_; }
  int64_t num_elements() const { return num_gradients_ + num_flags(); }
  int64_t num_bytes() const { return num_elements() * static_cast<int64_t>(c10::elementSize(dtype())); }
  c10::ScalarType dtype() const { return c10::toRealValueType(parameters_.front().scalar_type()); }

  /// On the device of the parameters.
  at::Tensor new_flat(int64_t num_elements) const;
  at::Tensor flags(const at::Tensor& flat) const { return flat.narrow(0, num_gradients_, num_flags()); }
  /// Looks for NaN and infinity as well, unless that is on a lane.
  void pack(const at::Tensor& flat) const;
  /// Of the gradients that are there, by which look_at() knows on which to look. Undefined: there is nothing to look for.
  at::Tensor norms() const;
  void look_at(const float* norms, int64_t num_norms) const;
  /// Divides the gradients among some elements of `flat`, which lives as long.
  std::function<void(int64_t first, int64_t num_elements)> divider(const at::Tensor& flat, int divisor) const;
  /// Parameters of which some replica has a gradient get the mean.
  void unpack(const Read& read, const at::Tensor& flags, Backward backward);
  /// means: dense, from the first element on.
  void unpack(const at::Tensor& means, const at::Tensor& flags, Backward backward);

 private:
  std::vector<size_t>* nonfinite_;
  DeviceLane* lane_;
  std::vector<size_t> numbers_;
  std::vector<at::Tensor> parameters_;
  int64_t num_gradients_ = 0;  // real numbers of these
};

}  // namespace smp::runtime
