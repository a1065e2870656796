// Times of operators in the place of predictions.
#include "partitioner/cost/measured_costs.h"

#include <gtest/gtest.h>

#include "partitioner/cost/operator_cost.h"
#include "partitioner/partition/graph_costs.h"
#include "partitioner/partition/partition.h"
#include "tests/support/graph_builder.h"
#include "tests/support/messages.h"

namespace smp::partitioner {
namespace {

using smp::testing::GraphBuilder;

/// `num_layers` times linear and relu on `rows` rows, and the sum of all.
Graph layers(int num_layers, int64_t rows = 8) {
  GraphBuilder g;
  ValueId x = g.input({rows, 16});
  for (int i = 0; i < num_layers; ++i) x = g.relu(g.linear(x, "fc" + std::to_string(i), 16));
  return g.build(g.sum(x));
}

using Times = std::vector<std::optional<OperatorTime>>;

Times times_of(const Graph& graph, double forward_us, double backward_us) {
  return Times(graph.nodes.size(), OperatorTime{forward_us, backward_us});
}

TEST(MeasuredCosts, KnowTheSameOperatorInAnotherGraphButNotInAnotherModule) {
  const Graph graph = layers(3);
  EXPECT_EQ(operator_key(graph, graph.nodes[2]), operator_key(layers(5), layers(5).nodes[2]));
  EXPECT_NE(operator_key(graph, graph.nodes[2]), operator_key(graph, graph.nodes[4]));
}

TEST(MeasuredCosts, TellShapesArgumentsRolesAndModesApart) {
  const Graph graph = layers(1);
  const std::string key = operator_key(graph, graph.nodes[0]);
  EXPECT_NE(key, operator_key(layers(1, 9), layers(1, 9).nodes[0]));
  Graph other = graph;
  other.nodes[0].grad_enabled = false;
  EXPECT_NE(key, operator_key(other, other.nodes[0]));
  other = graph;
  other.nodes[0].autocast.enabled = true;
  EXPECT_NE(key, operator_key(other, other.nodes[0]));
  other = graph;
  other.nodes[0].arguments.emplace_back(2.5);
  EXPECT_NE(key, operator_key(other, other.nodes[0]));
  other = graph;
  other.values[other.inputs[0]].spec.requires_grad = true;
  EXPECT_NE(key, operator_key(other, other.nodes[0]));
  other = graph;
  other.values[other.inputs[0]].spec.strides = {1, 8};
  EXPECT_NE(key, operator_key(other, other.nodes[0]));
  other = graph;
  other.backward_roots.clear();
  EXPECT_NE(key, operator_key(other, other.nodes[0]));
}

TEST(MeasuredCosts, CountEqualOperatorsWithTheirMean) {
  Graph graph = layers(3);
  graph.nodes[4].module = graph.nodes[2].module;  // one that is called twice
  Times times = times_of(graph, 0, 0);
  times[2] = OperatorTime{10, 30};
  times[4] = OperatorTime{20, 50};
  MeasuredCosts costs;
  costs.add(graph, times);
  EXPECT_EQ(*costs.find(graph, graph.nodes[4]), (OperatorTime{15, 40}));
  times[2] = times[4] = OperatorTime{1, 2};
  costs.add(graph, times);  // in place of what was known
  EXPECT_EQ(*costs.find(graph, graph.nodes[2]), (OperatorTime{1, 2}));
  times[2] = OperatorTime{5, 6};
  times[4] = std::nullopt;
  costs.add(graph, times);
  EXPECT_EQ(*costs.find(graph, graph.nodes[4]), (OperatorTime{5, 6}));
}

TEST(PredictedStep, CountsTheBodiesThatTheFirstRankRuns) {
  const Graph graph = layers(2);
  const auto step_us = [&](double body_us) {
    PartitionOptions options;
    options.request.num_ranks = 2;
    options.request.num_microbatches = 4;
    options.machine.device.body_us = body_us;
    return partition(graph, options).predicted_step_us;
  };
  EXPECT_NEAR(step_us(10) - step_us(0), 10 * 4 * static_cast<double>(graph.nodes.size()), 1e-6);
}

// What a stage may put behind the gradients that it sends.
TEST(ParameterShareOfBackward, IsThatOfTheFactorsThatAreParameters) {
  const Graph graph = layers(2);
  EXPECT_EQ(parameter_share_of_backward(graph, graph.nodes[0]), 1);  // the batch wants no gradient
  EXPECT_EQ(parameter_share_of_backward(graph, graph.nodes[1]), 0);  // relu
  EXPECT_EQ(parameter_share_of_backward(graph, graph.nodes[2]), 0.5);
  Graph evaluation = graph;
  evaluation.nodes[2].grad_enabled = false;
  EXPECT_EQ(parameter_share_of_backward(evaluation, evaluation.nodes[2]), 0);
}

TEST(MeasuredCosts, SurviveAsText) {
  const Graph graph = layers(2);
  MeasuredCosts costs, copy;
  costs.add(graph, times_of(graph, 0.1, 1.0 / 3));
  EXPECT_EQ(costs.averaging_us_per_mib(), 0);
  costs.set_averaging_us_per_mib(12.5);
  copy.add_json(costs.to_json());
  EXPECT_EQ(copy.averaging_us_per_mib(), 12.5);
  EXPECT_EQ(copy.size(), costs.size());
  EXPECT_EQ(copy.size(), 4u);  // operators
  EXPECT_TRUE(copy.covers(graph));
  EXPECT_FALSE(copy.covers(layers(2, 9)));
  EXPECT_EQ(*copy.find(graph, graph.nodes[1]), *costs.find(graph, graph.nodes[1]));
}

TEST(MeasuredCosts, RefuseOtherTextsAndTakeNothingOfThem) {
  MeasuredCosts costs;
  for (const std::string text :
       {"", "[]", "{\"a\": [1, 2]", "{\"a\": [1, 2], \"b\": [1]}", "{\"a\": [1, 2], \"b\": [1, 2, 0]}",
        "{\"a\": [1, 2], \"b\": [1, -2]}", "{\"a\": [1, 2], \"b\": [1, 1e999]}", "{\"a\": [1, 2], \"b\": [1, \"2\"]}",
        "{\"a\": [1, 2], \"averaging\": [1, 2]}"}) {
    EXPECT_THROW(costs.add_json(text), c10::ValueError) << text;
  }
  EXPECT_EQ(costs.size(), 0u);
}

TEST(MeasuredCosts, TakeThePlaceOfPredictions) {
  const Graph graph = layers(2);
  MeasuredCosts measured;
  measured.add(graph, times_of(graph, 7, 11));
  const GraphCosts costs = graph_costs(graph, {}, &measured);
  EXPECT_DOUBLE_EQ(costs.forward_us[1], 7);
  EXPECT_DOUBLE_EQ(costs.backward_us[1], 11);
  EXPECT_DOUBLE_EQ(costs.total_us, 18.0 * static_cast<double>(graph.nodes.size()));
}

TEST(MeasuredCosts, CorrectThePredictionOfOperatorsThatTheyDoNotKnow) {
  const Graph known = layers(1), graph = layers(1, 9);  // parameters alone have the same shapes
  GraphBuilder g;
  const ValueId both = g.linear(g.input({8, 16}), "fc0", 16);
  const Graph mixed = g.build(g.sum(g.op("aten::tanh", {both}, {8, 16})));
  const GraphCosts predicted = graph_costs(mixed, {});
  MeasuredCosts measured;
  Times times = times_of(known, 0, 0);
  times[0] = OperatorTime{3 * predicted.forward_us[0], 3 * predicted.backward_us[0]};
  times[2] = OperatorTime{3 * predicted.forward_us[2], 3 * predicted.backward_us[2]};
  measured.add(known, times);
  const GraphCosts costs = graph_costs(mixed, {}, &measured);
  EXPECT_NEAR(costs.forward_us[1], 3 * predicted.forward_us[1], 1e-9);
  EXPECT_NEAR(costs.total_us, 3 * predicted.total_us, 1e-6);
  // None is known: as predicted.
  EXPECT_DOUBLE_EQ(graph_costs(graph, {}, &measured).total_us, graph_costs(graph, {}).total_us);
}

TEST(MeasuredCosts, MoveTheCut) {
  const Graph graph = layers(4);
  MeasuredCosts measured;
  Times times = times_of(graph, 100, 100);
  measured.add(graph, times);
  PartitionOptions options;
  options.request.num_ranks = 2;
  options.request.num_microbatches = 4;
  options.machine.measured = &measured;
  const size_t even = partition(graph, options).stages[0].nodes.size();
  times[0] = OperatorTime{100000, 100000};  // the first layer needs no gradient of its input: an operator of its own
  measured.add(graph, times);
  EXPECT_LT(partition(graph, options).stages[0].nodes.size(), even);
  EXPECT_NEAR(partition(graph, options).stages[0].cost.forward_us, 100000, 1000);
}

}  // namespace
}  // namespace smp::partitioner
