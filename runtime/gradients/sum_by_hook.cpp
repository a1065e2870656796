// In the order of the program: the hook of a user may do anything.
#include <c10/util/Exception.h>

#include <utility>

#include "runtime/gradients/bucket_sum.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {
namespace {

class SumByHook : public BucketSum {
 public:
  SumByHook(Transport& replicas, std::function<at::Tensor(const at::Tensor&)> hook)
      : replicas_(replicas), hook_(std::move(hook)) {}

  void start(const BucketMemory& bucket, int /*divisor*/) override {
    const at::Tensor flat = bucket.new_flat(bucket.num_elements());
    bucket.pack(flat);
    const at::Tensor gradients = flat.narrow(0, 0, bucket.num_gradients());
    means_ = hook_(gradients.clone());
    TORCH_CHECK_VALUE(means_.defined() && means_.device() == gradients.device() &&
                          means_.sizes().equals(gradients.sizes()) && means_.scalar_type() == gradients.scalar_type(),
                      "communication hook: expected a tensor like the bucket, ", gradients.toString(), " ",
                      gradients.sizes(), ", got ", means_.defined() ? means_.toString() : "an undefined one", " ",
                      means_.defined() ? means_.sizes() : at::IntArrayRef(), ". Return the reduced bucket.");
    if (!means_.is_contiguous() || means_.is_neg()) means_ = means_.clone(at::MemoryFormat::Contiguous);
    flags_ = bucket.flags(flat).clone();
    keeping(std::make_shared<at::Tensor>(flags_),
            [&] { replicas_.all_reduce_sum(memory_of(flags_), flags_.scalar_type()); });
  }

  bool advance() override { return true; }
  void wait() override {}

  // Into new tensors at all times, which plans count on.
  void finish(BucketMemory& bucket, Backward /*backward*/) override {
    bucket.unpack(std::exchange(means_, {}), std::exchange(flags_, {}), Backward::kGoesOn);
  }

 private:
  Transport& replicas_;
  std::function<at::Tensor(const at::Tensor&)> hook_;
  at::Tensor means_, flags_;
};

}  // namespace

std::unique_ptr<BucketSum> sum_by_hook(Transport& replicas, std::function<at::Tensor(const at::Tensor& gradients)> hook) {
  return std::make_unique<SumByHook>(replicas, std::move(hook));
}

}  // namespace smp::runtime
