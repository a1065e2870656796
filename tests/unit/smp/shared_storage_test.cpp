// Parameters and buffers that are parts of one storage: where one of them lives, the others do, with the same numbers.
#include <algorithm>
#include <optional>

#include "tests/unit/smp/plain_loop.h"
#include "tests/unit/smp/seeded_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::rows;
using tests::run_smp_ranks;
using tests::seeded;

constexpr int64_t kWidth = 8, kLayers = 4, kSize = kWidth * kWidth;

/// Weights that are slices of `flat`, which is read behind the last layer: registered, or a member that nobody knows.
struct FlatNet : torch::nn::Module {
  explicit FlatNet(bool registers = true) {
    if (registers) register_buffer("flat", flat);
    for (int64_t i = 0; i < kLayers; ++i) {
      weights.push_back(
          register_parameter("w" + std::to_string(i), flat.narrow(0, i * kSize, kSize).view({kWidth, kWidth})));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const at::Tensor& weight : weights) x = torch::tanh(x.matmul(weight));
    return x * (1 + flat.detach().square().mean());
  }
  at::Tensor flat = torch::randn({kLayers * kSize});
  std::vector<at::Tensor> weights;
};

struct StorageCase {
  int ranks;
  int replicas = 1;
  bool registers = true;
  bool delayed = false;
};

void PrintTo(const StorageCase& c, std::ostream* out) {
  *out << c.ranks << " ranks, " << c.replicas << " replicas" << (c.registers ? "" : ", not registered")
       << (c.delayed ? ", delayed" : "");
}

class SharedStorage : public testing::TestWithParam<StorageCase> {};

TEST_P(SharedStorage, TrainsLikeOneProcess) {
  const StorageCase c = GetParam();
  const Config config{.pipeline_parallel_degree = c.ranks, .microbatches = 2};
  tests::Loop<FlatNet> loop{.ranks = c.ranks * c.replicas, .steps = 3, .config = config, .optimizes = true};
  loop.make = [&] { return seeded<FlatNet>(c.delayed, c.registers); };
  loop.make_twin = [&] { return seeded<FlatNet>(false, c.registers); };
  loop.look = [&](DistributedModel<FlatNet>& model) {
    if (c.registers) {
      EXPECT_EQ(model.state_dict().at("flat").numel(), kLayers * kSize);  // with the numbers of the twin's
    }
    EXPECT_EQ(model.local_parameters().size(), static_cast<size_t>(kLayers));
    const std::string plan = model.plan_text();  // a line for each stage, one above and one below
    EXPECT_GE(std::count(plan.begin(), plan.end(), '\n'), c.ranks + 2) << plan;
  };
  tests::expect_as_in_a_loop<FlatNet>(loop, tests::train_once);
}

INSTANTIATE_TEST_SUITE_P(Cases, SharedStorage,
                         testing::Values(StorageCase{1}, StorageCase{2}, StorageCase{3},
                                         StorageCase{.ranks = 2, .replicas = 2}, StorageCase{.ranks = 2, .registers = false},
                                         StorageCase{.ranks = 2, .delayed = true}));

/// Reads a weight of a FlatNet, of which it registers a view.
struct Reader : torch::nn::Module {
  explicit Reader(const FlatNet& other) : weight(register_buffer("weight", other.weights.back().detach())) {}
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight); }
  at::Tensor weight;
};

class SharedStorageOfTwoModels : public testing::TestWithParam<bool> {};

TEST_P(SharedStorageOfTwoModels, LivesWhereTheFirstIsPlaced) {
  const bool made_late = GetParam();
  run_smp_ranks(2, {.microbatches = 1}, [&] {
    const auto net = seeded<FlatNet>(false), twin = seeded<FlatNet>(false);
    DistributedModel model(net);
    std::optional<DistributedModel<Reader>> reader;
    if (!made_late) reader.emplace(std::make_shared<Reader>(*net));
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    torch::optim::SGD plain(twin->parameters(), 0.1);
    auto train = tests::training_step(model);
    train(rows(4, kWidth, 1), rows(4, kWidth, 2));
    optimizer.step();
    tests::eager_step(*twin, rows(4, kWidth, 1), rows(4, kWidth, 2), 1);
    plain.step();
    if (made_late) reader.emplace(std::make_shared<Reader>(*net));
    auto read = smp::step([&](at::Tensor data) { return (*reader)(data); });
    const at::NoGradGuard no_grad;
    expect_bit_equal(read(rows(4, kWidth, 3))[0], rows(4, kWidth, 3).matmul(twin->weights.back()), "the other model");
  });
}

INSTANTIATE_TEST_SUITE_P(Made, SharedStorageOfTwoModels, testing::Bool(),
                         [](const auto& test) { return test.param ? "AfterThePlacement" : "BeforeThePlacement"; });

TEST(SharedStorageOfTwoModelsRefused, WhereOneThatIsGoneHasSpreadIt) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = seeded<FlatNet>(false);
    {
      DistributedModel model(net);
      tests::training_step(model)(rows(4, kWidth, 1), rows(4, kWidth, 2));
    }
    const std::string text = message_of<c10::ValueError>([&] { DistributedModel reader(std::make_shared<Reader>(*net)); });
    EXPECT_TRUE(contains(text, "'weight'") && contains(text, "state_dict()")) << text;
  });
}

TEST(SharedMemoryRefused, OfTwoStorages) {
  run_smp_ranks(2, {}, [] {
    struct Net : torch::nn::Module {
      at::Tensor all = register_buffer("all", torch::ones({8}));
      at::Tensor part = register_buffer("part", torch::from_blob(all.data_ptr<float>() + 2, {2}));
    };
    const std::string text = message_of<c10::ValueError>([&] { DistributedModel model(std::make_shared<Net>()); });
    EXPECT_TRUE(contains(text, "'all'") && contains(text, "'part'") && contains(text, "clone")) << text;
  });
}

/// `scale` is read by the first layer and by the last, and written to between steps' bodies.
struct ScaledNet : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    x = x * scale;
    for (auto& layer : {a, b, c, d}) x = torch::tanh(torch::nn::Linear(layer)(x));
    return x * scale;
  }
  at::Tensor scale = register_buffer("scale", torch::full({8}, 0.5));
  torch::nn::Linear a = register_module("a", torch::nn::Linear(8, 8)), b = register_module("b", torch::nn::Linear(8, 8));
  torch::nn::Linear c = register_module("c", torch::nn::Linear(8, 8)), d = register_module("d", torch::nn::Linear(8, 8));
};

TEST(CopiesOfABuffer, AreNotWrittenByABody) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = std::make_shared<ScaledNet>();
    DistributedModel model(net);
    const auto halve = [&](at::Tensor data) {
      net->scale.mul_(0.5);
      return data * net->scale;
    };
    auto read = smp::step([&](at::Tensor data) { return model(data).detach(); });
    auto write = smp::step(halve);
    const at::Tensor before = read(rows(4, 8, 1))[0];
    const std::string text = message_of<c10::ValueError>([&] { write(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "aten::mul_") && contains(text, "'scale'") && contains(text, "set_partition")) << text;
    expect_bit_equal(read(rows(4, 8, 1))[0], before, "after the refusal");
  });
}

}  // namespace
}  // namespace smp
