// Steps under CPU autocast against the same loop without smp, bit for bit.
#include "tests/support/autocast.h"

#include <set>

#include "tests/support/split_run.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::Autocast;
using support::expect_bit_equal;
using tests::rows;
using tests::run_smp_ranks;

/// Linear layers, norms, attention, in-place sums and a convolution: every policy of autocast.
struct Mixed : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {  // [batch, 4, 8]
    x = torch::relu(batch_norm(conv(x.transpose(1, 2))).transpose(1, 2));
    x = norm(x + first(x));
    {
      const Autocast off(at::kCPU, false);
      x = x.matmul(x.transpose(1, 2)).matmul(x) / 8;
    }
    x = encoder(x.transpose(0, 1)).transpose(0, 1);
    x = x + torch::softmax(third(x), -1) * torch::cat({second(x).slice(-1, 0, 4), x.slice(-1, 4, 8)}, -1);
    dtypes.push_back(x.scalar_type());
    return last(x);
  }
  torch::nn::Conv1d conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(8, 8, 3).padding(1)));
  torch::nn::BatchNorm1d batch_norm = register_module("batch_norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
  torch::nn::TransformerEncoderLayer encoder = register_module(
      "encoder",
      torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0)));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
  std::vector<at::ScalarType> dtypes;
};

class AutocastStep : public testing::TestWithParam<int> {};

TEST_P(AutocastStep, HasTheBitsOfTheUnsplitModel) {
  tests::Loop<Mixed> loop{.ranks = GetParam(), .config = {.microbatches = 2}, .optimizes = true};
  loop.batch = [](int step) { return rows(16, 8, 10 + step).view({4, 4, 8}); };
  loop.look = [](auto&) {
    for (const auto& report : support::stage_reports()) EXPECT_GT(report.num_taped, 0) << report.stays_on_autograd;
  };
  tests::expect_as_in_a_loop<Mixed>(loop, [](const tests::BodyRun<Mixed>& run) {
    at::Tensor loss;
    {
      const Autocast on(at::kCPU);
      loss = torch::mse_loss(run.forward(run.data), run.data.slice(-1, 0, 4));
    }
    run.trace.push_back(static_cast<double>(run.net.dtypes.back()));
    return run.trained(loss);
  });
}

TEST_P(AutocastStep, CastsAWeightAnewForEachUse) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = tests::make_net(), twin = tests::make_net();
    DistributedModel<tests::SmallNet> model(net);
    const auto loss_of = [](tests::SmallNet& module, const at::Tensor& data) {
      const Autocast on(at::kCPU);
      return module.fourth(module.second(module.second(module.first(data)))).square().mean();
    };
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = loss_of(*net, data);
      model.backward(loss);
      return loss;
    });
    const at::Tensor data = rows(4, 8, 1);
    at::autocast::set_autocast_cache_enabled(false);
    std::vector<at::Tensor> want;
    for (const auto& part : support::split_batch({data}, 2)) {
      want.push_back(loss_of(*twin, part[0]));
      want.back().div(2).backward();
      want.back() = want.back().detach();
    }
    at::autocast::set_autocast_cache_enabled(true);
    expect_bit_equal(step(data).outputs(), want, "loss");
    for (const auto& [name, tensor] : model.local_named_parameters()) {
      if (name.find("third") != std::string::npos) continue;
      support::expect_close(tensor.grad(), twin->named_parameters()[name].grad(), 1e-6, name);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, AutocastStep, testing::Values(1, 2, 3));

struct Operators {
  std::string name;
  std::function<at::Tensor(const at::Tensor& x)> call;  // x: [4, 8, 8] float, from a linear layer
};

void PrintTo(const Operators& operators, std::ostream* out) { *out << operators.name; }

