// Averages gradients over replicas, bucket by bucket, while the last backward of a step goes on.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/gradients/bucket_sum.h"
#include "runtime/libtorch/node_handle.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// The gradients of one bucket, flat, and its place among all. Returns what replaces them, on every replica alike.
using BucketHook = std::function<at::Tensor(const at::Tensor& gradients, int64_t index, bool is_last)>;

struct ReducerOptions {
  int64_t bucket_bytes = int64_t{25} << 20;
  /// Buckets lie in memory that all replicas read, where that can be had; false: they are sent.
  bool shares_memory = true;
  bool overlap = true;  // false: nothing is sent before finish()
  bool looks_for_nonfinite = false;
  int number = 0;     // of this reducer among those of the same replicas: their messages do not mix
  BucketHook hook{};  // instead of the mean
};

/// The gradients of one rank's parameters, which its replicas hold too, in the same order.
///
/// Buckets are filled from the last parameter to the first, as a backward does, and sent in that order: a bucket leaves when
/// all its gradients are final and those before it have left. Sums are made element by element in the order of the replicas,
/// so that neither buckets nor timing change a bit. A gradient that is undefined here and defined on another replica counts
/// as zeros; one that is undefined everywhere stays so.
///
///   reducer.begin(replicas.size());
///   reducer.expect({i});          // the backward that follows is the last to touch parameter i
///   ... backward, whose hooks send what is complete ...
///   reducer.add_ready({i});       // whether it got a gradient or not
///   reducer.finish();             // all others are taken as they are
class GradientReducer {
 public:
  /// parameters: floating-point or complex leaves, in the model's order. Collective: throws
  /// c10::ValueError on every replica alike when they differ in number, shape or type.
  GradientReducer(std::vector<at::Tensor> parameters, Transport& replicas, ReducerOptions options);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const ReducerOptions& options() const { return options_; }
  /// Is it of these parameters, and have they the types and sizes that its buckets were made for?
  bool is_for(const std::vector<at::Tensor>& parameters) const;
  /// Of the block that this rank has for its buckets where replicas share memory; 0: they are sent.
  int64_t shared_bytes() const { return sum_->shared_bytes(); }

  /// divisor: of the sums over replicas.
  void begin(int divisor);
  /// These become ready by their next accumulation.
  void expect(const std::vector<size_t>& parameters);
  void add_ready(const std::vector<size_t>& parameters);
  /// Moves on the sum that is under way, if any; touches no gradient, and waits for nobody. Throws CommError.
  void progress();
  /// Collective. Throws CommError; the gradients of each bucket are then either all averaged or all as they were.
  void finish();
  /// Parameters whose gradients held NaN or infinity here, before the mean of this step; those that
  /// have been taken are forgotten.
  std::vector<size_t> take_nonfinite() { return std::exchange(nonfinite_, {}); }

 private:
  struct Bucket {
    BucketMemory memory;
    int64_t num_missing = 0;  // gradients
    Event ready{};            // of a device, when none is missing
  };

  void check_same_layout() const;
  void make_buckets();
  std::unique_ptr<BucketSum> new_sum();
  void watch(size_t parameter);
  void accumulated(size_t parameter);
  void mark_ready(size_t parameter);
  void advance();

  using Layout = std::pair<c10::ScalarType, int64_t>;  // type and number of elements
  static Layout layout_of(const at::Tensor& tensor) { return {tensor.scalar_type(), tensor.numel()}; }

  std::vector<at::Tensor> parameters_;
  std::vector<Layout> layouts_;  // of these, when the buckets were made
  Transport& replicas_;
  ReducerOptions options_;
  /// Where a device does all this, in memory of the lane: behind gradients that are ready, beside the rest of the backward,
  /// which goes on behind the means. Null: in the order of the program.
  std::unique_ptr<DeviceLane> lane_;
  std::vector<Bucket> buckets_;  // in the order in which they leave
  std::vector<size_t> bucket_of_;
  std::unique_ptr<BucketSum> sum_;
  std::vector<std::pair<NodeHandle, uintptr_t>> watched_;  // alive, else their hooks go
  std::vector<char> is_expected_, is_ready_;               // by parameter, in this step
  Backward backward_ = Backward::kIsOver;
  size_t next_ = 0;            // bucket to leave
  bool is_under_way_ = false;  // the one before it
  int divisor_ = 1;
  std::vector<size_t> nonfinite_;
};

}  // namespace smp::runtime
