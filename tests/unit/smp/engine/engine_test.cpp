// The engine as a language drives it that has neither torch::nn nor torch::optim: a model of plain tensors, an optimizer of
// a few lines, a body as a function. Against the same code in a loop.
#include "smp/engine/engine.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>

#include "smp/comm.h"
#include "smp/engine/opaque_table.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/init.h"
#include "tests/support/bits.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"

namespace smp {
namespace {

using engine::ModelTensor;
using engine::StateFields;
using step_internal::Call;
using step_internal::Results;
using step_internal::Share;
using step_internal::StepTensor;
using step_internal::Tensors;
using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::run_smp_ranks;

at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed) {
  const at::Tensor count = at::arange(c10::multiply_integers(sizes), at::kFloat);
  return at::sin(count * (0.37 + 0.11 * static_cast<double>(seed)) + static_cast<double>(seed)).view(sizes);
}

struct PlainNet {
  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor hidden = at::relu(x.matmul(first)) * scale;
    if (is_training) hidden = hidden * 2;
    return (hidden + shift).matmul(second);
  }
  at::Tensor loss(const at::Tensor& x) const { return forward(x).square().mean(); }

  at::Tensor first = numbers({8, 8}, 1).requires_grad_(), second = numbers({8, 4}, 2).requires_grad_();
  at::Tensor scale = numbers({8}, 3), shift = numbers({8}, 4);
  bool is_training = true;
};

class PlainView : public engine::ModelView {
 public:
  explicit PlainView(const PlainNet& net) : net_(net) {}
  std::vector<ModelTensor> tensors() const override {
    return {{"first", net_.first},
            {"second", net_.second},
            {"scale", net_.scale, /*is_buffer=*/true},
            {"shift", net_.shift, /*is_buffer=*/true, /*is_persistent=*/false}};
  }
  std::vector<std::string> module_paths() const override { return {""}; }
  bool is_training() const override { return net_.is_training; }

 private:
  const PlainNet& net_;
};

/// SGD with momentum.
struct PlainSgd {
  void step() {
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.grad().defined()) continue;
      at::Tensor& momentum = momenta[parameter.unsafeGetTensorImpl()];
      momentum = momentum.defined() ? momentum * 0.9 + parameter.grad() : parameter.grad().clone();
      parameter.detach().sub_(momentum * rate);
    }
  }
  void zero_grad() const {
    for (at::Tensor parameter : parameters) parameter.mutable_grad().reset();
  }
  Tensors parameters;
  double rate = 0.05;
  std::map<const void*, at::Tensor> momenta{};
};

class PlainSgdView : public engine::OptimizerView, public engine::StateView {
 public:
  explicit PlainSgdView(PlainSgd& sgd) : sgd_(sgd) {}
  bool is_elementwise() const override { return false; }
  std::vector<at::Tensor> tensors_kept_for(const at::Tensor&) const override { return {}; }
  std::function<void()> snapshot() override {
    return [this, kept = sgd_.momenta] { sgd_.momenta = kept; };
  }
  engine::OptimizerMemory memory() const override { return {.state = 1, .workspace = 1}; }
  std::vector<engine::OptimizerGroup> groups() const override { return {{sgd_.parameters, {{"rate", sgd_.rate}}}}; }
  void erase_state(const at::Tensor& parameter) override { sgd_.momenta.erase(parameter.unsafeGetTensorImpl()); }
  StateView* state() override { return this; }
  std::string refusal() const override { return ""; }
  std::string kind() const override { return "PlainSgd"; }
  void set_options(size_t, const engine::OptionValues& values) override { sgd_.rate = values.at("rate"); }
  std::optional<engine::StateRules> rules(const engine::OptionValues&) const override {
    return engine::StateRules{.fields = {{.name = "momentum", .is_needed = true}}};
  }
  std::optional<StateFields> of(const at::Tensor& parameter) const override {
    const auto found = sgd_.momenta.find(parameter.unsafeGetTensorImpl());
    if (found == sgd_.momenta.end()) return std::nullopt;
    return StateFields{{"momentum", found->second}};
  }
  void set(const at::Tensor& parameter, const StateFields& fields) override {
    sgd_.momenta[parameter.unsafeGetTensorImpl()] = fields.at("momentum");
  }

 private:
  PlainSgd& sgd_;
};

constexpr int kMicrobatches = 2;

/// A model with its optimizer in the engine, and the step that trains it.
struct Engine {
  ~Engine() { engine::remove_model(*model); }

