// Weights that several ranks train, against the same loop without smp: the same bits, unless exact_tied_weights is false.
#include <algorithm>
#include <atomic>
#include <set>

#include "smp/engine/rank/rank_state.h"
#include "tests/support/model_zoo.h"
#include "tests/support/split_run.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using tests::expect_as_in_a_loop;
using tests::Loop;
using tests::make_filled;
using tests::MicrobatchRun;
using tests::run_smp_ranks;
using torch::nn::Embedding;
using torch::nn::Linear;

constexpr int64_t kTokens = 24, kLength = 6, kWidth = 32;

/// From tokens [rows, kLength] to a loss.
struct Net : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& tokens) = 0;

 protected:
  Linear linear(const std::string& name) { return register_module(name, Linear(kWidth, kWidth)); }
};

struct Block : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return norm(x + out(torch::relu(in(x)))); }
  Linear in = register_module("in", Linear(kWidth, kWidth)), out = register_module("out", Linear(kWidth, kWidth));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
};

/// One block, called again and again.
struct Repeated : Net {
  at::Tensor forward(const at::Tensor& tokens) override { return loss(tokens, 6); }
  at::Tensor loss(const at::Tensor& tokens, int calls) {
    at::Tensor x = embedding(tokens);
    for (int i = 0; i < calls; ++i) x = between(block->forward(x), i);
    return head(x).square().mean();
  }
  std::function<at::Tensor(const at::Tensor&, int)> between = [](const at::Tensor& x, int) { return x; };
  Embedding embedding = register_module("embedding", Embedding(kTokens, kWidth));
  std::shared_ptr<Block> block = register_module("block", std::make_shared<Block>());
  Linear head = linear("head");
};

/// One encoder over two inputs, or three, then a head.
template <int kInputs>
struct Siamese : Net {
  at::Tensor forward(const at::Tensor& tokens) override {
    std::vector<at::Tensor> codes;
    for (const at::Tensor& part : tokens.chunk(kInputs, 1)) {
      codes.push_back(second->forward(first->forward(embedding(part))).mean(1));
    }
    at::Tensor sum = codes.front();
    for (size_t i = 1; i < codes.size(); ++i) sum = torch::tanh(head(sum - codes[i]));
    return sum.square().mean();
  }
  Embedding embedding = register_module("embedding", Embedding(kTokens, kWidth));
  std::shared_ptr<Block> first = register_module("first", std::make_shared<Block>());
  std::shared_ptr<Block> second = register_module("second", std::make_shared<Block>());
  Linear head = linear("head");
};

/// Two layers of cells, unrolled over the sequence: the readers of one weight lie between those of another.
struct Unrolled : Net {
  at::Tensor forward(const at::Tensor& tokens) override {
    const at::Tensor x = embedding(tokens);
    at::Tensor low = torch::zeros({tokens.size(0), kWidth}, x.options()), high = low, sum = torch::zeros({}, x.options());
    for (int64_t t = 0; t < kLength; ++t) {
      low = torch::tanh(low_in(x.select(1, t)) + low_state(low));
      high = torch::tanh(high_in(low) + high_state(high));
      sum = sum + high.square().mean();
    }
    return sum;
  }
  Embedding embedding = register_module("embedding", Embedding(kTokens, kWidth));
  Linear low_in = linear("low_in"), low_state = linear("low_state");
  Linear high_in = linear("high_in"), high_state = linear("high_state");
};

