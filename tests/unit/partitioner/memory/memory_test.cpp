// Predicted memory of small graphs against numbers worked out by hand, term by term.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>

#include "partitioner/memory/rank_memory.h"
#include "partitioner/memory/stage_memory.h"
#include "partitioner/partition/partition.h"
#include "partitioner/plan/message_rules.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/stage_graph.h"
#include "tests/support/graph_builder.h"
#include "tests/support/plan_cases.h"

namespace smp::partitioner {
namespace {

using smp::testing::contiguous_spec;
using smp::testing::GraphBuilder;
using smp::testing::mlp;
using smp::testing::on_ranks;

constexpr int64_t kActivation = 4 * 128 * 64;   // of mlp()
constexpr int64_t kLayer = 4 * (64 * 64 + 64);  // weight and bias of one of its layers
constexpr int64_t kLoss = 4;                    // returned, so in `results`
constexpr int64_t kScalars = 64;                // numbers that become tensors on their way into a kernel

/// What the prediction adds for what no table tells.
int64_t with_margin(int64_t bytes) { return bytes + (bytes + 31) / 32; }

StageMemory memory_on_one_rank(const Graph& graph) {
  return stage_memory(graph, GradientFlow(graph), partition(graph, on_ranks(1)), 0);
}

TEST(StageMemory, MlpHoldsWhatReplayAndAutogradHold) {
  const StageMemory memory = memory_on_one_rank(mlp(2));
  EXPECT_EQ(memory.saved, 2 * kActivation);  // two relus; the input is the step's
  EXPECT_EQ(memory.results, kLoss);
  EXPECT_EQ(memory.forward, 3 * kActivation + kScalars);  // relu, linear, relu
  // Before the first relu's backward: its output, its gradient, the new one. In the first backward
  // the gradients of the second layer are there as well.
  EXPECT_EQ(memory.first_backward, 3 * kActivation + kLayer + kScalars);
  EXPECT_EQ(memory.later_backward, 3 * kActivation + kLayer + kScalars);
}

TEST(StageMemory, LaterBackwardsDropTheGradientsOfParametersTheyHaveAdded) {
  GraphBuilder g;
  ValueId x = g.input({1, 64});
  for (int i = 0; i < 3; ++i) x = g.linear(x, std::string("layers.").append(std::to_string(i)), 64);
  const StageMemory memory = memory_on_one_rank(g.build(g.sum(x)));
  const int64_t row = 4 * 64;
  // Saved: two rows. The first layer, whose input is the step's, comes last: one row's
  // gradient beside those of all parameters. A later backward is at its peak in the third layer.
  EXPECT_EQ(memory.saved, 2 * row);
  EXPECT_EQ(memory.first_backward, 3 * kLayer + row + kScalars);
  EXPECT_EQ(memory.later_backward, kLayer + 3 * row + kScalars);
}

TEST(StageMemory, WeightThatIsReadThroughAViewIsNotSavedPerMicrobatch) {
  GraphBuilder g;
  const ValueId weight = g.parameter("w", {32, 16});
  TensorSpec turned = contiguous_spec({16, 32});
  turned.requires_grad = true;
  const ValueId x = g.relu(g.linear(g.input({8, 16}), "fc", 16));
  const ValueId y = g.op("aten::matmul", {x, g.view("aten::t", weight, turned)}, {8, 32});
  EXPECT_EQ(memory_on_one_rank(g.build(g.sum(y))).saved, 4 * 8 * 16);
}

TEST(StageMemory, ResidualGradientIsSharedAndSummedIntoANewTensor) {
  GraphBuilder g;
  const ValueId x = g.linear(g.input({128, 16}), "fc", 16);
  const ValueId y = g.op("aten::add", {x, g.op("aten::tanh", {x}, {128, 16})}, {128, 16});
  const int64_t size = 4 * 128 * 16;
  // tanh's output, its gradient from the sum (a repeated scalar: no memory), the new gradient, and
  // their sum, since the one of the sum is shared.
  const StageMemory memory = memory_on_one_rank(g.build(g.sum(y)));
  EXPECT_EQ(memory.saved, size);
  EXPECT_EQ(memory.later_backward, 3 * size);
}

TEST(StageMemory, CrossEntropyHoldsLogitsThreeTimesInItsBackward) {
  GraphBuilder g;
  const ValueId targets = g.input({8}, c10::ScalarType::Long);
  const ValueId logits = g.linear(g.input({8, 4}), "fc", 1000);
  const ValueId loss = g.op("aten::cross_entropy_loss", {logits, targets}, {});
  const int64_t size = 4 * 8 * 1000;
  const StageMemory memory = memory_on_one_rank(g.build(loss));
  EXPECT_EQ(memory.saved,
            size + 4);  // log-softmax and total weight; logits and targets are not kept
  EXPECT_EQ(memory.later_backward, 3 * size + 4 + kScalars);
}

TEST(StageMemory, EvaluationSavesNothing) {
  GraphBuilder g;
  g.relu(g.linear(g.input({128, 64}), "fc", 64));
  EXPECT_EQ(memory_on_one_rank(g.build()), (StageMemory{.forward = 2 * kActivation + kScalars}));
}

TEST(StageMemory, ReceivedActivationLiesInItsMessageWhileItIsSaved) {
  const Graph graph = mlp(2);
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"layers.0", 0}, {"layers.1", 1}};
  const Plan plan = partition(graph, options);
  const StageMemory last = stage_memory(graph, GradientFlow(graph), plan, 1);
  EXPECT_EQ(last.saved, kActivation);
  EXPECT_EQ(last.saved_arrivals, (std::set<ValueId>{plan.activations.back().value}));
}

