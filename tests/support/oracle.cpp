// Runs the unsplit model under an interceptor that does nothing but reseed random operators.
#include "tests/support/oracle.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <set>

#include "runtime/capture/interceptor.h"
#include "runtime/device/random.h"
#include "tests/support/bits.h"

namespace smp::support {
namespace {

/// Seeds the k-th random operator of one body with (random state, k).
class Reseeder : public runtime::Interceptor {
 public:
  explicit Reseeder(runtime::RandomState state) : state_(state) {}

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    if (!runtime::is_random(op)) return op.callBoxed(stack);
    runtime::GeneratorHold guard(state_, next_ordinal_++, runtime::draws_of(op, stack));
    op.callBoxed(stack);
  }

 private:
  runtime::RandomState state_;
  uint64_t next_ordinal_ = 0;
};

BodyResult run_body(const ZooModel& model, torch::nn::Module& module, const std::vector<at::Tensor>& microbatch,
                    runtime::RandomState state) {
  Reseeder reseeder(state);
  runtime::InterceptScope scope(reseeder);
  return model.body(module, microbatch);
}

}  // namespace

std::vector<std::vector<at::Tensor>> split_batch(const std::vector<at::Tensor>& full_batch, int microbatches) {
  std::vector<std::vector<at::Tensor>> result(microbatches);
  for (const auto& argument : full_batch) {
    TORCH_CHECK_VALUE(argument.size(0) % microbatches == 0, "oracle: expected a batch divisible by ", microbatches, ", got ",
                      argument.size(0));
    const int64_t rows = argument.size(0) / microbatches;
    for (int m = 0; m < microbatches; ++m) {
      // A clone, because a view's data pointer may be misaligned, and that changes the bits of linear layers.
      result[m].push_back(argument.narrow(0, m * rows, rows).clone(at::MemoryFormat::Contiguous));
    }
  }
  return result;
}

// By the first name of a tensor that has several.
std::map<std::string, at::Tensor> copy_gradients(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> gradients;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : module.named_parameters()) {
    if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
    const auto& gradient = parameter.value().grad();
    gradients[parameter.key()] = gradient.defined() ? gradient.detach().clone() : at::Tensor();
  }
  return gradients;
}

std::map<std::string, at::Tensor> copy_buffers(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> buffers;
  for (const auto& buffer : module.named_buffers()) {
    buffers[buffer.key()] = buffer.value().detach().clone();
  }
  return buffers;
}

OracleResult run_oracle(const ZooModel& model, torch::nn::Module& module, const std::vector<at::Tensor>& full_batch,
                        int microbatches, RandomOptions random, bool training) {
  runtime::UserRandomStateScope user;
  at::AutoGradMode grad_mode(training);
  module.train(training);
  OracleResult result;
  uint64_t index = random.first_microbatch;
  for (const auto& microbatch : split_batch(full_batch, microbatches)) {
    auto body = run_body(model, module, microbatch, {random.base_seed, random.step, index++});
    // Outside of the interceptor: the operators of a backward are not part of the body.
    if (training) {
      body.loss.div(microbatches).backward({}, /*retain_graph=*/!body.more_losses.empty());
      for (const auto& loss : body.more_losses) {
        loss.div(microbatches).backward({}, /*retain_graph=*/true);
      }
    }
    result.losses.push_back(body.loss.detach());
    for (auto& output : body.outputs) output = output.detach();
    result.outputs.push_back(std::move(body.outputs));
  }
  result.gradients = copy_gradients(module);
  result.buffers = copy_buffers(module);
  return result;
}

void expect_same_step(const OracleResult& got, const OracleResult& want, const std::string& what,
                      double relative_gradients) {
  expect_bit_equal(got.losses, want.losses, what + " loss");
  EXPECT_EQ(got.outputs.size(), want.outputs.size()) << what;
  for (size_t m = 0; m < std::min(got.outputs.size(), want.outputs.size()); ++m) {
    expect_bit_equal(got.outputs[m], want.outputs[m], what + " microbatch " + std::to_string(m) + " output");
  }
  expect_bit_equal(got.buffers, want.buffers, what + " buffer");
  if (relative_gradients == 0.0) {
    expect_bit_equal(got.gradients, want.gradients, what + " gradient");
  } else {
    expect_close(got.gradients, want.gradients, relative_gradients, what + " gradient");
  }
}

}  // namespace smp::support