/// The embedding's weight in kPlaces: at the beginning, at the end and between other layers.
template <int kPlaces>
struct Tied : Net {
  at::Tensor forward(const at::Tensor& tokens) override {
    at::Tensor x = embedding(tokens);
    for (int place = 1; place < kPlaces; ++place) {
      for (Linear& layer : layers[static_cast<size_t>(place - 1)]) x = torch::tanh(layer(x));
      const at::Tensor scores = torch::linear(x, embedding->weight);  // [rows, kLength, kTokens]
      x = place + 1 < kPlaces ? torch::softmax(scores, -1).matmul(context) : scores;
    }
    return torch::nll_loss(torch::log_softmax(x.flatten(0, 1), -1), tokens.flatten());
  }
  Embedding embedding = register_module("embedding", Embedding(kTokens, kWidth));
  at::Tensor context = register_parameter("context", torch::zeros({kTokens, kWidth}));
  std::vector<std::vector<Linear>> layers = [this] {
    std::vector<std::vector<Linear>> made(kPlaces - 1);
    for (size_t place = 0; place < made.size(); ++place) {
      for (const char* name : {"a", "b", "c"}) made[place].push_back(linear(name + std::to_string(place)));
    }
    return made;
  }();
};

template <class T>
std::shared_ptr<T> make() {
  auto net = make_filled<T>();
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : net->parameters()) parameter.mul_(0.5);
  return net;
}

at::Tensor batch(int64_t rows, int step) {
  return torch::randint(kTokens, {rows, kLength}, tests::generator(static_cast<uint64_t>(step) + 20), at::kLong);
}

/// Whether there is a parameter whose gradient several ranks make in parts.
bool has_parts() {
  const auto& trained_on = engine::rank_state("test").models.all().front()->first_program->trained_on;
  return std::any_of(trained_on.begin(), trained_on.end(), [](const auto& entry) { return entry.second.size() > 1; });
}

/// Parameters whose gradient one rank hands on to another.
std::set<std::string> relayed() {
  std::set<std::string> names;
  const auto& program = *engine::rank_state("test").models.all().front()->first_program;
  for (const partitioner::Transfer& relay : program.plan.gradients) {
    const auto rank_of = [&](int stage) { return program.plan.stages[static_cast<size_t>(stage)].rank; };
    const partitioner::Value& value = program.graph.values[static_cast<size_t>(relay.value)];
    if (rank_of(relay.source) != rank_of(relay.target) && is_named(value)) names.insert(value.name);
  }
  return names;
}

template <class T>
Loop<T> exact_loop(
    int ranks, const Config& config = {.microbatches = 2}, const std::function<void(T&)>& prepare = [](T&) {}) {
  Loop<T> loop{.ranks = ranks, .steps = 5, .config = config, .optimizes = true};  // the last steps from tapes
  loop.config.exact_tied_weights = true;
  loop.make = [prepare] {
    auto net = make<T>();
    prepare(*net);
    return net;
  };
  loop.batch = [rows = 2 * config.microbatches](int step) { return batch(rows, step); };
  return loop;
}

at::Tensor train(const MicrobatchRun& run) { return run.trained(run.forward(run.data)); }

template <class T>
class ExactTies : public testing::Test {};
using Nets = testing::Types<Repeated, Siamese<2>, Siamese<3>, Unrolled, Tied<2>, Tied<3>, Tied<4>>;
TYPED_TEST_SUITE(ExactTies, Nets);

// Ranks and microbatches in all combinations, the other settings in turn.
TYPED_TEST(ExactTies, TrainAsOnOneProcess) {
  std::atomic<int> with_relays = 0;
  unsigned turn = 0;
  for (const int ranks : {2, 3, 4}) {
    for (const int microbatches : {1, 2, 5}) {
      Config config{.microbatches = microbatches};
      config.pipeline = turn % 2 == 0 ? Pipeline::kInterleaved : Pipeline::kSimple;
      config.stage = turn / 2 % 2 == 0 ? StageKind::kTape : StageKind::kAutograd;
      config.virtual_stages = turn % 3 == 2 ? 2 : 1;
      ++turn;
      auto loop = exact_loop<TypeParam>(ranks, config);
      loop.look = [&](auto&) { with_relays += rank() == 0 && !relayed().empty(); };
      expect_as_in_a_loop<TypeParam>(loop, train);
    }
  }
  EXPECT_GE(with_relays, 1) << "of 9 runs; a second visit of the first rank takes the place of the others";
}