/// On one rank, per microbatch in flight nothing but what is saved. A microbatch's arguments are
/// whole lines of the cache, so that they need no copies.
TEST(PeakMemory, OneRankAddsParametersStateMicrobatchesAndWorkspace) {
  const Graph graph = mlp(2);
  PartitionOptions options = on_ranks(1);
  options.behaviour.optimizer_state_factor = 2;
  const StageMemory memory = memory_on_one_rank(graph);
  // Parameters with state, the step's arguments, the gradient of the loss.
  const int64_t fixed = 2 * kLayer * (1 + 2) + 4 * kActivation + 2 * kLoss;
  options.request.schedule.kind = ScheduleKind::kSimple;
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes[0],
            with_margin(fixed + 3 * memory.saved + 4 * kLoss + memory.first_backward));
  options.request.schedule.kind = ScheduleKind::kInterleaved;
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes[0],
            with_margin(fixed + 2 * kLayer + 4 * kLoss + memory.later_backward));
}

TEST(PeakMemory, ArgumentsAreCopiedApartWhereAPartWouldNotBeAligned) {
  GraphBuilder g;
  const Graph graph = g.build(g.sum(g.linear(g.input({3, 5}), "fc", 1024)));
  PartitionOptions options = on_ranks(1);
  const StageMemory memory = memory_on_one_rank(graph);
  const int64_t weights = 4 * 1024 * (5 + 1), arguments = 4 * (60 + 64);
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes[0],
            with_margin(2 * weights + arguments + 2 * kLoss + 4 * kLoss + memory.later_backward));
}

TEST(PeakMemory, WithOneMicrobatchGradientsAppearWhileActivationsGo) {
  const Graph graph = mlp(8);
  PartitionOptions options = on_ranks(1);
  options.request.num_microbatches = 1;
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes[0],
            with_margin(8 * kLayer + kActivation + 3 * kLoss + memory_on_one_rank(graph).first_backward));
}

TEST(PeakMemory, MemoryOfTheOptimizersStepCountsWhereItIsTheLargest) {
  GraphBuilder g;
  const Graph graph = g.build(g.sum(g.linear(g.input({1, 512}), "fc", 512)));
  PartitionOptions options = on_ranks(1);
  const int64_t weight = 4 * 512 * 512, bias = 4 * 512, batch = 4 * (4 * 512 + kLoss) + 2 * kLoss;
  options.behaviour.optimizer_workspace_factor = 3;
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes[0], with_margin(2 * (weight + bias) + batch + 3 * weight));
}

