// Optimizers of the program's own: those that update each parameter by itself train as in the plain loop, those that mix
// parameters are refused on several ranks before anything has changed.
#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using Tensors = std::vector<at::Tensor>;

struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
  double rate = 0.1;
};

struct OwnState : torch::optim::OptimizerCloneableParamState<OwnState> {
  at::Tensor moment;
  int64_t num_updates = 0;
};

class Own : public torch::optim::Optimizer {
 public:
  using Update = void (*)(Own&, const Tensors&);
  Own(Tensors parameters, Update update)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::make_unique<OwnOptions>()),
        update_(update) {}

  at::Tensor step(LossClosure = nullptr) override {
    const at::NoGradGuard no_grad;
    Tensors trained;
    for (const at::Tensor& parameter : param_groups().front().params()) {
      if (parameter.grad().defined()) trained.push_back(parameter);
    }
    update_(*this, trained);
    return {};
  }
  OwnState& state_of(const at::Tensor& parameter) {
    auto& state = state_[parameter.unsafeGetTensorImpl()];
    if (state == nullptr) state = std::make_unique<OwnState>();
    return static_cast<OwnState&>(*state);
  }
  OwnOptions& options() { return static_cast<OwnOptions&>(param_groups().front().options()); }
  bool has_state(const at::Tensor& parameter) { return state().count(parameter.unsafeGetTensorImpl()) > 0; }

 private:
  Update update_;
};

void momentum(Own& own, const Tensors& parameters) {
  for (const at::Tensor& p : parameters) {
    OwnState& state = own.state_of(p);
    state.moment = state.num_updates++ == 0 ? p.grad().clone() : state.moment * 0.9 + p.grad();
    p.sub_(state.moment, own.options().rate);
  }
}

void foreach_sgd(Own&, const Tensors& parameters) {
  Tensors gradients;
  for (const at::Tensor& p : parameters) gradients.push_back(p.grad());
  at::_foreach_sub_(parameters, gradients, 0.1);
}

void trust_ratio(Own&, const Tensors& parameters) {
  for (at::Tensor p : parameters) p.set_data(p - 0.01 * p.grad() * (p.norm() / p.grad().norm()));
}

void trust_ratio_on_the_host(Own&, const Tensors& parameters) {
  for (const at::Tensor& p : parameters) p.sub_(p.grad(), 0.01 * (p.norm() / p.grad().norm()).item<double>());
}

void norm_of_all(Own& own, const Tensors& parameters) {
  own.options().rate *= 0.5;
  Tensors norms;
  for (const at::Tensor& p : parameters) norms.push_back(p.grad().norm());
  for (const at::Tensor& p : parameters) p.grad().div_(at::stack(norms).norm());
  momentum(own, parameters);
}

void norm_on_the_host(Own&, const Tensors& parameters) {
  double sum = 0;
  for (const at::Tensor& p : parameters) sum += p.grad().square().sum().item<double>();
  for (const at::Tensor& p : parameters) p.sub_(p.grad(), 0.01 / std::sqrt(sum));
}

void replaced_by_another(Own&, const Tensors& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor p = parameters[i];
    p.set_data(p - 0.1 * p.grad() + 1e-3 * parameters[(i + 1) % parameters.size()].mean());
  }
}

struct Case {
  std::string name;
  Own::Update update;
  std::string refusal;  // empty: each parameter by itself

  friend void PrintTo(const Case& row, std::ostream* out) { *out << row.name; }
};

class OwnOptimizers : public testing::TestWithParam<std::tuple<Case, int>> {};

/// The model with its twin in a plain loop.
struct Twins {
  void train_step(const at::Tensor& data) {
    const at::Tensor target = torch::zeros({data.size(0), 4});
    model.zero_grad(), twin->zero_grad();
    step(data, target);
    tests::eager_step(*twin, data, target, 2);
  }
  void train(DistributedOptimizer<Own>& optimizer, Own::Update update) {
    Own plain(twin->parameters(), update);
    for (uint64_t s = 0; s < 4; ++s) {
      train_step(tests::rows(4, 8, s));
      optimizer.step(), plain.step();
      tests::expect_twins(model, *twin, "update " + std::to_string(s));
    }
  }

  std::shared_ptr<tests::SmallNet> net = tests::make_net(), twin = tests::make_net();
  DistributedModel<tests::SmallNet> model{net};
  decltype(tests::training_step(model)) step = tests::training_step(model);
};