  Results run(const at::Tensor& data, const std::string& payload = "", const std::vector<std::string>& values = {}) {
    const Call call{
        .arguments = [&](const Share&) { return std::vector<StepTensor>{{.tensor = data}}; },
        .body =
            [&](const Tensors& inputs, int64_t) {
              engine::check_in_body(*model);
              const at::Tensor loss = net.loss(inputs.at(0));
              engine::mark_backward(loss);
              return Tensors{loss};
            },
        .values = [&] { return values; },
        .payload = [&] { return payload; },
    };
    return engine::call_step(number.get(), call);
  }
  Results train(const at::Tensor& data) {
    engine::zero_grad(*optimizer);
    Results results = run(data);
    if (engine::begin_update(*optimizer)) engine::run_update(*optimizer, [&] { sgd.step(); });
    return results;
  }

  PlainNet net;
  PlainSgd sgd{.parameters = {net.first, net.second}};
  std::shared_ptr<engine::Model> model = engine::add_model(std::make_shared<PlainView>(net), {});
  std::shared_ptr<engine::Optimizer> optimizer = engine::add_optimizer(std::make_unique<PlainSgdView>(sgd), model);
  step_internal::StepNumber number;
};

Tensors train_in_a_loop(const PlainNet& net, PlainSgd& sgd, const at::Tensor& data) {
  sgd.zero_grad();
  Tensors losses;
  for (const at::Tensor& part : data.chunk(kMicrobatches)) {
    const at::Tensor loss = net.loss(part.clone());
    loss.div(kMicrobatches).backward();
    losses.push_back(loss.detach());
  }
  sgd.step();
  return losses;
}

const Config kConfig{.microbatches = kMicrobatches};

TEST(Engine, TrainsPlainTensorsAsALoopDoes) {
  run_smp_ranks(2, kConfig, [] {
    Engine trained;
    PlainNet net;
    PlainSgd sgd{.parameters = {net.first, net.second}};
    for (int s = 0; s < 6; ++s) {
      trained.net.is_training = net.is_training = s != 3;  // asked anew in every step
      const at::Tensor data = numbers({4, 8}, 10 + s);
      const Results results = trained.train(data);
      expect_bit_equal(results.tensors.at(0).outputs(), train_in_a_loop(net, sgd, data),
                       "losses of step " + std::to_string(s));
    }
    EXPECT_LT(engine::local_named_parameters("test", *trained.model, "").size(), 2U);
    const StateDict state = engine::state_dict(*trained.model);
    ASSERT_EQ(state.entries.size(), 3U);  // no shift
    expect_bit_equal(state.at("first"), net.first, "first");
    expect_bit_equal(state.at("second"), net.second, "second");
    const OptimizerState momenta = engine::state_dict(*trained.optimizer);
    EXPECT_EQ(momenta.kind, "PlainSgd");
    expect_bit_equal(momenta.entries.at("second").at("momentum"), sgd.momenta.at(net.second.unsafeGetTensorImpl()),
                     "momentum");
  });
}

TEST(Engine, GoesOnFromTheStateOfAnother) {
  run_smp_ranks(2, kConfig, [] {
    StateDict state;
    OptimizerState momenta;
    at::Tensor want;
    const at::Tensor data = numbers({4, 8}, 10);
    {
      Engine trained;
      trained.sgd.rate = 0.02;
      trained.train(data);
      state = engine::state_dict(*trained.model);
      momenta = engine::state_dict(*trained.optimizer);
      trained.train(data);
      want = trained.train(data).tensors.at(0)[0];
    }
    Engine other;
    engine::load_state_dict(*other.model, state, /*strict=*/true);
    engine::load_state_dict(*other.optimizer, momenta);
    EXPECT_EQ(other.sgd.rate, 0.02);
    other.train(data);
    expect_bit_equal(other.train(data).tensors.at(0)[0], want, "loss");
    state.entries.push_back({"shift", numbers({8}, 5), /*is_buffer=*/true});
    const std::string refused = message_of([&] { engine::load_state_dict(*other.model, state, /*strict=*/true); });
    EXPECT_TRUE(contains(refused, "unexpected: 'shift'")) << refused;
  });
}

// What a follower remembers of it is changed between the steps, and comes back as long as the leader's stays the same.
TEST(Engine, PayloadTravelsOncePerProgramAndValuesEveryStep) {
  run_smp_ranks(2, kConfig, [] {
    Engine trained;
    const at::Tensor data = numbers({4, 8}, 10);
    EXPECT_EQ(trained.run(data, "a list", {"0", "1"}).payload, "a list");
    const engine::RankState& rank = engine::rank_state("test");
    const auto program = rank.programs.find(rank.models.all().front()->first_program->hash);
    if (pp_rank() == 1) program->payload = "what a follower keeps";
    const Results second = trained.run(data, "a list", {"2", "3"});
    EXPECT_EQ(second.payload, pp_rank() == 1 ? "what a follower keeps" : "a list");
    EXPECT_EQ(second.values, (std::vector<std::string>{"2", "3"}));
    EXPECT_EQ(trained.run(data, "a map").payload, "a map");
    EXPECT_EQ(trained.run(data).payload, "");
  });
}

