// NaN and infinity in losses and gradients: no rank updates, all know why; sparse and complex gradients.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "runtime/libtorch/finite.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

TEST(IsFinite, LooksAtEveryElementOfEveryType) {
  using runtime::is_finite;
  EXPECT_TRUE(is_finite(at::Tensor()) && is_finite(torch::ones({2}, at::kLong)) && is_finite(torch::ones({0})));
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
    for (const double bad : {double(kNan), double(kInf), -double(kInf)}) {
      const at::Tensor numbers = torch::ones({7, 300}).to(type);
      EXPECT_TRUE(is_finite(numbers) && is_finite(numbers.t()));
      numbers[6][123] = bad;
      EXPECT_FALSE(is_finite(numbers) || is_finite(numbers.t())) << type << bad;
      numbers[2][50] = -bad;  // the sum of both infinities is not finite either
      EXPECT_FALSE(is_finite(numbers)) << type << bad;
    }
  }
  EXPECT_TRUE(is_finite(torch::full({8}, 3e38F))) << "though the sum overflows";
  EXPECT_TRUE(is_finite(torch::full({8}, 60000, at::kHalf)));
  const at::Tensor imaginary = torch::complex(torch::ones({3}), torch::tensor({1.F, kNan, 1.F}));
  EXPECT_FALSE(is_finite(imaginary));
  EXPECT_TRUE(is_finite(torch::eye(3).to_sparse()));
  EXPECT_FALSE(is_finite((torch::eye(3) * kInf).nan_to_num(0, kInf).to_sparse()));
}

struct Layout {
  int ranks = 1, stages = 1;
};
const Layout kLayouts[] = {{1, 1}, {2, 2}, {3, 3}, {2, 1}, {4, 2}};

/// How a microbatch goes wrong.
enum class Bad { kNothing, kLoss, kGradient };

// Returns nothing. Where `scale` is 0, the gradient is NaN and the loss is not.
auto spoiled_step(DistributedModel<SmallNet>& model) {
  return smp::step([&model](at::Tensor data, at::Tensor scale, at::Tensor added) {
    model.backward((model(data) * scale).square().sqrt().mean() + added.mean());
  });
}

template <class Step>
void run(Step& step, int s, Bad bad) {
  at::Tensor scale = torch::ones({4, 1}), added = torch::zeros({4, 1});
  if (bad == Bad::kGradient) scale[3] = 0;
  if (bad == Bad::kLoss) added[2] = kInf;  // in the second of two microbatches
  step(rows(4, 8, s), scale, added);
}

std::vector<at::Tensor> copies(const DistributedModelBase& model) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : model.local_parameters()) values.push_back(parameter.detach().clone());
  return values;
}

/// The texts of all ranks, each once.
class Texts {
 public:
  void add(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_.insert(text);
  }
  std::string only() const { return texts_.size() == 1 ? *texts_.begin() : "several texts"; }

 private:
  std::set<std::string> texts_;
  std::mutex mutex_;
};

// The second of three steps goes wrong, on the last replica. Returns what optimizer.step() throws then.
std::string train(const Layout& layout, Nonfinite nonfinite, Bad bad) {
  Texts texts;
  const Config config{
      .pipeline_parallel_degree = layout.stages, .microbatches = 2, .nonfinite = nonfinite, .log_level = LogLevel::kOff};
  run_smp_ranks(layout.ranks, config, [&] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 0.01), model);
    auto step = spoiled_step(model);
    for (int s = 0; s < 3; ++s) {
      const bool goes_wrong = s == 1, is_here = dp_rank() + 1 == dp_size();
      optimizer.zero_grad();
      run(step, s, goes_wrong && is_here ? bad : Bad::kNothing);
      const std::vector<at::Tensor> before = copies(model);
      const std::string text = message_of([&] { optimizer.step(); });
      if (goes_wrong) {
        texts.add(text);
      } else {
        EXPECT_EQ(text, "") << s;
      }
      const bool updates = nonfinite == Nonfinite::kIgnore || bad == Bad::kNothing || !goes_wrong;
      const std::vector<at::Tensor> after = copies(model);
      for (size_t p = 0; p < after.size(); ++p) EXPECT_EQ(at::equal(before[p], after[p]), !updates) << p;
    }
    const int64_t num_updates = nonfinite == Nonfinite::kIgnore || bad == Bad::kNothing ? 3 : 2;
    for (const auto& [name, fields] : optimizer.local_state_dict().entries) {
      EXPECT_EQ(fields.at("step").item<int64_t>(), num_updates) << name;
    }
  });
  return texts.only();
}

