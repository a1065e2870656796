// Tables that come as data: taken as they are, and refused when no rank could perform them.
#include "partitioner/schedule/given.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "partitioner/schedule/check.h"
#include "tests/support/messages.h"
#include "tests/unit/partitioner/schedule/schedule_graphs.h"

namespace smp::partitioner {
namespace {

using Columns = std::vector<std::vector<Action>>;

Columns computations_of(const Schedule& schedule) {
  Columns columns;
  for (const auto& column : schedule.columns) {
    std::vector<Action>& kept = columns.emplace_back();
    for (const Action& action : column) {
      if (action.is_compute()) kept.push_back(action);
    }
  }
  return columns;
}

std::vector<const StageGraph*> all(const StageGraph& graph, int num_microbatches) {
  return std::vector<const StageGraph*>(static_cast<size_t>(num_microbatches), &graph);
}

std::string refusal(const StageGraph& graph, const Columns& columns, int num_microbatches) {
  const auto graphs = all(graph, num_microbatches);
  return support::message_of<c10::ValueError>([&] { check(given_schedule(columns, graphs).value(), graphs); });
}

TEST(GivenSchedule, IsTheGeneratedTableOfItsComputations) {
  testing::RandomGraphs random(1);
  for (int i = 0; i < 200; ++i) {
    const int ranks = random.number(1, 4);
    const StageGraph graph = random.stage_graph(ranks, random.placement(ranks, random.number(1, 6)));
    const auto graphs = all(graph, random.number(1, 6));
    const Schedule made = generate({}, graphs);
    const auto given = given_schedule(computations_of(made), graphs);
    ASSERT_TRUE(given);
    EXPECT_EQ(computations_of(*given), computations_of(made));
    EXPECT_NO_THROW(check(*given, graphs));
  }
}

TEST(GivenSchedule, IsNoneForAnotherNumberOfMicrobatchesAndForSeveralPrograms) {
  const StageGraph graph = testing::chain(2), other = graph;
  const Columns columns = computations_of(generate({}, graph, 2));
  EXPECT_FALSE(given_schedule(columns, all(graph, 3)));
  EXPECT_FALSE(given_schedule({}, all(graph, 2)));
  const std::vector<const StageGraph*> mixed{&graph, &other};
  EXPECT_FALSE(given_schedule(columns, mixed));
}

TEST(GivenSchedule, RefusesWhatNoRankCouldPerform) {
  const StageGraph graph = testing::chain(2);
  const Columns good = computations_of(generate({}, graph, 2));
  const auto changed = [&](const auto& change) {
    Columns columns = good;
    change(columns);
    return refusal(graph, columns, 2);
  };
  const auto is_in = [](const std::string& part, const std::string& text) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  is_in("a column for each of 2 ranks, got 3", changed([](Columns& columns) { columns.emplace_back(); }));
  is_in("rank 1's own stages in its column, got 0F0",
        changed([](Columns& columns) { columns[1].push_back(columns[0][0]); }));
  is_in("got none of this plan", changed([](Columns& columns) { columns[0].push_back({ActionKind::kForward, 7, 0}); }));
  is_in("got none of this plan", changed([](Columns& columns) { columns[0].push_back({ActionKind::kForward, 0, -1}); }));
  is_in("(0F0): expected once, got it at position", changed([](Columns& columns) { columns[0].push_back(columns[0][0]); }));
  is_in("expected 1W1, got none", changed([](Columns& columns) { columns[1].pop_back(); }));
  is_in("waiting for ever before 0W1", changed([](Columns& columns) { std::swap(columns[0][0], columns[0].back()); }));
}

}  // namespace
}  // namespace smp::partitioner