// Embeddings tied to the output, encoders of two inputs, one tensor under two names.
TEST(ExactTiesOfTheZoo, TrainAsUnsplit) {
  for (const support::ZooModel& model : support::model_zoo()) {
    if (!model.has_tied_weights) continue;
    for (const int ranks : {2, 3}) {
      const Config config{.microbatches = 4, .exact_tied_weights = true, .log_level = LogLevel::kOff};
      const auto run = support::run_on_pipeline(model, ranks, config, {.steps = support::kStepsToTape});
      support::expect_same_step(run.result, support::run_unsplit(model, 4, {.steps = support::kStepsToTape}),
                                model.name + ", " + std::to_string(ranks) + " ranks");
      EXPECT_TRUE(run.is_taped()) << model.name << ": " << run.reasons();
    }
  }
}

// Two losses of one forward, and another forward: three backwards, one of which does not reach all that the others do.
TEST(ExactTiesOfBodies, WithSeveralCallsAndBackwards) {
  expect_as_in_a_loop<Repeated>(exact_loop<Repeated>(3, {.microbatches = 3}), [](const tests::BodyRun<Repeated>& run) {
    at::Tensor middle;
    run.net.between = [&](const at::Tensor& x, int i) {
      if (i == 3) middle = x;
      return x;
    };
    const at::Tensor loss = run.forward(run.data), early = middle.square().mean(), again = run.net.loss(run.data.flip(1), 4);
    run.backward(loss), run.backward(early), run.backward(again);
    return loss + again;
  });
}

// Microbatches with six readers, three, one and none: programs of their own, whose sums one rank adds up in order.
TEST(ExactTiesOfBodies, WithOtherReadersInOtherMicrobatches) {
  static constexpr int kCalls[] = {6, 3, 1, 6, 0, 3, 6};
  for (const Pipeline pipeline : {Pipeline::kInterleaved, Pipeline::kSimple}) {
    expect_as_in_a_loop<Repeated>(
        exact_loop<Repeated>(3, {.microbatches = 7, .pipeline = pipeline}),
        [](const tests::BodyRun<Repeated>& run) { return run.trained(run.net.loss(run.data, kCalls[run.microbatch])); });
  }
}

// Some only read the weight, or read another one that is frozen.
TEST(ExactTiesOfBodies, WithReadersThatTrainNothing) {
  const auto prepare = [](Repeated& net) {
    net.block->in->bias.set_requires_grad(false);
    net.between = [&net](const at::Tensor& x, int i) {
      if (i != 1 && i != 4) return x;
      const at::NoGradGuard no_grad;
      const at::Tensor scale = net.block->in->weight.norm();
      const at::AutoGradMode with_grad(true);
      return x / scale;
    };
  };
  expect_as_in_a_loop<Repeated>(exact_loop<Repeated>(3, {.microbatches = 2}, prepare), train);
}

// The function is given the weight; around it are tapes, so that a stage's segments hand on gradients too.
TEST(ExactTiesOfBodies, WithOpaqueReaders) {
  auto loop = exact_loop<Repeated>(2, {.microbatches = 2}, [](Repeated& net) {
    net.between = [&net](const at::Tensor& x, int i) {
      const auto product = [](at::Tensor left, at::Tensor right) { return torch::tanh(left.matmul(right)); };
      return i % 2 == 1 ? opaque(product, x, net.block->in->weight) : x;
    };
  });
  loop.steps = 9;
  expect_as_in_a_loop<Repeated>(loop, train);
}

