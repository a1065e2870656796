// The step of the test, which reads a value in its body.
#include "examples/mnist/evaluation.h"

#include <torch/torch.h>

#include "examples/common/replicas.h"
#include "examples/mnist/batches.h"
#include "smp/comm.h"
#include "smp/step.h"

namespace mnist {

Evaluation::Evaluation(Model& model, const Images& images, int64_t batch_size)
    : model_(model), images_(images), batch_size_(batch_size) {
  step_ = smp::step([this](at::Tensor data, at::Tensor labels) {
    auto scores = model_(data);
    correct_ += scores.argmax(1).eq(labels).sum().item<int64_t>();
    return torch::nll_loss(scores, labels, /*weight=*/{}, at::Reduction::Sum, kNoLabel);
  });
}

TestResult Evaluation::run() {
  const torch::NoGradGuard no_grad;
  const int64_t rows = examples::rows_per_replica(batch_size_);
  model_.eval();
  correct_ = 0;
  auto sums = torch::zeros({2}, torch::kDouble);  // loss, correct
  for (int64_t first = 0; first < images_.size(); first += batch_size_) {
    const Batch batch = get_filled_batch(images_, first + smp::dp_rank() * rows, rows);
    sums[0] += step_(batch.images, batch.labels).reduce_sum();
  }
  sums[1] = correct_;
  model_.train();
  sums = smp::all_reduce_mean(sums, smp::DP_GROUP) * smp::dp_size();
  return {.loss = sums[0].item<double>() / static_cast<double>(images_.size()),
          .correct = sums[1].item<int64_t>(),
          .total = images_.size()};
}

}  // namespace mnist
