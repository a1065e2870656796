// The trace, read back as JSON.
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <map>

#include "partitioner/report/trace_io.h"
#include "tests/unit/partitioner/report/timelines.h"

namespace smp::partitioner {
namespace {

namespace json = boost::json;
using testing::record_of;
using testing::two_ranks;

json::array events_of(const std::vector<RankTimeline>& record) {
  std::string text;
  write_trace(record, [&](std::string_view part) { text += part; });
  return json::parse(text).at("traceEvents").as_array();
}

std::vector<json::object> in_category(const json::array& events, std::string_view category) {
  std::vector<json::object> found;
  for (const json::value& event : events) {
    const json::value* own = event.as_object().if_contains("cat");
    if (own != nullptr && own->as_string() == category) found.push_back(event.as_object());
  }
  return found;
}

TEST(Trace, HoldsEveryActionWithItsPlaceAndTime) {
  const auto actions = in_category(events_of(record_of({two_ranks()})), "action");
  ASSERT_EQ(actions.size(), 8U);
  EXPECT_EQ(actions[0], (json::object{{"ph", "X"},
                                      {"pid", 0},
                                      {"tid", 0},
                                      {"cat", "action"},
                                      {"name", "F 0"},
                                      {"ts", 0.01},
                                      {"dur", 0.01},
                                      {"args", {{"step", 7}, {"stage", 0}, {"microbatch", 0}}}}));
  EXPECT_EQ(actions[4].at("name"), "receive F 0");
  EXPECT_EQ(actions[4].at("tid"), 1);
  EXPECT_EQ(actions[4].at("args").at("peer"), 0);
}

TEST(Trace, BeginsAtZeroAndNamesReplicasAndRanks) {
  auto record = record_of({two_ranks()});
  for (RankTimeline& rank : record_of({two_ranks()}, /*replica=*/1)) record.push_back(rank);
  for (RankTimeline& rank : record) {
    for (RankStep& step : rank.steps) {
      step.start_ns += 1000000, step.end_ns += 1000000;
      for (Span& span : step.spans) span.start_ns += 1000000, span.end_ns += 1000000;
    }
  }
  const json::array events = events_of(record);
  EXPECT_EQ(in_category(events, "step").front().at("ts"), 0.0);
  std::vector<std::string> names;
  for (const json::value& event : events) {
    if (event.at("ph") == "M") names.emplace_back(event.at("args").at("name").as_string());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"replica 0", "rank 0", "rank 1", "replica 1", "rank 0", "rank 1"}));
}

TEST(Trace, JoinsSendAndReceiveByAnArrow) {
  PipelineStep next = two_ranks();
  for (RankStep& rank : next) rank.number = 8;
  std::map<int64_t, std::string> phases;
  for (const json::object& end : in_category(events_of(record_of({two_ranks(), next})), "message")) {
    phases[end.at("id").as_int64()] += end.at("ph").as_string();
  }
  EXPECT_EQ(phases.size(), 4U);
  for (const auto& [id, both] : phases) EXPECT_TRUE(both == "sf" || both == "fs") << both;
}

TEST(Trace, IdleTimeFillsWhatIsNotComputed) {
  double idle_us = 0;
  for (const json::object& piece : in_category(events_of(record_of({two_ranks()})), "idle"))
    idle_us += piece.at("dur").as_double();
  EXPECT_NEAR(idle_us, (2 * 78 - 2 * 25) / 1000.0, 1e-9);
}

}  // namespace
}  // namespace smp::partitioner