TEST(PeakMemory, ReplicasAddABucketWhatComesForItAndOneGradient) {
  GraphBuilder g;
  const ValueId x = g.linear(g.input({1, 512}), "a", 512);
  const Graph graph = g.build(g.sum(g.linear(x, "b", 512)));
  PartitionOptions options = on_ranks(1);
  options.behaviour.gradient_bucket_bytes = 1 << 30;  // larger than all gradients
  const Plan plan = partition(graph, options);
  const int64_t weight = 4 * 512 * 512, bias = 4 * 512, gradients = 2 * (weight + bias);
  const int64_t batch = 4 * (4 * 512 + kLoss) + 2 * kLoss;
  StageMemory memory = stage_memory(graph, GradientFlow(graph), plan, 0, options.behaviour.gradient_bucket_bytes);
  constexpr int64_t kFlag = 4;  // travels with each gradient, and says that it is there
  EXPECT_EQ(memory.under_way, 2 * (gradients + 4 * kFlag));
  EXPECT_EQ(plan.predicted_peak_bytes[0], with_margin(2 * gradients + batch + memory.last_backward));
  // It leaves when the last gradient is added, and that one is still there.
  EXPECT_EQ(memory.last_backward, memory.under_way + weight + bias);
  EXPECT_EQ(memory.arriving, weight);

  // Without overlap it leaves when there is nothing else.
  options.behaviour.gradients_overlap = false;
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes[0], with_margin(4 * gradients + weight + batch));

  // In shared memory it is there for the whole step, and nothing comes for it.
  options.behaviour.gradients_share_memory = true;
  memory = stage_memory(graph, GradientFlow(graph), plan, 0, options.behaviour.gradient_bucket_bytes,
                        /*buckets_are_shared=*/true);
  EXPECT_EQ(memory.under_way, 0);
  const int64_t block = gradients + 4 * kFlag;
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes[0],
            with_margin(2 * gradients + block + batch + memory.last_backward));

  // Buckets of one parameter each: what one of them takes at most, wherever it leaves.
  memory = stage_memory(graph, GradientFlow(graph), plan, 0, 1);
  EXPECT_EQ(memory.under_way, 2 * (weight + kFlag));
  EXPECT_GE(memory.last_backward, 3 * weight);
  EXPECT_LE(memory.last_backward, memory.later_backward + 3 * weight);
}

/// A returned tensor that is larger than all else.
TEST(PeakMemory, EveryRankHoldsReturnedTensorsTwiceWhileTheyAreExchanged) {
  GraphBuilder g;
  const ValueId a = g.linear(g.input({256, 8}), "a", 8);
  const ValueId wide = g.linear(a, "b", 512);
  Graph graph = g.build(g.sum(wide));
  graph.returned = {wide};
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"a", 0}, {"b", 1}};
  const Plan plan = partition(graph, options);
  const int64_t returned = 4 * (4 * 256 * 512), arguments = 4 * (4 * 256 * 8);
  const int64_t parameters[] = {4 * (8 * 8 + 8), 4 * (512 * 8 + 512)};
  EXPECT_EQ(plan.predicted_peak_bytes[0],
            with_margin(2 * parameters[0] + arguments + plan.stages[0].cost.message_bytes + 2 * returned));
  EXPECT_EQ(plan.predicted_peak_bytes[1],
            with_margin(2 * parameters[1] + arguments + 2 * kLoss + plan.stages[1].cost.message_bytes + 2 * returned));
}

TEST(PeakMemory, SharedParametersAddTwoOfTheirGradientsInTheEnd) {
  GraphBuilder g;
  const ValueId shared = g.parameter("shared", {512, 512});
  const ValueId x = g.linear(g.linear_with(g.input({1, 512}), shared), "a", 8);
  const Graph graph = g.build(g.sum(g.linear_with(g.linear(x, "b", 512), shared)));
  PartitionOptions options = on_ranks(2);
  options.placement.homes = {
      {"shared", {{0, 1}}}, {"a.weight", {{0}}}, {"a.bias", {{0}}}, {"b.weight", {{1}}}, {"b.bias", {{1}}}};
  const Plan plan = partition(graph, options);
  const int64_t weight = 4 * 512 * 512, other = 4 * (512 * 8 + 8);
  const int64_t arguments = 4 * (4 * 512), loss = 4 * kLoss;
  EXPECT_EQ(plan.predicted_peak_bytes[0],
            with_margin(2 * (weight + other) + arguments + plan.stages[0].cost.message_bytes + loss + 2 * weight));
}

/// 1F1B on two ranks: the first has two microbatches in flight, the last one.
TEST(PeakMemory, MessagesCountOnBothSidesOfACut) {
  const Graph graph = mlp(2);
  PartitionOptions options = on_ranks(2);
  options.request.num_microbatches = 16;
  options.placement.pins = {{"layers.0", 0}, {"layers.1", 1}};
  const int64_t message = kActivation + kMessageOverheadBytes;
  const Plan plan = partition(graph, options);
  // Sent: two on their way and one that has left. Received: two posted, and the one in use.
  EXPECT_EQ(plan.stages[0].cost.message_bytes, (3 + 3) * message);
  EXPECT_EQ(plan.stages[1].cost.message_bytes, (3 + 3) * message);
  options.request.num_microbatches = 1;
  EXPECT_EQ(partition(graph, options).stages[0].cost.message_bytes, 2 * message);
}

