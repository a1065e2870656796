// Stages cut around operators that are not taped.
#include "partitioner/partition/segments.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "partitioner/graph/untaped.h"
#include "partitioner/plan/check_plan.h"
#include "tests/support/graph_builder.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;

/// Of two stages of one rank each, the first of `cut` operators; 0: of one stage.
Plan plan_of(const Graph& graph, NodeId cut) {
  Plan plan;
  plan.num_ranks = cut > 0 ? 2 : 1;
  plan.stages.resize(static_cast<size_t>(plan.num_ranks));
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    const int stage = cut > 0 && n >= cut ? 1 : 0;
    plan.stages[static_cast<size_t>(stage)].rank = stage;
    plan.stages[static_cast<size_t>(stage)].nodes.push_back(n);
    plan.stage_of_node.push_back(stage);
  }
  return plan;
}

Graph with_foreign(Graph graph, const std::vector<NodeId>& untaped) {
  for (const NodeId n : untaped) graph.nodes[static_cast<size_t>(n)].op = "smp::opaque";
  return graph;
}

/// A letter per operator: 't' in a taped segment, 'u' in another, '.' elsewhere; '|' between segments. "whole": no cut.
std::string segments_of(Graph graph, int stage, const std::vector<NodeId>& untaped, NodeId cut = 0) {
  graph = with_foreign(std::move(graph), untaped);
  const auto segments = cut_into_segments(graph, plan_of(graph, cut), stage);
  if (!segments) return "whole";
  std::string text;
  int before = segments->first;
  for (const int of_node : segments->plan.stage_of_node) {
    const int segment = of_node - segments->first;
    const bool is_here = 0 <= segment && segment < static_cast<int>(segments->is_taped.size());
    if (is_here && of_node != before) text += '|';
    before = of_node;
    text += !is_here ? '.' : segments->is_taped[static_cast<size_t>(segment)] ? 't' : 'u';
  }
  return text;
}

GraphBuilder chain(int length) {
  GraphBuilder g;
  ValueId x = g.input({4});
  for (int i = 0; i < length; ++i) x = g.relu(x);
  return g;
}

TEST(Segments, LieAroundWhatIsNotTaped) {
  const Graph graph = chain(20).build();
  EXPECT_EQ(segments_of(graph, 0, {9}), "ttttttttt|u|tttttttttt");
  EXPECT_EQ(segments_of(graph, 0, {}), "whole");
}

TEST(Segments, OfFewOperatorsAreNotWorthATape) {
  const Graph graph = chain(20).build();
  EXPECT_EQ(segments_of(graph, 0, {7}), "uuuuuuuu|tttttttttttt");  // seven in front
  EXPECT_EQ(segments_of(graph, 0, {8}), "tttttttt|u|ttttttttttt");
  EXPECT_EQ(segments_of(graph, 0, {9, 14}), "ttttttttt|uuuuuuuuuuu");
  EXPECT_EQ(segments_of(graph, 0, {5, 12}), "whole");
}

/// The same for a graph with a backward and these regions: 'T' and 'U' run again.
std::string regions_of(Graph graph, const std::vector<std::pair<NodeId, NodeId>>& regions,
                       const std::vector<NodeId>& untaped = {}, bool has_tapes = true) {
  for (size_t r = 0; r < regions.size(); ++r) {
    for (NodeId n = regions[r].first; n < regions[r].second; ++n)
      graph.nodes[static_cast<size_t>(n)].recompute_region = static_cast<int32_t>(r);
  }
  graph = with_foreign(std::move(graph), untaped);
  Plan plan = plan_of(graph, 0);
  plan.recomputation = marked_recomputation(graph);
  const auto segments = cut_into_segments(graph, plan, 0, has_tapes);
  if (!segments) return "whole";
  std::string text;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const auto segment = static_cast<size_t>(segments->plan.stage_of_node[n]);
    if (n > 0 && segments->plan.stage_of_node[n] != segments->plan.stage_of_node[n - 1]) text += '|';
    const bool is_again = segments->is_recomputed[segment];
    text += segments->is_taped[segment] ? (is_again ? 'T' : 't') : (is_again ? 'U' : 'u');
  }
  return text;
}

TEST(Segments, OfRecomputeRegionsStandByThemselves) {
  GraphBuilder g = chain(11);
  const Graph evaluation = g.build(), graph = g.build(g.sum(10));
  EXPECT_EQ(regions_of(graph, {{2, 5}, {5, 7}}), "tt|TTT|TT|ttttt");
  EXPECT_EQ(regions_of(graph, {{0, 12}}), "TTTTTTTTTTTT");
  EXPECT_EQ(regions_of(graph, {{2, 5}}, {}, /*has_tapes=*/false), "uu|UUU|uuuuuuu");
  EXPECT_EQ(regions_of(graph, {{2, 7}}, {4}), "tt|TT|u|TT|ttttt");  // foreign code runs once
  EXPECT_EQ(regions_of(evaluation, {{2, 5}}), "whole");
}

