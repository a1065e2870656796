// The host waits for no device while a backward goes on: it is told when the sum is there.
#include <ATen/ops/cat.h>

#include <optional>

#include "runtime/gradients/bucket_sum.h"
#include "runtime/libtorch/memory_tensor.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/running_sum.h"

namespace smp::runtime {
namespace {

/// Numbers of a device of which the host learns without waiting for it.
class ToldNumbers {
 public:
  /// numbers: dense Float ones, as they are when this rank's device comes here.
  explicit ToldNumbers(const at::Tensor& numbers)
      : device_(device_holding(numbers)), memory_(device_.allocate_pinned(static_cast<int64_t>(numbers.nbytes()))) {
    device_.start_copy(memory_.get(), data_of(numbers), static_cast<int64_t>(numbers.nbytes()));
    end_ = device_.record();
  }
  /// Memory to which the device may still write stays until the process ends.
  ~ToldNumbers() {
    bool is_over = false;
    try {
      is_over = are_there();
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): a device that has failed; whoever uses it next hears why
    }
    if (!is_over) abandon(std::make_shared<c10::DataPtr>(std::move(memory_)));
  }

  bool are_there() const { return device_.has_reached(end_); }
  /// Once they are there.
  float* data() const { return static_cast<float*>(memory_.get()); }

 private:
  const Device& device_;
  c10::DataPtr memory_;  // of the host, pinned
  Event end_;
};

class SumByMessages : public BucketSum {
 public:
  SumByMessages(Transport& replicas, int tag) : replicas_(replicas), tag_(tag) {}

  void start(const BucketMemory& bucket, int divisor) override {
    const at::Tensor flat = bucket.new_flat(bucket.num_elements());
    bucket.pack(flat);
    Sending& sending = sending_.emplace(Sending{.flat = flat, .flags = bucket.flags(flat), .norms = bucket.norms()});
    const auto divide = bucket.divider(flat, divisor);
    // The storage is what the messages read and write, whatever happens to the tensor.
    const auto owner = std::make_shared<at::Tensor>(flat);
    constexpr int64_t kMaxPartBytes = int64_t{1} << 30;
    if (static_cast<int64_t>(flat.nbytes()) / replicas_.size() < kMaxPartBytes) {
      sending.sum.emplace(replicas_, tag_, memory_of(flat), owner, flat.scalar_type(), divide);
      return;
    }
    keeping(owner, [&] { replicas_.all_reduce_sum(memory_of(flat), flat.scalar_type()); });
    divide(0, flat.numel());
  }

  bool advance() override {
    if (sending_->sum && !sending_->sum->advance()) return false;
    return is_on_host(sending_->flat) || tell_host().are_there();
  }

  // As long as any message: what has come may be behind a transfer whose other rank is gone.
  void wait() override {
    if (!sending_) return;
    if (sending_->sum) sending_->sum->wait("gradients");
    if (advance()) return;
    replicas_.wait_until([&] { return tell_host().are_there(); },
                         [](double seconds) { return CommError::Where{.operation = "gradients", .seconds = seconds}; });
  }

  // Into new tensors at all times, which plans count on.
  void finish(BucketMemory& bucket, Backward /*backward*/) override {
    if (sending_->told) {
      float* const told = sending_->told->data();
      if (sending_->norms.defined()) bucket.look_at(told + bucket.num_flags(), sending_->norms.numel());
      sending_->flags = tensor_on(host(), told, {bucket.num_flags()}, {1}, at::kFloat, /*holder=*/nullptr);
    }
    bucket.unpack(sending_->flat, sending_->flags, Backward::kGoesOn);
    sending_.reset();
  }

 private:
  struct Sending {
    at::Tensor flat, flags;  // these are its end
    at::Tensor norms;
    std::optional<RunningSum> sum{};      // none: it was waited for
    std::unique_ptr<ToldNumbers> told{};  // of a device: the flags, then the norms
  };

  const ToldNumbers& tell_host() {
    if (!sending_->told) {
      const at::Tensor flags = sending_->flags.to(at::kFloat);
      const at::Tensor numbers = sending_->norms.defined() ? at::cat({flags, sending_->norms}) : flags;
      sending_->told = std::make_unique<ToldNumbers>(numbers);
    }
    return *sending_->told;
  }

  Transport& replicas_;
  int tag_;
  std::optional<Sending> sending_;
};

}  // namespace

std::unique_ptr<BucketSum> sum_by_messages(Transport& replicas, int tag) {
  return std::make_unique<SumByMessages>(replicas, tag);
}

}  // namespace smp::runtime
