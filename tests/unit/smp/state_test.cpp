// State of model and optimizer: what is loaded goes on as if it had never stopped, and what does not fit changes nothing.
#include <gtest/gtest.h>

#include <mutex>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

/// Two groups with learning rates of their own.
template <class Optimizer, class Options>
Optimizer make_optimizer(SmallNet& net, Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(net.first->parameters());
  std::vector<at::Tensor> rest;
  for (auto* layer : {&net.second, &net.third, &net.fourth}) {
    for (at::Tensor& parameter : (*layer)->parameters()) rest.push_back(parameter);
  }
  auto slower = std::make_unique<Options>(options);
  slower->set_lr(options.get_lr() / 3);
  groups.emplace_back(rest, std::move(slower));
  return Optimizer(groups, options);
}

struct AsSgd {
  static auto of(SmallNet& net) {
    return make_optimizer<torch::optim::SGD>(net, torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
  }
};
struct AsAdam {
  static auto of(SmallNet& net) {
    return make_optimizer<torch::optim::Adam>(net, torch::optim::AdamOptions(0.01).amsgrad(true));
  }
};
struct AsAdamW {
  static auto of(SmallNet& net) {
    return make_optimizer<torch::optim::AdamW>(net, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  }
};
struct AsRmsprop {
  static auto of(SmallNet& net) {
    return make_optimizer<torch::optim::RMSprop>(net, torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
  }
};
struct AsAdagrad {
  static auto of(SmallNet& net) {
    return make_optimizer<torch::optim::Adagrad>(net, torch::optim::AdagradOptions(0.05).lr_decay(0.01));
  }
};

template <class Kind>
struct Training : tests::SavedTraining<SmallNet, Kind> {
  using tests::SavedTraining<SmallNet, Kind>::SavedTraining;
  torch::optim::StepLR scheduler{this->optimizer, /*step_size=*/2, /*gamma=*/0.5};

