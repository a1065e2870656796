// From plan and graph to stages and edges; which stages have a backward.
#include "partitioner/schedule/stage_graph.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

/// A graph written node by node; node i of the result runs on the i-th given stage.
class StageGraphOfPlan : public ::testing::Test {
 protected:
  ValueId value(ValueKind kind, bool requires_grad) {
    Value made;
    made.kind = kind;
    made.spec.requires_grad = requires_grad;
    made.storage = static_cast<int32_t>(graph_.values.size());
    graph_.values.push_back(made);
    return static_cast<ValueId>(graph_.values.size()) - 1;
  }

  ValueId node(int stage, const std::vector<ValueId>& inputs, bool requires_grad) {
    const ValueId output = value(ValueKind::kResult, requires_grad);
    graph_.values[output].producer = static_cast<NodeId>(graph_.nodes.size());
    Node made;
    made.op = "aten::test";
    for (ValueId input : inputs) made.arguments.push_back(ValueRef{input});
    made.outputs = {output};
    graph_.nodes.push_back(made);
    plan_.stage_of_node.push_back(stage);
    return output;
  }

  void use_stages(const std::vector<int>& ranks, int num_ranks) {
    plan_.num_ranks = num_ranks;
    plan_.stages.resize(ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) plan_.stages[i].rank = ranks[i];
  }

  Graph graph_;
  Plan plan_;
};

TEST_F(StageGraphOfPlan, TransfersBecomeUniqueEdges) {
  use_stages({0, 1, 0}, 2);
  const ValueId input = value(ValueKind::kInput, false);
  const ValueId weight = value(ValueKind::kParameter, true);
  const ValueId a = node(0, {input, weight}, true);
  const ValueId b = node(0, {input, weight}, true);
  const ValueId c = node(1, {a, b}, true);
  graph_.backward_roots = {node(2, {c, a}, true)};
  plan_.activations = {{input, kInputStage, 0}, {a, 0, 1}, {a, 0, 2}, {b, 0, 1}, {c, 1, 2}};
  plan_.gradients = {{a, 2, 1}, {c, 2, 1}, {a, 1, 0}, {b, 1, 0}};
  const StageGraph result = stage_graph(plan_, graph_);
  EXPECT_EQ(result.num_ranks, 2);
  EXPECT_EQ(result.rank_of_stage, (std::vector{0, 1, 0}));
  EXPECT_EQ(result.activations, (std::vector<Edge>{{kInputStage, 0}, {0, 1}, {0, 2}, {1, 2}}));
  EXPECT_EQ(result.gradients, (std::vector<Edge>{{1, 0}, {2, 1}}));
  EXPECT_EQ(result.stage_has_backward, (std::vector{true, true, true}));
  EXPECT_TRUE(result.is_local({kInputStage, 0}));
  EXPECT_TRUE(result.is_local({0, 2}));
  EXPECT_FALSE(result.is_local({0, 1}));
}

TEST_F(StageGraphOfPlan, EvaluationHasNoBackwardAnywhere) {
  use_stages({0, 1}, 2);
  const ValueId weight = value(ValueKind::kParameter, true);
  node(1, {node(0, {weight}, true)}, true);
  plan_.activations = {{1, 0, 1}};
  plan_.gradients = {{1, 1, 0}};  // the plan was made for training
  const StageGraph result = stage_graph(plan_, graph_);
  EXPECT_TRUE(result.gradients.empty());
  EXPECT_EQ(result.stage_has_backward, (std::vector{false, false}));
}

TEST_F(StageGraphOfPlan, FrozenStageHasNoBackward) {
  use_stages({0, 1}, 2);
  const ValueId frozen = value(ValueKind::kParameter, false);
  const ValueId weight = value(ValueKind::kParameter, true);
  const ValueId a = node(0, {frozen}, false);
  graph_.backward_roots = {node(1, {a, weight}, true)};
  plan_.activations = {{a, 0, 1}};
  EXPECT_EQ(stage_graph(plan_, graph_).stage_has_backward, (std::vector{false, true}));
}

TEST_F(StageGraphOfPlan, BranchThatDoesNotReachTheLossHasNoBackward) {
  use_stages({0, 1, 2}, 3);
  const ValueId weight = value(ValueKind::kParameter, true);
  const ValueId a = node(0, {weight}, true);
  graph_.backward_roots = {node(1, {a}, true)};
  graph_.returned = {node(2, {a}, true)};  // a metric
  plan_.activations = {{a, 0, 1}, {a, 0, 2}};
  plan_.gradients = {{a, 1, 0}};
  EXPECT_EQ(stage_graph(plan_, graph_).stage_has_backward, (std::vector{true, true, false}));
}

