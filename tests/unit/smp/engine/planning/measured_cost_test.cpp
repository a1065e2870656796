// cost=measured: times come from this machine, and change nothing but the plan.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <boost/json.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "partitioner/cost/operator_cost.h"
#include "partitioner/partition/choose_layout.h"
#include "partitioner/partition/graph_costs.h"
#include "partitioner/partition/predict_step.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/stage_graph.h"
#include "runtime/stage/measure_stage.h"
#include "smp/engine/planning/cost_cache.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/model_zoo.h"
#include "tests/support/oracle.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::OracleResult;
using support::ZooModel;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

/// Empty, and gone afterwards.
class Folder {
 public:
  Folder() : path_(std::filesystem::path(testing::TempDir()) / ("costs_" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string name() const { return path_.string(); }
  std::vector<std::filesystem::path> files() const {
    if (!std::filesystem::exists(path_)) return {};
    return {std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator{}};
  }

 private:
  std::filesystem::path path_;
};

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

Config measured(const std::string& cache = "off") {
  return {.microbatches = 2, .cost = CostSource::kMeasured, .cost_cache = cache, .log_level = LogLevel::kOff};
}

const partitioner::Plan& plan() { return engine::rank_state("test").models.all().front()->first_program->plan; }

runtime::StageTimes times_of(const engine::Program& program, int stage, runtime::MeasureOptions options) {
  std::vector<runtime::StageMeasurement> one;
  one.emplace_back(program.graph, program.plan, stage, std::move(options));
  const auto errors = runtime::measure_in_turns(one, /*seconds=*/0);
  if (errors.front()) std::rethrow_exception(errors.front());
  return one.front().times();
}

void train_small_net(int num_steps = 1) {
  DistributedModel model(make_net());
  auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
  for (int s = 0; s < num_steps; ++s) step(rows(8, 8, s));
}

class Zoo : public testing::TestWithParam<ZooModel> {};

TEST_P(Zoo, TrainsWithTheSameBitsOnMeasuredCosts) {
  const ZooModel& model = GetParam();
  at::set_num_threads(1);
  const OracleResult want = support::run_unsplit(model, 2, {.steps = 2});
  for (const int ranks : {1, 2}) {
    const auto look = [&] {
      for (const auto& stage : plan().stages) EXPECT_GT(stage.cost.forward_us, 0) << model.name;
    };
    const OracleResult result = support::run_on_pipeline(model, ranks, measured(), {.look = look, .steps = 2}).result;
    support::expect_same_step(result, want, std::to_string(ranks) + " ranks");
  }
}

INSTANTIATE_TEST_SUITE_P(All, Zoo, testing::ValuesIn(support::model_zoo()),
                         [](const auto& test) { return test.param.name; });

// One stage with everything: under autograd and as a tape, each operator has its own time.
TEST(MeasuredStage, HasATimeForEachOperatorAndForEachBackwardThatThereIs) {
  run_smp_ranks(1, {.microbatches = 2, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(std::make_shared<torch::nn::LinearImpl>(8, 8));
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor hidden = torch::tanh(data);  // of the batch alone: no backward
      const at::Tensor loss = model(hidden).square().mean();
      model.backward(loss);
      return loss;
    });
    step(rows(8, 8, 0));
    const auto& program = *engine::rank_state("test").models.all().front()->first_program;
    for (const bool tape : {true, false}) {
      const auto predicted = partitioner::graph_costs(program.graph, {});
      const auto times = times_of(program, 0, {.tape = tape, .expected_backward_us = predicted.backward_us});
      for (size_t n = 0; n < program.graph.nodes.size(); ++n) {
        const std::string& op = program.graph.nodes[n].op;
        if (op == "aten::detach" || op == "aten::t") continue;  // part of others' arguments on a tape
        EXPECT_GT(times.forward_us[n], 0) << op << (tape ? " on a tape" : "");
        EXPECT_EQ(times.backward_us[n] > 0, predicted.backward_us[n] > 0) << op << (tape ? " on a tape" : "");
      }
    }
  });
}