  std::vector<at::Tensor> train(int first, int last) {
    return tests::SavedTraining<SmallNet, Kind>::train(first, last, [this] { scheduler.step(); });
  }
};

template <class Kind>
class Resume : public testing::Test {};
using Kinds = testing::Types<AsSgd, AsAdam, AsAdamW, AsRmsprop, AsAdagrad>;
struct KindNames {
  template <class Kind>
  static std::string GetName(int number) {
    const char* names[] = {"Sgd", "Adam", "AdamW", "RMSprop", "Adagrad"};
    return names[number];
  }
};
TYPED_TEST_SUITE(Resume, Kinds, KindNames);

struct World {
  int ranks, stages;
};
constexpr World kWorlds[] = {{1, 1}, {2, 2}, {3, 3}, {4, 4}, {4, 2}, {2, 1}};

void in_each_world(const std::function<void()>& fn) {
  for (const World& world : kWorlds) {
    SCOPED_TRACE(std::to_string(world.ranks) + " ranks, " + std::to_string(world.stages) + " stages");
    run_smp_ranks(world.ranks, {.pipeline_parallel_degree = world.stages, .microbatches = 2, .seed = 9}, fn);
  }
}

TYPED_TEST(Resume, FromTheFullStateInANewModel) {
  in_each_world([] {
    StateDict state;
    OptimizerState optimizer_state;
    std::vector<at::Tensor> want;
    {
      Training<TypeParam> whole;
      whole.train(0, 3);
      state = whole.model.state_dict();
      optimizer_state = whole.optimizer.state_dict();
      want = whole.train(3, 7);
    }
    EXPECT_EQ(optimizer_state.entries.size(), 8);
    Training<TypeParam> resumed(/*seed=*/77);
    for (int s = 0; s < 3; ++s) resumed.scheduler.step();
    resumed.model.load_state_dict(state);
    resumed.optimizer.load_state_dict(optimizer_state);
    expect_bit_equal(resumed.train(3, 7), want, "loss");
  });
}

TYPED_TEST(Resume, FromLocalPartsAfterTheFirstStep) {
  in_each_world([] {
    Training<TypeParam> run;
    run.train(0, 2);
    const StateDict state = run.model.local_state_dict();
    const OptimizerState optimizer_state = run.optimizer.local_state_dict();
    EXPECT_TRUE(state.is_partial && optimizer_state.is_partial);
    EXPECT_EQ(state.entries.size(), run.model.local_parameters().size());
    EXPECT_EQ(optimizer_state.entries.size(), state.entries.size());
    const auto want = run.train(2, 3);
    run.train(3, 4);
    run.model.load_state_dict(state);
    run.optimizer.load_state_dict(optimizer_state);
    expect_bit_equal(run.train(2, 3), want, "loss");
  });
}

// Parts of a run on `from` stages, put together by one on `to`.
void resume_on_other_stages(int from, int to) {
  std::mutex mutex;
  std::vector<StateDict> states(4);
  std::vector<OptimizerState> optimizer_states(4);
  std::vector<at::Tensor> want;
  run_smp_ranks(from, {.microbatches = 2, .seed = 9}, [&] {
    Training<AsAdam> run;
    run.train(0, 3);
    states[pp_rank()] = run.model.local_state_dict();
    optimizer_states[pp_rank()] = run.optimizer.local_state_dict();
    const auto losses = run.train(3, 6);
    const std::lock_guard lock(mutex);
    want = losses;
  });
  run_smp_ranks(to, {.microbatches = 2, .seed = 9}, [&] {
    StateDict mine;
    OptimizerState optimizer_mine;
    for (int r = pp_rank(); r < from; r += to) {
      mine.steps = states[r].steps;
      mine.entries.insert(mine.entries.end(), states[r].entries.begin(), states[r].entries.end());
      optimizer_mine.kind = optimizer_states[r].kind;
      optimizer_mine.groups = optimizer_states[r].groups;
      optimizer_mine.entries.insert(optimizer_states[r].entries.begin(), optimizer_states[r].entries.end());
    }
    Training<AsAdam> run(77);
    for (int s = 0; s < 3; ++s) run.scheduler.step();
    run.model.load_state_dict(mine);
    run.optimizer.load_state_dict(optimizer_mine);
    expect_bit_equal(run.train(3, 6), want, "loss");
  });
}

TEST(ResumeParts, OnMoreStages) { resume_on_other_stages(2, 4); }
TEST(ResumeParts, OnFewerStages) { resume_on_other_stages(3, 2); }
TEST(ResumeParts, OnOneStage) { resume_on_other_stages(4, 1); }
TEST(ResumeParts, OnSeveralStagesFromOne) { resume_on_other_stages(1, 3); }

TEST(LoadStateDict, WithoutStepCountsLeavesThemAsTheyAre) {
  run_smp_ranks(1, {.microbatches = 2, .seed = 9}, [] {
    Training<AsSgd> run;
    run.train(0, 2);
    StateDict state = run.model.state_dict();
    ASSERT_EQ(state.steps->training, 2);
    state.steps.reset();
    run.train(2, 3);
    run.model.load_state_dict(state);
    EXPECT_EQ(run.model.state_dict().steps->training, 3);
  });
}

TEST(LoadStateDict, TakesTheValuesOfReplica0) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 2}, [] {
    const auto other = make_net();
    tests::fill(*other, 100 + dp_rank());
    StateDict state;
    for (const auto& item : other->named_parameters()) state.entries.push_back({item.key(), item.value()});
    Training<AsSgd> run;
    run.train(0, 1);
    run.model.load_state_dict(state);
    tests::fill(*other, 100);
    for (const auto& [name, tensor] : run.model.local_named_parameters()) {
      expect_bit_equal(tensor, other->named_parameters()[name], name);
    }
  });
}

std::string refusal(const std::function<void()>& fn) { return support::message_of<c10::ValueError>(fn); }

