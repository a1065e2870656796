// A captured loss outside of any job, and its replay as one stage, to hold against eager code.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/capture/body_capture.h"
#include "runtime/stage/stage.h"

namespace smp::benchmarks {

/// From the tensors of one microbatch to its loss.
using LossBody = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

runtime::Bindings bindings_of(const torch::nn::Module& module);

/// A module, what it is given, and its loss.
struct Case {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> inputs;
  LossBody body;

  /// Forward and backward of one microbatch.
  at::Tensor run_eagerly() const;
};

struct TransformerSize {
  int64_t width, vocabulary, rows, tokens;
};

/// The language model of the example, with four layers.
Case transformer(const TransformerSize& size, double dropout);

/// One run of `body` through `capture`, from begin to finish; the loss is differentiated and returned.
runtime::CapturedBody capture_loss(runtime::BodyCapture& capture, const std::vector<at::Tensor>& inputs,
                                   const LossBody& body);

/// Makes a stage: runtime::make_autograd_stage, or runtime::make_tape_stage.
using StageMaker = decltype(&runtime::make_autograd_stage);

/// Forward and backward of the captured body of `module` as the only stage of a plan.
class OneStageReplay {
 public:
  OneStageReplay(const torch::nn::Module& module, const std::vector<at::Tensor>& inputs, const LossBody& body,
                 StageMaker make_stage = runtime::make_autograd_stage);

  /// One microbatch; gradients accumulate in the module's parameters. Returns the loss, detached.
  at::Tensor run();
  size_t num_operators() const { return captured_.recording->graph.nodes.size(); }
  /// Why the stage, or a part of its work, is not taped; empty while it is.
  const std::string& stays_on_autograd() const { return *stays_on_autograd_; }

 private:
  runtime::Bindings bindings_;
  runtime::BodyCapture capture_;
  std::vector<at::Tensor> inputs_;
  runtime::CapturedBody captured_;
  partitioner::Plan plan_;
  std::shared_ptr<std::string> stays_on_autograd_ = std::make_shared<std::string>();
  std::unique_ptr<runtime::Stage> stage_;
  std::vector<at::Tensor> tensors_;  // by value: parameters, buffers, constants
  int microbatch_ = 0;
};

/// Ends the program unless `replay` gives the loss and the gradients of `eager`, bit for bit.
void require_same_step(torch::nn::Module& module, OneStageReplay& replay, const std::function<at::Tensor()>& eager);

}  // namespace smp::benchmarks
