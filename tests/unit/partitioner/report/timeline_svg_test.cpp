// The drawing: well-formed, with a bar for every action, and its words.
#include "partitioner/report/timeline_svg.h"

#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include "tests/unit/partitioner/report/timelines.h"

namespace smp::partitioner {
namespace {

using testing::two_ranks;

// Elements that are open at the end, or the first that is closed and not open.
std::vector<std::string> unclosed(const std::string& xml) {
  const std::regex tag(R"(<(/?)([a-z]+)(?:\s[^<>]*?)?(/?)>)");
  std::vector<std::string> open;
  for (std::sregex_iterator found(xml.begin(), xml.end(), tag), end; found != end; ++found) {
    const std::string name = (*found)[2];
    if ((*found)[3].length() > 0) continue;
    if ((*found)[1].length() == 0) {
      open.push_back(name);
    } else if (open.empty() || open.back() != name) {
      return {"/" + name};
    } else {
      open.pop_back();
    }
  }
  return open;
}

size_t count(const std::string& text, const std::string& part) {
  size_t number = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++number;
  return number;
}

std::string drawing_of(const PipelineStep& step, const std::optional<SimulationInput>& predicted = std::nullopt) {
  const Schedule schedule = performed_schedule(step).value();
  return timeline_svg(step, schedule, attribute(step, schedule), predicted);
}

TEST(TimelineSvg, HasABarForEveryActionOfEveryPanel) {
  SimulationInput predicted;
  predicted.times = {{0.01, 0.02}, {0.01, 0.02}};
  const std::string svg = drawing_of(two_ranks(), predicted);
  EXPECT_EQ(unclosed(svg), std::vector<std::string>{});
  const size_t panels = 3, legend = 1;
  EXPECT_EQ(count(svg, "<rect class=\"forward\""), 2 * panels + legend);
  EXPECT_EQ(count(svg, "<rect class=\"backward\""), 2 * panels + legend);
  EXPECT_EQ(count(svg, "<rect class=\"row\""), 2 * panels);
  EXPECT_EQ(count(svg, ">rank 1<"), panels);
  EXPECT_EQ(count(svg, ">F0</text>"), 2 * panels);
}

TEST(TimelineSvg, WithoutAPredictionHasTwoPanels) {
  const std::string svg = drawing_of(two_ranks());
  EXPECT_EQ(unclosed(svg), std::vector<std::string>{});
  EXPECT_EQ(count(svg, "<rect class=\"row\""), 4U);
  EXPECT_EQ(svg.find("predicted"), std::string::npos);
}

TEST(TimelineSvg, DrawsEachIdlePieceInTheColourOfItsCause) {
  const std::string svg = drawing_of(two_ranks(/*late_ns=*/20));
  const size_t legend = 1;
  EXPECT_EQ(count(svg, "<rect class=\"imbalance\""), 1 + legend);
  EXPECT_GE(count(svg, "<rect class=\"dependency\""), 3 + legend);
}

TEST(TimelineTitle, SaysBothTimesAndBubbles) {
  const PipelineStep step = two_ranks();
  const Schedule schedule = performed_schedule(step).value();
  SimulationInput predicted;
  predicted.times = {{10, 20}, {10, 20}};
  EXPECT_EQ(timeline_title(step, schedule, attribute(step, schedule), predicted),
            "step 7 (training): measured 0.08 us, bubble 67.9 %; predicted 60.0 us, bubble 50.0 %");
}

}  // namespace
}  // namespace smp::partitioner