TEST(Nonfinite, StopsAllRanksAlikeBeforeAnyWeightChanges) {
  for (const Layout& layout : kLayouts) {
    EXPECT_EQ(train(layout, Nonfinite::kStop, Bad::kNothing), "");
    const bool has_replicas = layout.ranks > layout.stages;
    const std::string last = std::to_string(layout.ranks - 1), first_of_last = std::to_string(layout.ranks - layout.stages);
    const std::string loss = train(layout, Nonfinite::kStop, Bad::kLoss);
    EXPECT_TRUE(contains(loss, "got inf in the loss of microbatch 1 on rank " + last + " in training step 2. No rank has"))
        << loss;
    const std::string gradient = train(layout, Nonfinite::kStop, Bad::kGradient);
    EXPECT_TRUE(contains(gradient,
                         has_replicas ? "got nan or inf in the gradient of '" : "got nan in the gradient of 'first.weight'"))
        << gradient;
    EXPECT_TRUE(contains(gradient, " on rank " + first_of_last + " in training step 2.")) << gradient;
  }
}

TEST(Nonfinite, SkipsTheUpdateOnAllRanksOrUpdatesWhereAsked) {
  for (const Layout& layout : kLayouts) {
    for (const Bad bad : {Bad::kLoss, Bad::kGradient}) {
      EXPECT_EQ(train(layout, Nonfinite::kSkip, bad), "");
      EXPECT_EQ(train(layout, Nonfinite::kIgnore, bad), "");
    }
  }
}

TEST(Nonfinite, CountsLossesUntilGradientsAreCleared) {
  for (const int ranks : {1, 2}) {
    run_smp_ranks(ranks, {.microbatches = 2}, [] {
      const auto net = make_net();
      DistributedModel model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
      auto step = spoiled_step(model);
      run(step, 1, Bad::kLoss);
      run(step, 2, Bad::kNothing);  // adds to the gradients
      EXPECT_TRUE(contains(message_of([&] { optimizer.step(); }), "in the loss of microbatch 1"));
      for (const bool to_zeros : {false, true}) {
        net->zero_grad(!to_zeros);
        run(step, 3, Bad::kNothing);
        EXPECT_EQ(message_of([&] { optimizer.step(); }), "");
        run(step, 4, Bad::kLoss);
      }
    });
  }
}

TEST(Nonfinite, CountsLossesOfARankThatTrainsNothingUntilGradientsAreCleared) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    const auto net = make_net();
    for (at::Tensor& parameter : net->fourth->parameters()) parameter.requires_grad_(false);
    set_partition(*net, 0);
    set_partition(*net->fourth, 1);
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    auto step = smp::step(
        [&model](at::Tensor data, at::Tensor added) { model.backward(model(data).square().mean() + added.mean()); });
    const at::Tensor nothing = torch::zeros({4, 1});
    step(rows(4, 8, 1), nothing + kInf);  // the gradients are finite
    step(rows(4, 8, 2), nothing);
    const std::string text = message_of([&] { optimizer.step(); });
    EXPECT_TRUE(contains(text, "inf in the loss of microbatch 0 on rank 1 in training step 1")) << text;
    optimizer.zero_grad();
    step(rows(4, 8, 3), nothing);
    EXPECT_EQ(message_of([&] { optimizer.step(); }), "");
  });
}

TEST(Nonfinite, IsOfLossesAndGradientsOfTheModelThatIsUpdated) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = make_net(), other = make_net();
    DistributedModel model(net), critic(other);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    DistributedOptimizer critics(torch::optim::SGD(other->parameters(), 0.1), critic);
    auto step = spoiled_step(model), critics_step = spoiled_step(critic);
    auto infinite = smp::step([&](at::Tensor data) {
      const at::Tensor output = model(data);
      model.backward(output.square().mean());
      return output / 0;  // nobody's loss
    });
    infinite(rows(4, 8, 1));
    run(critics_step, 1, Bad::kGradient);
    EXPECT_EQ(message_of([&] { optimizer.step(); }), "");
    EXPECT_TRUE(contains(message_of([&] { critics.step(); }), "got nan in the gradient of 'first.weight' on rank "));
  });
}