TEST(LoadStateDict, ListsAllThatDoesNotFitOnEveryRankAndChangesNothing) {
  for (const bool after_first_step : {false, true}) {
    run_smp_ranks(2, {.microbatches = 2}, [&] {
      Training<AsSgd> run;
      if (after_first_step) run.train(0, 1);
      const StateDict before = run.model.state_dict();
      StateDict state = before;
      for (StateDict::Entry& entry : state.entries) entry.tensor = entry.tensor + 1;
      state.steps->training = 40;
      state.entries.erase(state.entries.begin());  // first.weight
      state.entries.back().tensor = torch::zeros({5});
      state.entries[1].tensor = state.entries[1].tensor.to(at::kDouble);
      state.entries.push_back({"fifth.weight", torch::zeros({2})});
      const std::string text = refusal([&] { run.model.load_state_dict(state); });
      EXPECT_TRUE(contains(text,
                           "missing: 'first.weight'; unexpected: 'fifth.weight'; wrong: 'second.weight: Double [8, 8] in "
                           "place of Float [8, 8]', 'fourth.bias: Float [5] in place of Float [4]'"))
          << text;
      EXPECT_TRUE(contains(refusal([&] { run.model.load_state_dict(state, /*strict=*/false); }), "wrong: 'second.weight"));
      const StateDict now = run.model.state_dict();
      EXPECT_TRUE(now.steps == before.steps);
      for (size_t i = 0; i < now.entries.size(); ++i) {
        expect_bit_equal(now.entries[i].tensor, before.entries[i].tensor, now.entries[i].name);
      }
      state = before;
      state.entries.erase(state.entries.begin());
      state.entries[0].tensor = torch::full({8}, 5.0);
      run.model.load_state_dict(state, /*strict=*/false);
      expect_bit_equal(run.model.state_dict().at("first.bias"), torch::full({8}, 5.0), "first.bias");
      expect_bit_equal(run.model.state_dict().at("first.weight"), before.at("first.weight"), "first.weight");
    });
  }
}

struct ExpandedNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))) + rows; }
  at::Tensor rows = register_buffer("rows", torch::arange(2.0).view({2, 1}).expand({2, 4}));
};

TEST(LoadStateDict, RefusesABufferWhoseElementsShareMemoryOnEveryRankAndChangesNothing) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    const auto net = std::make_shared<ExpandedNet>();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data).detach(); });
    step(rows(4, 8, 1));
    const StateDict before = model.state_dict();
    StateDict state = model.state_dict();
    for (auto& entry : state.entries) entry.tensor = entry.tensor + 1;
    const std::string text = support::message_of<c10::ValueError>([&] { model.load_state_dict(state); });
    EXPECT_TRUE(contains(text, "rows: strides [1, 0], by which elements share memory (register a clone())")) << text;
    for (const auto& entry : model.state_dict().entries) expect_bit_equal(entry.tensor, before.at(entry.name), entry.name);
  });
}

TEST(LoadStateDict, RefusesRanksThatPassDifferentTensors) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Training<AsSgd> run;
    StateDict state = run.model.state_dict();
    if (pp_rank() == 1) state.entries[2].tensor += 1;
    const std::string text = refusal([&] { run.model.load_state_dict(state); });
    EXPECT_TRUE(contains(text, "got another 'second.weight' on pipeline rank 1 than on 0")) << text;
  });
}

TEST(LoadStateDict, RefusesOnEveryRankWhatOneRankCannotOffer) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Training<AsSgd> run;
    StateDict state = run.model.state_dict();
    if (pp_rank() == 1) state.entries[2].tensor = at::Tensor();
    EXPECT_TRUE(contains(refusal([&] { run.model.load_state_dict(state); }), "for 'second.weight'"));
  });
}

TEST(LoadStateDict, RefusesOnEveryRankATensorWhoseDataLiveElsewhere) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Training<AsSgd> run;
    run.train(0, 1);
    StateDict state = run.model.state_dict();
    const auto parameters = run.net->named_parameters();
    for (auto& entry : state.entries) {
      if (pp_rank() == 1 && parameters.contains(entry.name)) entry.tensor = parameters[entry.name];
    }
    EXPECT_TRUE(contains(refusal([&] { run.model.load_state_dict(state); }), "live on pipeline rank 0"));
  });
}