// On the rank that adds it up, with the whole gradient of each microbatch.
TEST(ExactTiesOfBodies, RunHooksOnceWithTheWholeGradient) {
  std::atomic<int> calls = 0;
  const auto prepare = [&](Repeated& net) {
    net.block->out->weight.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      return gradient * gradient.norm();
    });
  };
  expect_as_in_a_loop<Repeated>(exact_loop<Repeated>(3, {.microbatches = 2}, prepare), train);
  constexpr int kSteps = 5, kMicrobatches = 2, kTwins = 3;
  EXPECT_EQ(calls, kSteps * kMicrobatches * (kTwins + 1));
}

// Their sums are added up once per step, in another order than a loop's. So are those of the transformer, whose attention
// over what the encoder gives reads different rows of a weight on several ranks.
TEST(CopiesOfAWeight, TrainAsUnsplitButForTheLastBits) {
  const support::SplitOptions steps{.steps = support::kStepsToTape};
  std::atomic<int> with_parts = 0;
  for (const support::ZooModel& model : support::model_zoo()) {
    if (!model.has_tied_weights && model.name != "transformer") continue;
    const support::OracleResult want = support::run_unsplit(model, 4, steps);
    for (const int ranks : {2, 3}) {
      support::SplitOptions looked = steps;
      looked.look = [&] {
        EXPECT_TRUE(relayed().empty()) << model.name;
        with_parts += rank() == 0 && has_parts();
      };
      const Config config{.microbatches = 4, .exact_tied_weights = false, .log_level = LogLevel::kOff};
      const auto run = support::run_on_pipeline(model, ranks, config, looked);
      support::expect_same_step(run.result, want, model.name + ", " + std::to_string(ranks) + " ranks", 1e-6);
      EXPECT_TRUE(run.is_taped()) << model.name << ": " << run.reasons();
    }
  }
  EXPECT_GE(with_parts, 1) << "a second visit of the first rank takes the place of the others";
}

TEST(CopiesOfAWeight, WithAHookAreRefused) {
  run_smp_ranks(3, {.microbatches = 2, .exact_tied_weights = false}, [] {
    const auto net = make<Repeated>();
    net->block->out->weight.register_hook([](const at::Tensor& gradient) { return gradient * gradient.norm(); });
    DistributedModel<Repeated> model(net);
    auto step = smp::step([&](at::Tensor tokens) {
      const at::Tensor loss = net->forward(tokens);
      model.backward(loss);
      return loss;
    });
    const std::string text = support::message_of([&] { step(batch(4, 1)); });
    EXPECT_TRUE(support::contains(text, "expected no gradient hook on 'block.out.weight'")) << text;
    EXPECT_TRUE(support::contains(text, "Set Config::exact_tied_weights")) << text;
  });
}

// (a + b) / 2 of two replicas, each of which is exact.
TEST(ExactTiesOfReplicas, AreAveragedAsEver) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 3, .exact_tied_weights = true}, [] {
    const at::Device device = runtime::this_ranks_device().current();
    const auto net = make<Repeated>();
    DistributedModel<Repeated> model(net);
    auto step = smp::step([&](at::Tensor tokens) {
      const at::Tensor loss = net->forward(tokens);
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 4; ++s) {
      const at::Tensor tokens = batch(12, s);
      for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
      step(tokens.chunk(2)[dp_rank()]);
      const std::vector twins{make<Repeated>(), make<Repeated>()};
      for (size_t r = 0; r < 2; ++r) {
        twins[r]->to(device);
        for (const auto& part : support::split_batch({tokens.chunk(2)[r].clone()}, 3))
          twins[r]->forward(part[0].to(device)).div(3).backward();
      }
      for (const auto& [name, tensor] : model.local_named_parameters()) {
        const at::Tensor want = (twins[0]->named_parameters()[name].grad() + twins[1]->named_parameters()[name].grad()) / 2;
        expect_bit_equal(tensor.grad(), want, "step " + std::to_string(s) + ": " + name);
      }
    }
    EXPECT_FALSE(relayed().empty());
  });
}

}  // namespace
}  // namespace smp