TEST(Nonfinite, IsSeenByClipping) {
  for (const int ranks : {1, 2}) {
    run_smp_ranks(ranks, {.microbatches = 1}, [] {
      const auto net = make_net();
      DistributedModel model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
      auto step = spoiled_step(model);
      run(step, 1, Bad::kNothing);
      if (pp_rank() == 0) net->first->weight.mutable_grad()[0][0] = kNan;  // by the program, on one rank
      EXPECT_TRUE(std::isnan(clip_grad_norm_(model, 1.0)));
      EXPECT_TRUE(contains(message_of([&] { optimizer.step(); }), "a global norm of the gradients that is not finite"));
    });
  }
}

// The replica without batches hears of it too.
TEST(Nonfinite, IsSkippedWithinAJoin) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .nonfinite = Nonfinite::kSkip, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    auto step = spoiled_step(model);
    std::vector<at::Tensor> before;
    smp::join([&] {
      for (int s = 0; s < (dp_rank() == 0 ? 1 : 3); ++s) {
        optimizer.zero_grad();
        run(step, s, s == 2 ? Bad::kGradient : Bad::kNothing);
        before = copies(model);
        optimizer.step();
      }
    });
    const std::vector<at::Tensor> after = copies(model);
    for (size_t p = 0; p < after.size(); ++p) {
      EXPECT_TRUE(at::isfinite(after[p]).all().item<bool>()) << p;
      if (dp_rank() == 1) expect_bit_equal(before[p], after[p], "the update that was left out");
    }
  });
}

TEST(Nonfinite, OfAReplicasLastBatchIsForgottenInAJoin) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .nonfinite = Nonfinite::kSkip, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    auto step = spoiled_step(model);
    smp::join([&] {
      for (int s = 0; s < (dp_rank() == 0 ? 1 : 3); ++s) {
        optimizer.zero_grad();
        run(step, s, dp_rank() == 0 ? Bad::kLoss : Bad::kNothing);
        const std::vector<at::Tensor> before = copies(model);
        optimizer.step();
        EXPECT_EQ(at::equal(before.front(), copies(model).front()), s == 0) << "step " << s;
      }
    });
  });
}

// The replica that has joined keeps its gradients, which nobody clears.
TEST(Nonfinite, IsForgottenInAJoinWithGradientsThatAreKept) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .nonfinite = Nonfinite::kSkip, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    auto step = spoiled_step(model);
    smp::join([&] {
      for (int s = 0; s < (dp_rank() == 0 ? 5 : 1); ++s) {
        optimizer.zero_grad();
        {
          const NoSync kept(model);
          run(step, s, s == 2 ? Bad::kLoss : Bad::kNothing);
        }
        run(step, s + 10, Bad::kNothing);
        const std::vector<at::Tensor> before = copies(model);
        optimizer.step();
        EXPECT_EQ(at::equal(before.front(), copies(model).front()), s == 2) << "step " << s;
      }
    });
  });
}

// As a GAN in one model trains: each optimizer clears what it updates.
TEST(Nonfinite, IsForgottenWhereOptimizersTakeTurns) {
  run_smp_ranks(2, {.microbatches = 2, .nonfinite = Nonfinite::kSkip, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    const auto some = net->first->parameters(), others = net->fourth->parameters();
    DistributedOptimizer first(torch::optim::SGD(some, 0.1), model), second(torch::optim::SGD(others, 0.1), model);
    auto step = spoiled_step(model);
    for (int s = 0; s < 6; ++s) {
      auto& own = s % 2 == 0 ? first : second;
      own.zero_grad();
      run(step, s, s == 1 ? Bad::kLoss : Bad::kNothing);
      const std::vector<at::Tensor> before = copies(model);
      own.step();
      const std::vector<at::Tensor> after = copies(model);
      bool changed = false;
      for (size_t p = 0; p < after.size(); ++p) changed = changed || !at::equal(before[p], after[p]);
      const bool has_own = pp_rank() == (s % 2 == 0 ? 0 : 1);
      EXPECT_EQ(changed, has_own && s != 1) << "step " << s << ", rank " << rank();
    }
  });
}

TEST(Nonfinite, IsOfWhatAnOptimizerUpdates) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->fourth->parameters(), 0.1), model);
    auto step = spoiled_step(model);
    run(step, 1, Bad::kGradient);
    EXPECT_NE(message_of([&] { optimizer.step(); }), "");
    optimizer.zero_grad();  // the gradients of the other layers keep their NaN
    run(step, 2, Bad::kNothing);
    EXPECT_EQ(message_of([&] { optimizer.step(); }), "");
  });
}

}  // namespace
}  // namespace smp