// A part of a large graph: its tape makes gradients of parameters behind those that it sends.
TEST(MeasuredStage, RunsWhatIsLeftOfABackward) {
  run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(64, 64));
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    step(rows(8, 64, 0));
    const auto& program = *engine::rank_state("test").models.all().front()->first_program;
    const auto times = times_of(program, 1, {});
    int num_products = 0;
    for (const partitioner::NodeId n : program.plan.stages[1].nodes) {
      const auto& node = program.graph.nodes[static_cast<size_t>(n)];
      if (partitioner::parameter_share_of_backward(program.graph, node) == 0) continue;
      EXPECT_GT(times.backward_us[static_cast<size_t>(n)], 0) << node.op;
      ++num_products;
    }
    EXPECT_GT(num_products, 0);
  });
}

TEST(MeasuredStage, LeavesGivenTensorsAlone) {
  run_smp_ranks(1, {.microbatches = 1, .log_level = LogLevel::kOff}, [] {
    const auto net = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8));
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    step(rows(8, 8, 0));
    model.zero_grad();
    std::vector<at::Tensor> before;
    for (const auto& list : {net->parameters(), net->buffers()}) {
      for (const at::Tensor& tensor : list) before.push_back(tensor.detach().clone());
    }
    const auto& program = *engine::rank_state("test").models.all().front()->first_program;
    const auto lookup = [&](partitioner::ValueId id) { return program.named_tensors[static_cast<size_t>(id)]; };
    times_of(program, 0, {.tensors = lookup});
    size_t i = 0;
    for (const auto& list : {net->parameters(), net->buffers()}) {
      for (const at::Tensor& tensor : list) support::expect_bit_equal(tensor.detach(), before[i++], "tensor");
    }
    for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

struct MeanOfBatches : torch::nn::Module {
  at::Tensor mean = register_buffer("mean", torch::ones({8}));
  at::Tensor forward(const at::Tensor& data) {
    if (is_training()) mean.lerp_(data.mean(0), 0.5);
    return data * mean;
  }
};

// One graph only reads a buffer that another one updates: both share what they may, and the training's memory is not among
// it.
TEST(MeasuredStage, LeavesABufferAloneThatOnlyALaterGraphWritesTo) {
  run_smp_ranks(1, {.microbatches = 1, .log_level = LogLevel::kOff}, [] {
    const auto net = std::make_shared<MeanOfBatches>();
    std::vector<std::shared_ptr<const engine::Program>> programs;
    for (const bool trains : {false, true}) {
      const at::NoGradGuard no_grad;
      DistributedModel model(net);
      model.train(trains);
      auto step = smp::step([&](at::Tensor data) { return model(data).sum(); });
      step(rows(8, 8, 0));
      programs.push_back(engine::rank_state("test").models.all().front()->first_program);
    }
    const at::Tensor before = net->mean.clone();
    std::vector<runtime::StageMeasurement> measurements;
    const auto own = std::make_shared<runtime::OwnTensors>();
    for (const auto& program : programs) {
      const auto lookup = [program](partitioner::ValueId id) { return program->named_tensors[static_cast<size_t>(id)]; };
      measurements.emplace_back(program->graph, program->plan, 0, runtime::MeasureOptions{.tensors = lookup, .own = own});
    }
    EXPECT_EQ(runtime::measure_in_turns(measurements, 0), std::vector<std::exception_ptr>(2));
    support::expect_bit_equal(net->mean, before, "mean");
  });
}

TEST(CostCacheFile, IsWrittenOnceAndReadByTheNextJob) {
  const Folder folder;
  run_smp_ranks(2, measured(folder.name()), [] { train_small_net(2); });
  ASSERT_EQ(folder.files().size(), 1u);
  // What stands there is what counts: one operator that takes a minute gets a stage of its own.
  boost::json::object costs = boost::json::parse(content_of(folder.files()[0])).as_object();
  for (auto& [key, time] : costs) {
    const bool is_last = std::string_view(key).starts_with("aten::mean");
    time = boost::json::array{is_last ? 6e7 : 1.0, is_last ? 6e7 : 1.0};
  }
  std::ofstream(folder.files()[0]) << boost::json::serialize(costs);
  run_smp_ranks(2, measured(folder.name()), [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    step(rows(8, 8, 0));
    EXPECT_LE(plan().stages.back().nodes.size(), 2u);
    EXPECT_GT(plan().predicted_step_us, 1e8);
  });
}

TEST(CostCacheFile, ThatIsBrokenIsReplaced) {
  const Folder folder;
  run_smp_ranks(1, measured(folder.name()), [] { train_small_net(); });
  ASSERT_EQ(folder.files().size(), 1u);
  const auto path = folder.files()[0];
  const std::string good = content_of(path);
  std::ofstream(path) << good.substr(0, good.size() / 2);
  run_smp_ranks(1, measured(folder.name()), [] { train_small_net(); });
  EXPECT_NO_THROW(partitioner::MeasuredCosts().add_json(content_of(path)));
}

TEST(CostCacheFile, IsNeitherReadFromNorWrittenOverWhatIsNoRegularFile) {
  const Folder folder;
  const engine::Logger silent(LogLevel::kOff);
  const engine::CostCache cache({.cost_cache = folder.name()}, 1, silent);
  std::filesystem::create_directory(folder.name());
  ASSERT_EQ(::mkfifo(cache.path().c_str(), 0600), 0);  // nobody will ever write into it
  EXPECT_EQ(cache.read().size(), 0u);
  cache.write({});
  EXPECT_TRUE(std::filesystem::is_fifo(cache.path()));
  std::filesystem::remove(cache.path());
  const std::string victim = folder.name() + "/victim";
  std::filesystem::create_symlink(victim, cache.path());
  // What the name of the unfinished file once was.
  std::filesystem::create_symlink(victim, cache.path() + "." + std::to_string(::getpid()));
  cache.write({});
  EXPECT_TRUE(std::filesystem::is_symlink(cache.path()));
  std::filesystem::remove(cache.path());
  cache.write({});
  EXPECT_TRUE(std::filesystem::is_regular_file(cache.path()));
  EXPECT_FALSE(std::filesystem::exists(victim));
}

TEST(CostCacheFile, LiesInTheUsersCacheFolderUnlessToldOtherwise) {
  const engine::Logger silent(LogLevel::kOff);
  std::map<std::string, std::string, std::less<>> variables = {{"HOME", "/home/me"}};
  const EnvironmentLookup lookup = [&](std::string_view name) -> std::optional<std::string> {
    const auto known = variables.find(name);
    return known == variables.end() ? std::nullopt : std::optional(known->second);
  };
  const auto path = [&](const std::string& cost_cache, int ranks_per_host = 2) {
    Config config;
    config.cost_cache = cost_cache;
    return engine::CostCache(config, ranks_per_host, silent, lookup).path();
  };
  EXPECT_TRUE(path("").starts_with("/home/me/.cache/smp/costs-"));
  EXPECT_NE(path("", 2), path("", 3));  // other neighbours
  variables["XDG_CACHE_HOME"] = "/cache";
  EXPECT_TRUE(path("").starts_with("/cache/smp/costs-"));
  EXPECT_TRUE(path("/mine").starts_with("/mine/costs-"));
  EXPECT_EQ(path("off"), "");
  variables.clear();
  EXPECT_EQ(path(""), "");
}

// Of two replicas and two microbatches.
void expect_averaging_is_measured_and_predicted() {
  const engine::RankState& rank = engine::rank_state("test");
  const partitioner::Graph& graph = rank.models.all().front()->first_program->graph;
  partitioner::PartitionOptions options = rank.programs.options(graph);
  options.request.num_microbatches = 2;
  EXPECT_EQ(options.request.num_replicas, 2);
  ASSERT_NE(options.machine.measured, nullptr);
  EXPECT_GT(options.machine.measured->averaging_us_per_mib(), 0);
  const double averaging_us = partitioner::averaging_us(plan(), 2, options.machine, options.behaviour);
  EXPECT_GT(averaging_us, 0);
  partitioner::Plan alone = plan();
  const auto schedule = partitioner::generate(alone.schedule, partitioner::stage_graph(alone, graph), 2);
  partitioner::add_prediction(graph, schedule, options.machine.device, alone);
  EXPECT_DOUBLE_EQ(plan().predicted_step_us, alone.predicted_step_us + averaging_us);
}

TEST(MeasuredCosts, OfAveragingCountWhereNoOperatorCouldBeMeasured) {
  Config config = measured();
  config.pipeline_parallel_degree = 1;
  run_smp_ranks(2, config, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      model.backward(smp::opaque([](at::Tensor t) { return t * 2; }, model(data)).square().mean());
    });
    step(rows(8, 8, 0));
    expect_averaging_is_measured_and_predicted();
  });
}

