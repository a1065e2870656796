// The executor on loopback: it performs the table that it is given, whoever made it, and any sound table gives the same
// bits.
#include "runtime/executor/executor.h"

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "partitioner/partition/partition.h"
#include "partitioner/plan/plan_io.h"
#include "partitioner/schedule/check.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/given.h"
#include "partitioner/schedule/stage_graph.h"
#include "tests/support/bits.h"
#include "tests/support/graph_builder.h"
#include "tests/support/loopback_world.h"
#include "tests/support/schedule_text.h"

namespace smp::runtime {
namespace {

using namespace partitioner;
using smp::testing::GraphBuilder;

constexpr int kRanks = 2;
constexpr int kMicrobatches = 4;
constexpr int kSteps = 5;  // the first ones record and compare tapes
constexpr int64_t kRows = 96, kWidth = 32;
constexpr NodeId kLeakyRelu = 3;  // of the second rank

Graph graph_of_layers() {
  GraphBuilder g;
  ValueId x = g.input({kRows, kWidth});
  for (int layer = 0; layer < 4; ++layer) {
    x = g.linear(x, "layer" + std::to_string(layer), kWidth);
    if (layer == 2) {
      x = g.op("aten::leaky_relu", {x}, {kRows, kWidth});
      g.last_node().arguments.emplace_back(0.1);
    }
  }
  const ValueId loss = g.sum(x);
  g.last_node().arguments.emplace_back();  // dtype
  return g.build(loss);
}

Plan plan_of(const Graph& graph) {
  PartitionOptions options;
  options.request.num_ranks = kRanks;
  options.request.num_microbatches = kMicrobatches;
  options.placement.pins = {{"layer0", 0}, {"layer1", 0}, {"layer2", 1}, {"layer3", 1}};
  return partition(graph, options);
}

/// Each microbatch's weight gradients behind the backward of the next: a table that no generator of ours makes.
std::vector<std::vector<Action>> late_weights(const Schedule& schedule) {
  std::vector<std::vector<Action>> columns;
  for (const auto& column : schedule.columns) {
    std::vector<Action>& late = columns.emplace_back();
    std::vector<Action> waiting;
    for (const Action& action : column) {
      if (!action.is_compute()) continue;
      if (action.kind == ActionKind::kWeightGradient) {
        waiting.push_back(action);
        continue;
      }
      late.push_back(action);
      if (action.kind != ActionKind::kBackward) continue;
      late.insert(late.end(), waiting.begin(), waiting.end());
      waiting.clear();
    }
    late.insert(late.end(), waiting.begin(), waiting.end());
  }
  return columns;
}

/// What another rank makes of a plan that comes with a table.
Schedule sent(const Graph& graph, Plan plan, std::vector<std::vector<Action>> table, const StageGraph& stages) {
  plan.table = std::move(table);
  const std::vector<const StageGraph*> graphs(kMicrobatches, &stages);
  return given_schedule(deserialise_plan(serialise(plan), graph).table, graphs).value();
}

enum class Made { kAutograd, kTape, kTapeButOneMicrobatch };

struct RunResult {
  std::vector<at::Tensor> gradients;  // by parameter, of the rank that reads it
  size_t num_weight_calls = 0;        // of tapes
};

RunResult run(const Graph& graph, const Plan& plan, const Schedule& schedule, Made made) {
  RunResult result;
  std::mutex mutex;
  tests::run_ranks(kRanks, [&](Transport& transport) {
    auto generator = at::detail::createCPUGenerator(7);
    std::map<ValueId, at::Tensor> tensors;
    for (size_t v = 0; v < graph.values.size(); ++v) {
      const Value& value = graph.values[v];
      if (value.kind != ValueKind::kParameter) continue;
      tensors[static_cast<ValueId>(v)] = at::randn(value.spec.sizes, generator).requires_grad_();
    }
    std::vector<std::vector<at::Tensor>> inputs(kMicrobatches);
    for (auto& input : inputs) input.push_back(at::randn({kRows, kWidth}, generator));

    RankProgram program{.graph = &graph, .plan = &plan, .stages = {}};
    const int rank = transport.rank();
    program.stages[rank] =
        made == Made::kAutograd ? make_autograd_stage(graph, plan, rank, {}) : make_tape_stage(graph, plan, rank, {});
    BufferPool buffers;
    Executor executor(transport, buffers);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<MicrobatchRun> microbatches(kMicrobatches);
      for (int m = 0; m < kMicrobatches; ++m) {
        MicrobatchRun& one = microbatches[static_cast<size_t>(m)];
        one.program = &program;
        one.context.microbatch = m;
        one.context.is_last = m + 1 == kMicrobatches;
        if (made == Made::kTapeButOneMicrobatch && step + 1 == kSteps && m == 2)
          one.context.scalars = {{kLeakyRelu, 1, 0.3}};
        if (rank == 0) one.inputs = inputs[static_cast<size_t>(m)];
        one.tensors = [&](ValueId id) { return tensors.at(id); };
      }
      executor.run(schedule, microbatches);
    }
    const std::lock_guard lock(mutex);
    result.num_weight_calls += program.stages[rank]->report().num_weight_calls;
    result.gradients.resize(graph.values.size());
    for (const ValueId id : plan.stages[static_cast<size_t>(rank)].parameters) {
      result.gradients[static_cast<size_t>(id)] = tensors.at(id).grad();
    }
  });
  std::erase_if(result.gradients, [](const at::Tensor& gradient) { return !gradient.defined(); });
  return result;
}

class Executed : public ::testing::Test {
 protected:
  void expect_same_bits(Made made) {
    const RunResult usual = run(graph_, plan_, usual_, made), late = run(graph_, plan_, late_, made);
    EXPECT_EQ(usual.gradients.size(), 8U);
    support::expect_bit_equal(late.gradients, usual.gradients, "gradients");
    EXPECT_EQ(usual.num_weight_calls > 0, made != Made::kAutograd) << "nothing waits, so nothing is tested";
  }

