// The code blocks of docs/capture.md, docs/backward.md and docs/refusals.md: each refusal throws the text under it, each
// way out runs.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>

#include "smp/smp.h"

namespace {

struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    first = register_module("first", torch::nn::Linear(8, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

using TestModel = smp::DistributedModel<TwoLayers>;
using Block = std::function<at::Tensor(TestModel&, at::Tensor, at::Tensor)>;

class Job : public testing::Environment {
 public:
  void SetUp() override {
    smp::init({.microbatches = 2, .log_level = smp::LogLevel::kOff});
    model.emplace(std::make_shared<TwoLayers>());
  }
  void TearDown() override {
    model.reset();
    smp::shutdown();
  }
  std::optional<TestModel> model;
};

Job* const job = static_cast<Job*>(testing::AddGlobalTestEnvironment(new Job));

std::string message_of(const Block& block) {
  auto step = smp::step([&](at::Tensor data, at::Tensor target) { return block(*job->model, data, target); });
  try {
    step(torch::ones({8, 8}), torch::ones({8, 8}));
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// "..." in the page stands for any text.
bool contains(const std::string& message, const std::string& expected) {
  const size_t dots = expected.find("...");
  if (dots == std::string::npos) return message.find(expected) != std::string::npos;
  const size_t head = message.find(expected.substr(0, dots));
  return head != std::string::npos && message.find(expected.substr(dots + 3), head) != std::string::npos;
}

void check_block(const Block& block, const std::string& expected) {
  const std::string message = message_of(block);
  at::autocast::set_autocast_enabled(at::kCPU, false);  // a block that threw has not
  if (expected.empty()) {
    EXPECT_EQ(message, "");
  } else {
    EXPECT_TRUE(contains(message, expected)) << "expected: " << expected << "\ngot: " << message;
  }
}

#include "backward_page_blocks.inc"
#include "capture_page_blocks.inc"
#include "refusals_page_blocks.inc"

}  // namespace