TEST(MeasuredCosts, OfAveragingBelongToThePredictedStepAndAreNotKept) {
  const Folder folder;
  Config config = measured(folder.name());
  config.pipeline_parallel_degree = 1;
  run_smp_ranks(2, config, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    step(rows(8, 8, 0));
    expect_averaging_is_measured_and_predicted();
  });
  EXPECT_EQ(content_of(folder.files().at(0)).find("averaging"), std::string::npos) << "another job, another network";
}

TEST(MeasuredCosts, ServeReplicasAndChoicesOfLayouts) {
  Config replicas = measured();
  replicas.pipeline_parallel_degree = 2;
  run_smp_ranks(4, replicas, [] { train_small_net(2); });
  Config automatic = measured();
  automatic.parallelism = Parallelism::kAuto;
  automatic.microbatches = kAutoMicrobatches;
  run_smp_ranks(2, automatic, [] { train_small_net(2); });
}

std::atomic<int> num_opaque_calls = 0;

int opaque_calls_of_a_step(CostSource cost) {
  num_opaque_calls = 0;
  Config config = measured();
  config.cost = cost;
  run_smp_ranks(1, config, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const auto twice = [](at::Tensor t) {
        ++num_opaque_calls;
        return t * 2;
      };
      model.backward(smp::opaque(twice, model(data)).square().mean());
    });
    step(rows(8, 8, 0));
  });
  return num_opaque_calls;
}