  const Graph graph_ = graph_of_layers();
  const Plan plan_ = plan_of(graph_);
  const StageGraph stages_ = stage_graph(plan_, graph_);
  const Schedule usual_ = generate({}, stages_, kMicrobatches);
  const Schedule late_ = sent(graph_, plan_, late_weights(usual_), stages_);
};

TEST_F(Executed, LateWeightsAreASoundTable) {
  EXPECT_NO_THROW(check(late_, stages_));
  EXPECT_EQ(support::to_table(late_),
            "stage 0 | F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3\n"
            "stage 1 | F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3\n");
}

TEST_F(Executed, WeightGradientsOfATapeAddUpAtAnyDistanceFromTheirBackward) { expect_same_bits(Made::kTape); }

TEST_F(Executed, WeightGradientsOfAutogradAreMadeInItsBackward) { expect_same_bits(Made::kAutograd); }

// Its backward adds at once, behind what earlier microbatches have left waiting.
TEST_F(Executed, MicrobatchOnAutogradBetweenTapedOnesAddsInOrder) { expect_same_bits(Made::kTapeButOneMicrobatch); }

/// Notes what it is asked for; adds its number to what comes.
class NotedStage : public Stage {
 public:
  NotedStage(const Graph& graph, const Plan& plan, int stage, std::string& notes)
      : values_(stage_values(graph, plan, stage)), notes_(notes) {}
  const StageValues& values() const override { return values_; }
  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup&) override {
    notes_ += " F" + std::to_string(context.microbatch);
    if (!values_.backwards.front().has_loss) return {inputs.at(0).clone()};
    return {at::zeros({})};
  }
  std::vector<at::Tensor> backward(int microbatch, size_t, std::vector<at::Tensor>) override {
    notes_ += " B" + std::to_string(microbatch);
    return std::vector<at::Tensor>(values_.backwards.front().results.size(), at::zeros({kRows, kWidth}));
  }
  void weight_gradients(int microbatch) override { notes_ += " W" + std::to_string(microbatch); }
  void drop(int) override {}
  void reset() override { notes_ += " reset"; }

 private:
  StageValues values_;
  std::string& notes_;
};

TEST_F(Executed, ExactlyTheTableIsPerformed) {
  for (const Schedule& schedule : {usual_, late_}) {
    std::vector<std::string> notes(kRanks);
    tests::run_ranks(kRanks, [&](Transport& transport) {
      const auto rank = static_cast<size_t>(transport.rank());
      RankProgram program{.graph = &graph_, .plan = &plan_, .stages = {}};
      program.stages[transport.rank()] = std::make_unique<NotedStage>(graph_, plan_, transport.rank(), notes[rank]);
      std::vector<MicrobatchRun> microbatches(kMicrobatches);
      for (int m = 0; m < kMicrobatches; ++m) {
        microbatches[static_cast<size_t>(m)].program = &program;
        microbatches[static_cast<size_t>(m)].context.microbatch = m;
        if (rank == 0) microbatches[static_cast<size_t>(m)].inputs = {at::zeros({kRows, kWidth})};
      }
      BufferPool buffers;
      Executor(transport, buffers).run(schedule, microbatches);
    });
    for (size_t rank = 0; rank < kRanks; ++rank) {
      std::string expected;
      for (const Action& action : schedule.columns[rank]) {
        if (action.is_compute()) expected += std::string(" ") + action.row().letter + std::to_string(action.microbatch);
      }
      EXPECT_EQ(notes[rank], expected);
    }
  }
}

}  // namespace
}  // namespace smp::runtime
