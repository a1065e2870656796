// Counting how many test images the network reads rightly.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "examples/mnist/idx.h"
#include "examples/mnist/model.h"
#include "smp/distributed_model.h"
#include "smp/step_output.h"

namespace mnist {

using Model = smp::DistributedModel<ConvNet>;

struct TestResult {
  double loss = 0;  // mean over all images
  int64_t correct = 0;
  int64_t total = 0;
  double accuracy() const { return static_cast<double>(correct) / static_cast<double>(total); }
};

class Evaluation {
 public:
  /// `model` and `images` must outlive it. `batch_size`: of all replicas together. On every rank.
  Evaluation(Model& model, const Images& images, int64_t batch_size);
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;

  /// One pass over all images in evaluation mode, each counted once; the model is in training mode
  /// afterwards. The result is that of all replicas on ranks with pp_rank() 0, which run step
  /// bodies; others know the loss only. Collective over the world.
  TestResult run();

 private:
  Model& model_;
  const Images& images_;
  int64_t batch_size_;
  int64_t correct_ = 0;  // of this replica, in the present pass
  std::function<smp::StepOutput(at::Tensor, at::Tensor)> step_;
};

}  // namespace mnist