TEST_P(OwnOptimizers, TrainAsInThePlainLoopOrAreRefused) {
  const auto& [row, ranks] = GetParam();
  tests::run_smp_ranks(ranks, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
    Twins twins;
    DistributedOptimizer optimizer(Own(twins.net->parameters(), row.update), twins.model);
    if (row.refusal.empty() || ranks == 1) return twins.train(optimizer, row.update);
    twins.train_step(tests::rows(4, 8, 9));
    for (int tries = 0; tries < 2; ++tries) {
      const std::string text = support::message_of<c10::ValueError>([&] { optimizer.step(); });
      EXPECT_TRUE(contains(text, "got one in which " + row.refusal)) << text;
      EXPECT_TRUE(contains(text, "smp::clip_grad_norm_(model, INFINITY)")) << text;
      tests::expect_twins(twins.model, *twins.twin, "after a refusal");
      EXPECT_EQ(optimizer.get().options().rate, 0.1);
      for (const at::Tensor& p : twins.net->parameters()) EXPECT_FALSE(optimizer.get().has_state(p));
    }
    DistributedOptimizer other(Own(twins.net->parameters(), momentum), twins.model);
    twins.train(other, momentum);
  });
}

INSTANTIATE_TEST_SUITE_P(
    , OwnOptimizers,
    testing::Combine(
        testing::Values(Case{"momentum", momentum, ""}, Case{"foreach_sgd", foreach_sgd, ""},
                        Case{"trust_ratio", trust_ratio, ""}, Case{"trust_ratio_on_the_host", trust_ratio_on_the_host, ""},
                        Case{"norm_of_all", norm_of_all, "aten::stack puts together what comes from '"},
                        Case{"norm_on_the_host", norm_on_the_host, "aten::item reads a value that comes from '"},
                        Case{"replaced_by_another", replaced_by_another, "aten::add puts together what comes from '"}),
        testing::Values(1, 2)),
    [](const auto& row) { return std::get<0>(row.param).name + "_on_" + std::to_string(std::get<1>(row.param)); });

/// LibTorch's rule is known, whatever its state; that of a class derived from it is not.
struct Derived : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure = nullptr) override {
    at::Tensor sum;
    for (const at::Tensor& p : param_groups().front().params()) {
      if (p.grad().defined()) sum = sum.defined() ? sum + p.grad().sum() : p.grad().sum();
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : param_groups().front().params()) {
      if (p.grad().defined()) p.sub_(p.grad() * sum);
    }
    return {};
  }
};

TEST(OwnOptimizer, DerivedFromOneOfLibTorchIsWatched) {
  tests::run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [] {
    Twins twins;
    DistributedOptimizer optimizer(Derived(twins.net->parameters(), torch::optim::SGDOptions(0.1)), twins.model);
    twins.train_step(tests::rows(4, 8, 1));
    const std::string text = support::message_of<c10::ValueError>([&] { optimizer.step(); });
    EXPECT_TRUE(contains(text, "aten::add puts together")) << text;
  });
}

struct OneOnEach : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(x.matmul(first)).matmul(second); }
  at::Tensor first = register_parameter("first", torch::ones({8, 8}));
  at::Tensor second = register_parameter("second", torch::ones({8, 8}));
};

TEST(OwnOptimizer, OfOneParameterOnEachRankIsWarnedOfOnce) {
  testing::internal::CaptureStderr();
  tests::run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kWarning}, [] {
    auto net = std::make_shared<OneOnEach>();
    DistributedModel model(net);
    DistributedOptimizer optimizer(Own(net->parameters(), momentum), model);
    auto step = tests::training_step(model);
    for (int s = 0; s < 3; ++s) step(tests::rows(4, 8, 1), tests::rows(4, 8, 2)), optimizer.step();
  });
  const std::string text = testing::internal::GetCapturedStderr(),
                    warning = "expected a rank with gradients of two parameters";
  EXPECT_TRUE(contains(text, warning)) << text;
  EXPECT_EQ(text.find(warning), text.rfind(warning)) << text;
}

TEST(OwnOptimizer, ThatThrowsOnOneRankThrowsOnAll) {
  tests::run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [] {
    Twins twins;
    const auto failing = [](Own& own, const Tensors& parameters) {
      momentum(own, parameters);
      TORCH_CHECK_INDEX(pp_rank() == 0, "mine");
    };
    DistributedOptimizer optimizer(Own(twins.net->parameters(), failing), twins.model);
    twins.train_step(tests::rows(4, 8, 1));
    const std::string text = support::message_of<c10::Error>([&] { optimizer.step(); });
    EXPECT_TRUE(contains(text, pp_rank() == 1 ? "mine" : "got an error on pipeline rank 1: mine")) << text;
    tests::expect_twins(twins.model, *twins.twin, "after an error");
  });
}

}  // namespace
}  // namespace smp
