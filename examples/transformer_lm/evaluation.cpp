// A pass over the batches with an own step function; it draws no random numbers.
#include "examples/transformer_lm/evaluation.h"

#include <torch/torch.h>

#include "examples/transformer_lm/corpus.h"
#include "smp/comm.h"

namespace transformer_lm {

at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(2)}), target.reshape(-1));
}

double evaluate(Model& model, LossStep& loss_of, const at::Tensor& columns, int64_t bptt) {
  const torch::NoGradGuard no_grad;
  model.eval();
  double sum = 0;
  for (int64_t i = 0; i < num_batches(columns, bptt); ++i) {
    const Batch batch = get_batch(columns, i, bptt);
    const auto length = static_cast<double>(batch.data.size(1));  // the last batch is shorter
    sum += loss_of(batch.data, batch.target).reduce_mean().item<double>() * length;
  }
  model.train();
  const auto num_targets = static_cast<double>(columns.size(0) - 1);
  return smp::all_reduce_mean(torch::tensor(sum / num_targets, torch::kDouble), smp::CommGroup::DP_GROUP).item<double>();
}

}  // namespace transformer_lm