TEST_F(StageGraphOfPlan, NoGradNodesBreakTheWay) {
  use_stages({0, 1}, 2);
  const ValueId weight = value(ValueKind::kParameter, true);
  const ValueId a = node(0, {weight}, true);
  graph_.backward_roots = {node(1, {a}, true)};
  graph_.nodes[1].grad_enabled = false;
  plan_.activations = {{a, 0, 1}};
  EXPECT_EQ(stage_graph(plan_, graph_).stage_has_backward, (std::vector{false, false}));
}

TEST_F(StageGraphOfPlan, NoGradNodesThatGiveBackTheirArgumentDoNot) {
  use_stages({0, 1}, 2);
  const ValueId weight = value(ValueKind::kParameter, true);
  const ValueId a = node(0, {weight}, true), same = node(1, {a}, true);
  graph_.backward_roots = {node(1, {same}, true)};
  graph_.values[a].storage = graph_.values[same].storage = 1;
  graph_.nodes[1].grad_enabled = false;
  plan_.activations = {{a, 0, 1}};
  EXPECT_EQ(stage_graph(plan_, graph_).stage_has_backward, (std::vector{true, true}));
}

TEST_F(StageGraphOfPlan, WriteThroughAViewReachesTheLoss) {
  use_stages({0, 1}, 2);
  const ValueId weight = value(ValueKind::kParameter, true);
  const ValueId base = value(ValueKind::kBuffer, true);
  const ValueId written = node(0, {weight}, true);  // copy_ into a view of `base`
  graph_.values[written].storage = graph_.values[base].storage;
  graph_.nodes.back().written_storages = {graph_.values[base].storage};
  graph_.backward_roots = {node(1, {base}, true)};
  plan_.activations = {{written, 0, 1}};
  EXPECT_EQ(stage_graph(plan_, graph_).stage_has_backward, (std::vector{true, true}));
}

TEST_F(StageGraphOfPlan, ViewBesideTheWayToTheLossHasNoBackward) {
  use_stages({0, 1}, 2);
  const ValueId weight = value(ValueKind::kParameter, true);
  const ValueId a = node(0, {weight}, true);
  graph_.backward_roots = {a};
  const ValueId view = node(1, {a}, true);  // read by nothing
  graph_.values[view].storage = graph_.values[a].storage;
  plan_.activations = {{a, 0, 1}};
  EXPECT_EQ(stage_graph(plan_, graph_).stage_has_backward, (std::vector{true, false}));
}

TEST_F(StageGraphOfPlan, StageOfARelayHasABackward) {
  use_stages({0, 1}, 2);
  const ValueId a = node(0, {}, false);
  graph_.backward_roots = {node(1, {}, true)};
  plan_.gradients = {{a, 1, 0}};
  EXPECT_EQ(stage_graph(plan_, graph_).stage_has_backward, (std::vector{true, true}));
}

TEST_F(StageGraphOfPlan, PlanOfAnotherGraphIsRefused) {
  use_stages({0}, 1);
  node(0, {}, true);
  plan_.stage_of_node = {0, 0};
  EXPECT_THROW(stage_graph(plan_, graph_), c10::ValueError);
  plan_.stage_of_node = {1};
  EXPECT_THROW(stage_graph(plan_, graph_), c10::ValueError);
}

TEST(StageGraphValidate, BadGraphsAreRefused) {
  const StageGraph good = testing::chain(3);
  EXPECT_NO_THROW(validate(good));
  const auto expect_refused = [&](const auto& spoil) {
    StageGraph bad = good;
    spoil(bad);
    EXPECT_THROW(validate(bad), c10::ValueError);
  };
  expect_refused([](StageGraph& g) { g.num_ranks = 0; });
  expect_refused([](StageGraph& g) { g.rank_of_stage[1] = 3; });
  expect_refused([](StageGraph& g) { g.rank_of_stage[1] = -1; });
  expect_refused([](StageGraph& g) { g.stage_has_backward.pop_back(); });
  expect_refused([](StageGraph& g) { g.activations.push_back({2, 3}); });
  expect_refused([](StageGraph& g) { g.activations.push_back({2, 1}); });
  expect_refused([](StageGraph& g) { g.activations.push_back({1, 2}); });  // twice
  expect_refused([](StageGraph& g) { std::swap(g.activations[0], g.activations[2]); });
  expect_refused([](StageGraph& g) { g.gradients.push_back({2, kInputStage}); });
  expect_refused([](StageGraph& g) { g.gradients = {{1, 2}}; });
  expect_refused([](StageGraph& g) { g.stage_has_backward[1] = false; });
}

}  // namespace
}  // namespace smp::partitioner
