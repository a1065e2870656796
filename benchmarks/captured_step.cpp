// Capture, plan for one rank, and replay.
#include "benchmarks/captured_step.h"

#include <torch/torch.h>

#include <algorithm>

#include "benchmarks/measure.h"
#include "examples/transformer_lm/model.h"
#include "partitioner/partition/partition.h"

namespace smp::benchmarks {

using partitioner::ValueId;
using partitioner::ValueKind;

at::Tensor Case::run_eagerly() const {
  const at::Tensor loss = body(inputs);
  loss.backward();
  return loss;
}

Case transformer(const TransformerSize& size, double dropout) {
  torch::manual_seed(1);
  auto net = std::make_shared<transformer_lm::TransformerLm>(transformer_lm::ModelOptions{
      .vocab = size.vocabulary, .width = size.width, .heads = 4, .hidden = 4 * size.width, .layers = 4, .dropout = dropout});
  const auto random_tokens = [&size] { return torch::randint(size.vocabulary, {size.rows, size.tokens}, torch::kLong); };
  return {net, {random_tokens(), random_tokens()}, [net, vocabulary = size.vocabulary](const auto& inputs) {
            const auto logits = net->forward(inputs[0]);
            return torch::nn::functional::cross_entropy(logits.reshape({-1, vocabulary}), inputs[1].reshape({-1}));
          }};
}

runtime::Bindings bindings_of(const torch::nn::Module& module) {
  std::vector<runtime::NamedTensor> tensors;
  for (const auto& item : module.named_parameters()) {
    tensors.push_back({ValueKind::kParameter, item.key(), item.value()});
  }
  for (const auto& item : module.named_buffers()) {
    tensors.push_back({ValueKind::kBuffer, item.key(), item.value()});
  }
  return runtime::Bindings(std::move(tensors));
}

runtime::CapturedBody capture_loss(runtime::BodyCapture& capture, const std::vector<at::Tensor>& inputs,
                                   const LossBody& body) {
  std::vector<at::Tensor> ghosts = capture.begin(inputs, "train");
  runtime::CapturedBody captured;
  {
    std::vector<at::Tensor> returned;
    {
      const runtime::InterceptScope scope(capture);
      returned = {body(ghosts)};
      capture.mark_backward(returned[0]);
    }
    captured = capture.finish(returned);
  }
  ghosts.clear();
  return captured;
}

OneStageReplay::OneStageReplay(const torch::nn::Module& module, const std::vector<at::Tensor>& inputs, const LossBody& body,
                               StageMaker make_stage)
    : bindings_(bindings_of(module)), capture_(bindings_), inputs_(inputs), captured_(capture_loss(capture_, inputs, body)) {
  const runtime::Recording& recording = *captured_.recording;
  plan_ = partitioner::partition(recording.graph, {});
  runtime::StageOptions options;
  options.stays_on_autograd = [said = stays_on_autograd_](const std::string& reason) { *said = reason; };
  stage_ = make_stage(recording.graph, plan_, 0, options);
  tensors_.resize(recording.graph.values.size());
  for (const auto& constant : recording.constants) {
    tensors_[static_cast<size_t>(constant.value)] = constant.tensor;
  }
  for (size_t v = 0; v < tensors_.size(); ++v) {
    for (const runtime::NamedTensor& named : bindings_.tensors()) {
      if (recording.graph.values[v].name == named.name) tensors_[v] = named.tensor;
    }
  }
}

at::Tensor OneStageReplay::run() {
  const partitioner::Graph& graph = captured_.recording->graph;
  runtime::MicrobatchContext context;
  context.microbatch = microbatch_;
  context.is_last = true;
  context.random = {0, 0, static_cast<uint64_t>(microbatch_)};
  std::vector<at::Tensor> inputs;
  for (ValueId id : stage_->values().inputs) {
    const auto at = std::find(graph.inputs.begin(), graph.inputs.end(), id);
    inputs.push_back(inputs_.at(static_cast<size_t>(at - graph.inputs.begin())));
  }
  const auto outputs =
      stage_->forward(context, std::move(inputs), [this](ValueId id) { return tensors_[static_cast<size_t>(id)]; });
  stage_->backward(microbatch_, 0, {torch::ones_like(outputs.at(0))});
  ++microbatch_;
  return outputs.at(0).detach();
}

void require_same_step(torch::nn::Module& module, OneStageReplay& replay, const std::function<at::Tensor()>& eager) {
  module.zero_grad();
  const at::Tensor want = eager();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) gradients.push_back(parameter.grad().clone());
  module.zero_grad();
  const at::Tensor got = replay.run();
  require(torch::equal(got, want.detach()), "the replayed loss differs from the eager one");
  const auto parameters = module.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    require(torch::equal(parameters[i].grad(), gradients[i]), "a replayed gradient differs");
  }
}

}  // namespace smp::benchmarks
