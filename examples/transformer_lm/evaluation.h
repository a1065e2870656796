// Measuring a model on text that it does not learn from.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "examples/transformer_lm/model.h"
#include "smp/distributed_model.h"
#include "smp/step_output.h"

namespace transformer_lm {

using Model = smp::DistributedModel<TransformerLm>;
/// Loss of each microbatch of (data, target), both [batch, T].
using LossStep = std::function<smp::StepOutput(at::Tensor, at::Tensor)>;

/// Mean cross-entropy of logits [batch, T, vocab] against target [batch, T]; a scalar.
at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& target);

/// Mean loss per token of `columns` (see batchify) over all replicas, in evaluation mode and
/// without gradients; the model is in training mode afterwards. Collective over the world.
double evaluate(Model& model, LossStep& loss_of, const at::Tensor& columns, int64_t bptt);

}  // namespace transformer_lm