// The numbers of steps travel under a name of smp's; a file may hold an entry of that name with fewer of them.
TEST(LoadStateDict, RefusesNamesThatSmpUsesItself) {
  run_smp_ranks(1, {}, [] {
    Training<AsSgd> run;
    for (const char* name : {"smp steps", "smp is delayed"}) {
      StateDict state = run.model.state_dict();
      state.entries.push_back({name, torch::zeros({1}, at::kLong)});
      const std::string text = refusal([&] { run.model.load_state_dict(state, /*strict=*/false); });
      EXPECT_TRUE(contains(text, "which smp uses itself")) << text;
    }
  });
}

TEST(OptimizerState, OfAnotherOptimizerChangesNothing) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Training<AsAdam> run;
    run.train(0, 1);
    const OptimizerState before = run.optimizer.state_dict();
    const auto expect_refused = [&](const std::string& part, const std::function<void(OptimizerState&)>& change) {
      OptimizerState state = run.optimizer.state_dict();
      state.groups[0].options["lr"] = 7;
      change(state);
      const std::string text = refusal([&] { run.optimizer.load_state_dict(state); });
      EXPECT_TRUE(contains(text, part)) << text;
      EXPECT_EQ(run.optimizer.state_dict().groups, before.groups);
    };
    expect_refused("state of Adam, got that of SGD", [](auto& state) { state.kind = "SGD"; });
    expect_refused("2 parameter groups, got 1", [](auto& state) { state.groups.pop_back(); });
    expect_refused("group 1, got others", [](auto& state) { state.groups[1].parameters.pop_back(); });
    expect_refused("group 0, got others", [](auto& state) { state.groups[0].options.erase("eps"); });
    expect_refused("'first.bias: missing field exp_avg'", [](auto& state) { state.entries["first.bias"].erase("exp_avg"); });
    expect_refused("'third.bias: exp_avg is Float [3], the parameter Float [8]'",
                   [](auto& state) { state.entries["third.bias"]["exp_avg"] = torch::zeros({3}); });
    expect_refused("unknown field speed", [](auto& state) { state.entries["third.bias"]["speed"] = torch::zeros({8}); });
    expect_refused("'fifth.bias/step: no such parameter'",
                   [](auto& state) { state.entries["fifth.bias"]["step"] = torch::zeros({}, at::kLong); });
    expect_refused("an empty one on every rank", [](auto& state) { state = {}; });
  });
}

/// Adam with a state of its own.
struct CountingAdam : torch::optim::Adam {
  struct State : torch::optim::OptimizerParamState {
    int64_t count = 0;
    std::unique_ptr<OptimizerParamState> clone() const override { return std::make_unique<State>(*this); }
  };
  using Adam::Adam;
  at::Tensor step(LossClosure = nullptr) override {
    for (const at::Tensor& parameter : param_groups().front().params()) {
      state()[parameter.unsafeGetTensorImpl()] = std::make_unique<State>();
    }
    return {};
  }
};

TEST(OptimizerState, OfAKindThatIsNotKnownIsRefusedWithWhatIsKnown) {
  run_smp_ranks(2, {.log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(CountingAdam(net->parameters(), torch::optim::AdamOptions(0.1)), model);
    optimizer.step();
    const std::string text = support::message_of<c10::ValueError>([&] { optimizer.local_state_dict(); });
    EXPECT_TRUE(contains(text, "expected SGD, Adam, AdamW, RMSprop or Adagrad of LibTorch")) << text;
  });
}

TEST(OptimizerState, IsRefusedInBodies) {
  EXPECT_THROW(run_smp_ranks(1, {},
                             [] {
                               Training<AsSgd> run;
                               auto step = smp::step([&](at::Tensor x) {
                                 const OptimizerState state = run.optimizer.state_dict();
                                 return run.model(x);
                               });
                               step(rows(4, 8, 1));
                             }),
               c10::ValueError);
}

}  // namespace
}  // namespace smp