std::vector<Operators> operators() {
  namespace F = torch::nn::functional;
  const auto lstm = std::make_shared<torch::nn::LSTMImpl>(torch::nn::LSTMOptions(8, 4).num_layers(2));
  const auto projected = std::make_shared<torch::nn::LSTMImpl>(torch::nn::LSTMOptions(8, 4).proj_size(2));
  const auto gru = std::make_shared<torch::nn::GRUImpl>(torch::nn::GRUOptions(8, 4));
  for (torch::nn::Module* module : std::initializer_list<torch::nn::Module*>{lstm.get(), projected.get(), gru.get()}) {
    for (at::Tensor& parameter : module->parameters()) parameter.requires_grad_(false);
  }
  const at::Tensor weight = rows(8, 8, 5), labels = torch::tensor({1, 2, 3, 0});
  return {
      {"Einsum", [](const at::Tensor& x) { return torch::einsum("bij,bjk->bik", {x, x}); }},
      {"ScaledDotProductAttention",
       [](const at::Tensor& x) {
         const at::Tensor heads = x.view({4, 8, 2, 4}).transpose(1, 2);
         return at::scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape({4, 8, 8});
       }},
      {"CrossEntropy", [=](const at::Tensor& x) { return F::cross_entropy(x.select(1, 0).matmul(weight), labels); }},
      {"BinaryCrossEntropy",
       [=](const at::Tensor& x) { return F::binary_cross_entropy_with_logits(x.matmul(weight), torch::sigmoid(x)); }},
      {"Convolutions",
       [=](const at::Tensor& x) {
         return F::conv_transpose1d(F::conv1d(x, weight.view({8, 8, 1})), weight.view({8, 8, 1}));
       }},
      {"Distance", [=](const at::Tensor& x) { return torch::cdist(x.matmul(weight), x); }},
      {"Product", [=](const at::Tensor& x) { return x.matmul(weight).prod(-1); }},
      {"Quantile", [=](const at::Tensor& x) { return x.matmul(weight).quantile(0.5, -1); }},
      {"Prelu", [](const at::Tensor& x) { return torch::prelu(x, torch::full({1}, 0.25)); }},
      {"StackOfTwoDtypes", [=](const at::Tensor& x) { return torch::stack({x.matmul(weight), x}); }},
      {"SumInPlace", [=](const at::Tensor& x) { return x.matmul(weight).add_(x).mul_(2); }},
      {"Doubles", [](const at::Tensor& x) { return x.to(torch::kDouble).matmul(x.to(torch::kDouble)); }},
      {"Half",
       [=](const at::Tensor& x) {
         at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
         const at::Tensor product = x.matmul(weight);
         at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
         return product;
       }},
      {"Lstm", [=](const at::Tensor& x) { return std::get<0>(lstm->forward(x)); }},
      {"LstmOfALowerDtype", [=](const at::Tensor& x) { return std::get<0>(lstm->forward(x.matmul(weight))); }},
      {"LstmState", [=](const at::Tensor& x) { return std::get<1>(std::get<1>(lstm->forward(x))); }},
      {"LstmWithProjection", [=](const at::Tensor& x) { return std::get<0>(projected->forward(x)); }},
      {"Gru", [=](const at::Tensor& x) { return std::get<0>(gru->forward(x)); }},
      {"Inverse", [](const at::Tensor& x) { return torch::linalg_inv(x.matmul(x) + torch::eye(8)); }},
      {"Padding",
       [=](const at::Tensor& x) { return F::pad(x.matmul(weight), F::PadFuncOptions({1, 1}).mode(torch::kReflect)); }},
  };
}

struct OneLayer : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(8, 8));
};

class AutocastOperator : public testing::TestWithParam<Operators> {};

TEST_P(AutocastOperator, HasTheDtypeOfItsResultOnAGhost) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    const auto net = std::make_shared<OneLayer>();
    tests::fill(*net);
    DistributedModel<OneLayer> model(net);
    const at::NoGradGuard no_grad;
    std::vector<at::ScalarType> dtypes;
    const auto output_of = [&](const at::Tensor& data) {
      const at::Tensor x = net->layer(data);
      const Autocast on(at::kCPU);
      const at::Tensor output = GetParam().call(x);
      dtypes.push_back(output.scalar_type());
      return output;
    };
    auto step = smp::step([&](at::Tensor data) { return output_of(data); });
    const at::Tensor data = rows(64, 8, 1).view({8, 8, 8});
    std::vector<at::Tensor> want;
    const std::string refused = support::message_of<std::exception>([&] {
      for (const auto& part : support::split_batch({data}, 2)) want.push_back(output_of(part[0]));
    });
    if (!refused.empty()) {  // LSTMs in bfloat16 need a processor that has the kernels
      EXPECT_NE(support::message_of<std::exception>([&] { step(data); }), "") << refused;
      return;
    }
    expect_bit_equal(step(data).outputs(), want, "output");
    expect_bit_equal(step(data).outputs(), want, "output of the second step");
    EXPECT_EQ(std::set<at::ScalarType>(dtypes.begin(), dtypes.end()).size(), 1U) << testing::PrintToString(dtypes);
  });
}

INSTANTIATE_TEST_SUITE_P(Operators, AutocastOperator, testing::ValuesIn(operators()),
                         [](const auto& test) { return test.param.name; });

TEST(AutocastRegion, WithTheBackwardInsideIsRefused) {
  run_smp_ranks(1, {}, [] {
    const auto net = tests::make_net();
    DistributedModel<tests::SmallNet> model(net);
    auto step = tests::training_step(model);
    const Autocast on(at::kCPU);
    std::string message;
    try {
      step(rows(4, 8, 1), rows(4, 4, 2));
    } catch (const c10::ValueError& error) {
      message = error.what_without_backtrace();
    }
    EXPECT_NE(message.find("expected a call outside of autocast"), std::string::npos) << message;
  });
}

}  // namespace
}  // namespace smp