TEST(Engine, JoinsAreBegunAndEnded) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = kMicrobatches}, [] {
    Engine trained;
    const int num_batches = dp_rank() == 0 ? 2 : 4;
    engine::begin_join({});
    EXPECT_TRUE(contains(message_of([] { engine::begin_join({}); }), "outside of another join"));
    for (int s = 0; s < num_batches; ++s) trained.train(numbers({4, 8}, 10 + s));
    engine::end_join();
    const StateDict state = engine::state_dict(*trained.model);
    const auto all = engine::rank_state("test").context.replicas->all_gather(c10::str(state.at("first")));
    EXPECT_EQ(all[0], all[1]);
  });
}

// The followers of a leader that does not understand the others wait for its message.
TEST(Engine, EndsTheJobWhereReplicasDoNotUnderstandEachOther) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = kMicrobatches}, [] {
    // Ranks of the second replica may hear of the end at any moment from here on.
    const std::string text = message_of<std::exception>([&] {
      barrier();
      Engine trained;
      if (rank() == 2) engine::rank_state("test").context.replicas->all_gather("no step");
      if (rank() < 2) trained.train(numbers({4, 8}, 10));
    });
    EXPECT_TRUE(rank() >= 2 || contains(text, "step of a replica: expected")) << rank() << ": " << text;
  });
}

TEST(Engine, RefusedModelsLeaveNothingBehind) {
  run_smp_ranks(2, kConfig, [] {
    const PlainNet net;
    const auto add = [&] { engine::add_model(std::make_shared<PlainView>(net), {.name = "no name"}); };
    EXPECT_TRUE(contains(message_of(add), "letters, digits and underscores"));
    const std::string text = message_of<std::exception>([] { engine::call_step(0, {}); });
    EXPECT_TRUE(contains(text, "expected a DistributedModel, got none")) << text;
  });
}

/// Doubles its input while the interpreter is held.
std::atomic<int> num_held = 0;
std::atomic<bool> was_free = false;
Tensors doubled(const Tensors& inputs, const std::string& /*details*/) {
  if (num_held == 0) was_free = true;
  return {inputs.at(0) * 2};
}

TEST(OpaqueTable, HoldsTheInterpreterForFunctionsThatNeedIt) {
  const int64_t number = engine::add_opaque("engine_test doubled", {doubled, /*needs_interpreter=*/true});
  EXPECT_TRUE(contains(message_of([&] { engine::call_opaque(number, {at::ones({2})}); }), "expected an interpreter"));
  int lock = 0;
  engine::set_interpreter([&lock] {
    ++num_held;
    return std::shared_ptr<void>(&lock, [](void*) { --num_held; });
  });
  expect_bit_equal(engine::call_opaque(number, {at::ones({2})}).at(0), at::full({2}, 2.0), "doubled");
  EXPECT_FALSE(was_free);
  EXPECT_EQ(num_held, 0);
  engine::set_interpreter(nullptr);
  const int64_t other = engine::add_opaque("engine_test without", {doubled});
  EXPECT_NE(other, number);
  engine::call_opaque(other, {at::ones({2})});
  EXPECT_TRUE(was_free);
}

TEST(OpaqueTable, RefusesWhatItDoesNotHaveAndWhatItHasTwice) {
  EXPECT_TRUE(contains(message_of([] { engine::call_opaque(1, {at::ones({2})}); }), "does not have (number 1)"));
  const int64_t number = engine::add_opaque("engine_test twice", {doubled});
  EXPECT_EQ(engine::add_opaque("engine_test twice", {doubled}), number);
  const std::string twice = message_of([&] { engine::call_opaque(number, {at::ones({2})}); });
  EXPECT_TRUE(contains(twice, "got two (engine_test twice)")) << twice;
}

TEST(ReportFailure, PrintsOneLineAndReturnsTheExitCode) {
  const auto fail = [] { ::_exit(engine::report_failure(std::make_exception_ptr(std::runtime_error("no\n batches")))); };
  EXPECT_EXIT(fail(), ::testing::ExitedWithCode(1), "\\[rank 0\\] no batches");
}

}  // namespace
}  // namespace smp