// What a user's function does beside computing must not happen for times' sake; there is one capture more.
TEST(MeasuredCosts, DoNotRunOpaqueFunctions) {
  EXPECT_LE(opaque_calls_of_a_step(CostSource::kMeasured), opaque_calls_of_a_step(CostSource::kPredicted) + 1);
}

TEST(MeasuredCosts, ArePredictedWhereMadeUpInputsDoNotDo) {
  run_smp_ranks(2, measured(), [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data, at::Tensor spd) {
      const at::Tensor factor = torch::linalg_cholesky(spd);
      model.backward((model(data) * factor.sum()).square().mean());
    });
    step(rows(8, 8, 0), torch::eye(3).repeat({8, 1, 1}));
    EXPECT_GT(model.predicted_step_s(), 0);
  });
}

// There are no rows to cut: found out on rank 0, before anything is sent.
TEST(MeasuredCosts, LeaveAStepThatCannotBeCutToTheStep) {
  Config config = measured();
  config.microbatches = kAutoMicrobatches;
  config.timeout_s = 20;
  run_smp_ranks(2, config, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&] { model.backward(model(torch::ones({8, 8})).square().mean()); });
    EXPECT_THROW(step(), c10::ValueError);
  });
}

TEST(MeasuredCosts, LeaveABodyThatThrowsToTheStep) {
  run_smp_ranks(2, measured(), [] {
    DistributedModel model(make_net());
    bool throws = true;
    auto step = smp::step([&](at::Tensor data) {
      TORCH_CHECK_VALUE(!throws, "no data today");
      model.backward(model(data).square().mean());
    });
    EXPECT_THROW(step(rows(8, 8, 0)), c10::ValueError);
    throws = false;
    step(rows(8, 8, 0));
  });
}

}  // namespace
}  // namespace smp