TEST(PeakMemory, MessagesThatNothingLimitsCountAllAtOnce) {
  const Graph graph = mlp(2);
  PartitionOptions options = on_ranks(2);
  options.placement.pins = {{"layers.0", 0}, {"layers.1", 1}};
  const Plan plan = partition(graph, options);
  Schedule schedule = generate(plan.schedule, stage_graph(plan, graph), 16);
  for (const bool limits_sends : {true, false}) {
    schedule.limits_sends = limits_sends;
    const BufferCounts expected{{kActivation + kMessageOverheadBytes, (limits_sends ? 3 : 16) + 3}};
    EXPECT_EQ(message_buffers(graph, plan, schedule, 0, false), expected);
  }
}

TEST(PeakMemory, MoreActiveMicrobatchesThanThereAreCountAsAllOfThem) {
  const Graph graph = mlp(4);
  PartitionOptions options = on_ranks(2);
  options.request.schedule.active_microbatches = options.request.num_microbatches + 1;  // the second rank holds one less
  const auto all = partition(graph, options).predicted_peak_bytes;
  options.request.schedule.active_microbatches = std::numeric_limits<int>::max();
  EXPECT_EQ(partition(graph, options).predicted_peak_bytes, all);
}

/// It adds up no gradients and steps no optimizer.
TEST(PeakMemory, EvaluationHoldsNothingOfTraining) {
  const auto peak_of = [](const std::string& second, double workspace) {
    GraphBuilder g;
    const ValueId first = g.parameter("first", {512, 512});
    const ValueId again = second == "first" ? first : g.parameter(second, {512, 512});
    g.linear_with(g.linear(g.linear(g.linear_with(g.input({1, 512}), first), "a", 8), "b", 512), again);
    PartitionOptions options = on_ranks(2);
    options.placement.homes = {
        {"a.weight", {{0}}}, {"a.bias", {{0}}}, {"b.weight", {{1}}}, {"b.bias", {{1}}}, {"second", {{1}}}};
    options.placement.homes["first"] = {second == "first" ? std::vector<int>{0, 1} : std::vector<int>{0}};
    options.behaviour.optimizer_workspace_factor = workspace;
    options.behaviour.gradient_bucket_bytes = int64_t{1} << 30;
    options.behaviour.gradients_overlap = false;
    return partition(g.build(), options).predicted_peak_bytes;
  };
  const auto expected = peak_of("second", 0);
  EXPECT_EQ(peak_of("first", 0), expected) << "a tied weight";
  EXPECT_EQ(peak_of("second", 3), expected) << "the optimizer's step";
}

TEST(PeakMemory, PredictedPeakIsEnoughAsALimit) {
  const Graph graph = mlp(8);
  for (const ScheduleKind kind : {ScheduleKind::kSimple, ScheduleKind::kInterleaved}) {
    for (const int num_microbatches : {1, 2, 4}) {
      for (const int num_ranks : {1, 2, 3}) {
        PartitionOptions options = on_ranks(num_ranks);
        options.request.schedule.kind = kind;
        options.request.num_microbatches = num_microbatches;
        const Plan unlimited = partition(graph, options);
        const auto& peaks = unlimited.predicted_peak_bytes;
        options.request.memory_limit_bytes = *std::max_element(peaks.begin(), peaks.end());
        EXPECT_EQ(partition(graph, options), unlimited) << num_microbatches << " microbatches, " << num_ranks << " ranks";
      }
    }
  }
}

TEST(PeakMemory, TighterLimitIsMetByASlowerSplit) {
  const Graph graph = mlp(8);
  PartitionOptions options = on_ranks(3);
  options.request.num_microbatches = 1;
  const Plan unlimited = partition(graph, options);
  const auto& peaks = unlimited.predicted_peak_bytes;
  options.request.memory_limit_bytes = *std::max_element(peaks.begin(), peaks.end()) - 1;
  const Plan limited = partition(graph, options);
  for (int64_t bytes : limited.predicted_peak_bytes) EXPECT_LE(bytes, options.request.memory_limit_bytes);
  EXPECT_GE(limited.slowest_stage_us, unlimited.slowest_stage_us);
}

}  // namespace
}  // namespace smp::partitioner
