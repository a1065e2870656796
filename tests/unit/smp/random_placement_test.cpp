// Random models under random placements by hand: the bits of the unsplit model, whatever stages visit which rank.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <random>
#include <set>
#include <sstream>

#include "smp/engine/rank/rank_state.h"
#include "smp/smp.h"
#include "tests/support/long_form.h"
#include "tests/support/oracle.h"
#include "tests/support/random_graph.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using partitioner::Plan;
using support::OracleResult;
using support::PipelineRun;
using support::ZooModel;

constexpr int64_t kBatch = 12;  // divisible by 1, 2, 3 and 4
constexpr int kPlanner = -1;

/// What is drawn for a seed, apart from the model.
struct Draw {
  uint64_t seed = 0;
  int ranks = 2;
  int microbatches = 1;
  bool has_more_losses = false;
  bool has_tied_weights = false;
  std::vector<int> stage_of_layer;  // used in turn; kPlanner: not placed by hand

  explicit Draw(uint64_t graph_seed) : seed(graph_seed) {
    std::mt19937_64 engine(graph_seed);
    const auto pick = [&](int count) { return static_cast<int>(engine() % static_cast<uint64_t>(count)); };
    ranks = 2 + pick(3);
    microbatches = 1 + pick(4);
    has_more_losses = pick(2) == 0;
    has_tied_weights = pick(4) == 0;
    const bool leaves_some = pick(2) == 0;
    for (int layer = 0; layer < 32; ++layer) {
      const int stage = pick(ranks);
      stage_of_layer.push_back(leaves_some && pick(3) == 0 ? kPlanner : stage);
    }
  }

  ZooModel model() const {
    return support::random_graph(seed, {.with_tied_weights = has_tied_weights, .with_more_losses = has_more_losses});
  }

  void place(const torch::nn::Module& module) const {
    size_t next = 0;
    for (const auto& layer : module.children()) {
      const int stage = stage_of_layer[next++ % stage_of_layer.size()];
      if (stage != kPlanner) set_partition(*layer, stage);
    }
  }

  std::string text(Pipeline schedule) const {
    std::ostringstream out;
    out << "seed " << seed << ", " << ranks << " ranks, " << microbatches << " microbatches, "
        << (schedule == Pipeline::kSimple ? "simple" : "interleaved") << (has_more_losses ? ", several losses" : "")
        << (has_tied_weights ? ", tied weights" : "") << ", layers on";
    for (const int stage : stage_of_layer) out << ' ' << stage;
    return out.str();
  }
};

bool visits_a_rank_twice(const Plan& plan) {
  std::set<int> ranks;
  return std::any_of(plan.stages.begin(), plan.stages.end(),
                     [&](const auto& stage) { return !ranks.insert(stage.rank).second; });
}

bool relays_a_parameter_to_another_rank(const Plan& plan, const partitioner::Graph& graph) {
  return std::any_of(plan.gradients.begin(), plan.gradients.end(), [&](const auto& relay) {
    const auto rank_of = [&](int stage) { return plan.stages[static_cast<size_t>(stage)].rank; };
    return rank_of(relay.source) != rank_of(relay.target) && is_named(graph.values[static_cast<size_t>(relay.value)]);
  });
}

bool reads_a_parameter_in_two_stages(const Plan& plan) {
  std::set<int> seen;
  for (const auto& stage : plan.stages) {
    for (const auto parameter : stage.parameters) {
      if (!seen.insert(parameter).second) return true;
    }
  }
  return false;
}

/// How often the runs had what they are for.
struct Counts {
  std::atomic<int> runs = 0, revisits = 0, shared_parameters = 0, relayed_parameters = 0, several_backwards = 0, taped = 0;
};

PipelineRun run(const Draw& draw, Pipeline schedule, Counts& counts) {
  const auto look = [&] {
    const auto& program = *engine::rank_state("test").models.all().front()->first_program;
    if (rank() != 0) return;
    ++counts.runs;
    counts.revisits += visits_a_rank_twice(program.plan);
    counts.shared_parameters += reads_a_parameter_in_two_stages(program.plan);
    counts.relayed_parameters += relays_a_parameter_to_another_rank(program.plan, program.graph);
    counts.several_backwards += program.graph.backward_roots.size() > 1;
  };
  const auto place = [&](torch::nn::Module& module) { draw.place(module); };
  const Config config{.microbatches = draw.microbatches, .pipeline = schedule};
  PipelineRun made = support::run_on_pipeline(
      draw.model(), draw.ranks, config, {.look = look, .place = place, .batch = kBatch, .steps = support::kStepsToTape});
  counts.taped += made.is_taped();
  return made;
}

/// Both schedules; false when the placement tears apart operators that no cut may separate, which is refused.
bool check(const Draw& draw, Counts& counts) {
  const OracleResult want =
      support::run_unsplit(draw.model(), draw.microbatches, {.batch = kBatch, .steps = support::kStepsToTape});
  for (const Pipeline schedule : {Pipeline::kSimple, Pipeline::kInterleaved}) {
    try {
      support::expect_same_step(run(draw, schedule, counts).result, want, draw.text(schedule));
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_NE(text.find("which no cut may separate"), std::string::npos) << draw.text(schedule) << ": " << text;
      return false;
    }
  }
  return true;
}

TEST(RandomPlacements, OfRandomModelsTrainBitForBit) {
  at::set_num_threads(1);
  const int num_graphs = support::num_random(500);
  Counts counts;
  uint64_t seed = 0;
  for (int trained = 0; trained < num_graphs && !HasFailure(); ++seed) trained += check(Draw(seed), counts);
  std::cout << seed << " models, " << counts.runs << " runs, " << counts.revisits << " with a rank visited twice, "
            << counts.shared_parameters << " with a parameter in two stages, " << counts.relayed_parameters
            << " with one on two ranks, " << counts.several_backwards << " with several backwards, " << counts.taped
            << " from tapes\n";
  EXPECT_GE(counts.taped, 2 * num_graphs * 95 / 100);
  EXPECT_GT(counts.revisits, num_graphs * 2 / 5);
  EXPECT_GT(counts.shared_parameters, num_graphs / 25);
  EXPECT_GE(counts.relayed_parameters, num_graphs / 25);
  EXPECT_GT(counts.several_backwards, num_graphs / 5);
}

}  // namespace
}  // namespace smp