TEST(Segments, OfRegionsOutOfWhichAWriteReachesAreKept) {
  GraphBuilder g;
  ValueId x = g.relu(g.input({4}));
  const ValueId written = g.relu(x);  // node 1
  x = g.relu(g.relu(written));
  g.in_place("aten::mul_", written);  // node 4
  x = g.relu(g.relu(x));
  EXPECT_EQ(regions_of(g.build(g.sum(x)), {{1, 3}, {5, 7}}), "ttttt|TT|t");
}

TEST(Segments, OtherStagesStayAsTheyAre) {
  const Graph graph = chain(22).build();
  EXPECT_EQ(segments_of(graph, 1, {12}, 3), "...|ttttttttt|u|ttttttttt");
  EXPECT_EQ(segments_of(graph, 0, {9}, 10), "ttttttttt|u............");
  const auto segments = cut_into_segments(with_foreign(graph, {9}), plan_of(graph, 10), 0);
  ASSERT_TRUE(segments);
  EXPECT_EQ(segments->plan.stages.size(), 3U);
  EXPECT_EQ(segments->plan.stages.back().rank, 1);
  EXPECT_EQ(segments->plan.stages.back().nodes.size(), 12U);
}

TEST(Segments, NeverSeparateWhatMustShareAStage) {
  GraphBuilder g = chain(10);
  const ValueId written = g.relu(g.input({4}));  // node 10
  g.relu(written);
  g.in_place("aten::mul_", written);  // node 12
  ValueId x = written;
  for (int i = 0; i < 10; ++i) x = g.relu(x);
  EXPECT_EQ(segments_of(g.build(), 0, {11}), "tttttttttt|uuu|tttttttttt");
}

TEST(Segments, PassWhatEveryPlanMust) {
  GraphBuilder g;
  ValueId x = g.input({4, 4});
  const ValueId shared = g.parameter("shared", {4, 4});
  for (int i = 0; i < 20; ++i) x = i % 5 == 0 ? g.linear_with(x, shared) : g.relu(x);
  const Graph graph = with_foreign(g.build(g.sum(x)), {9});
  const auto segments = cut_into_segments(graph, plan_of(graph, 0), 0);
  ASSERT_TRUE(segments);
  EXPECT_NO_THROW(check(graph, segments->plan));
  size_t num_relayed = 0;
  for (const Transfer& relay : segments->plan.gradients) num_relayed += relay.value == shared;
  EXPECT_EQ(num_relayed, 1U) << "between the two segments that read it";
}

TEST(Segments, SayEachReasonOnce) {
  Graph graph = with_foreign(chain(30).build(), {9, 10});
  graph.nodes[20].op = "aten::one_hot";
  const auto segments = cut_into_segments(graph, plan_of(graph, 0), 0);
  ASSERT_TRUE(segments);
  const std::vector<std::string> want{"smp::opaque is none of LibTorch's own operators", "aten::one_hot reads values"};
  EXPECT_EQ(segments->reasons, want);
}

TEST(Untaped, AreOperatorsThatReadValuesOnTheHost) {
  EXPECT_EQ(why_untaped("aten::narrow", "Tensor"), "aten::narrow reads values");
  EXPECT_EQ(why_untaped("aten::narrow", ""), "");
  EXPECT_NE(why_untaped("aten::lstm", "data"), "");
  EXPECT_EQ(why_untaped("aten::lstm", "input"), "");
}

TEST(Untaped, AreTrainedSparseRowsAndComplexNumbers) {
  GraphBuilder g;
  const ValueId table = g.parameter("table", {8, 4}), rows = g.input({2});
  const ValueId x = g.op("aten::embedding", {table, rows}, {2, 4});
  g.last_node().arguments.insert(g.last_node().arguments.end(), {int64_t{-1}, false, true});
  const ValueId complex = g.parameter("complex", {2, 4});
  g.spec(complex).dtype = c10::kComplexFloat;
  const ValueId y = g.op("aten::mul", {x, complex}, {2, 4});
  const Graph training = g.build(g.sum(y));
  EXPECT_EQ(why_untaped(training, training.nodes[0]), "aten::embedding makes sparse gradients");
  EXPECT_NE(why_untaped(training, training.nodes[1]).find("complex numbers"), std::string::npos);
  EXPECT_EQ(why_untaped(training, training.nodes[2]), "");
  const Graph evaluation = g.build();
  for (const Node& node : evaluation.nodes) EXPECT_EQ(why_untaped(evaluation, node), "");
}

}  // namespace
}  // namespace smp::partitioner
