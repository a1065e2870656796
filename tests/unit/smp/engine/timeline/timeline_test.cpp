// When a job's timeline is written, and what of unusual steps is in it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/json.hpp>
#include <filesystem>
#include <fstream>
#include <set>

#include "smp/engine/calls/job.h"
#include "smp/engine/context/context.h"
#include "smp/engine/timeline/step_timeline.h"
#include "tests/support/loopback_world.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

namespace fs = std::filesystem;
namespace json = boost::json;
using support::contains;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

class TimelineFiles : public ::testing::Test {
 protected:
  TimelineFiles() { fs::create_directories(folder_); }
  ~TimelineFiles() override { fs::remove_all(folder_); }

  std::string trace() const { return folder_ / "trace.json"; }
  std::string drawing() const { return folder_ / "trace.svg"; }
  Config config(int64_t stages, int64_t steps) const {
    return {.pipeline_parallel_degree = stages, .microbatches = 2, .timeline = trace(), .timeline_steps = steps};
  }

  /// Names of the events of a category, by replica, rank and step.
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::multiset<std::string>> events(std::string_view category) const {
    std::ifstream in(trace());
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    std::map<std::tuple<int64_t, int64_t, int64_t>, std::multiset<std::string>> found;
    const json::value parsed = json::parse(text);
    for (const json::value& event : parsed.at("traceEvents").as_array()) {
      const json::value* own = event.as_object().if_contains("cat");
      if (own == nullptr || own->as_string() != category) continue;
      found[{event.at("pid").as_int64(), event.at("tid").as_int64(), event.at("args").at("step").as_int64()}].emplace(
          event.at("name").as_string());
    }
    return found;
  }

 private:
  fs::path folder_ = fs::temp_directory_path() / ("smp_timeline_test_" + std::to_string(::getpid()));
};

void train(int num_steps) {
  DistributedModel model(make_net());
  auto step = tests::training_step(model);
  for (int s = 0; s < num_steps; ++s) step(rows(4, 8, 1), rows(4, 4, 2));
}

TEST_F(TimelineFiles, AreWrittenBehindTheLastRecordedStep) {
  run_smp_ranks(2, config(2, 3), [&] {
    train(5);
    barrier();
    EXPECT_FALSE(fs::exists(trace()));
  });
  run_smp_ranks(2, config(2, 3), [&] {
    train(7);
    EXPECT_EQ(engine::context("test").timeline, nullptr);
  });
  EXPECT_TRUE(fs::exists(drawing()));
  const auto steps = events("step");
  EXPECT_EQ(steps.size(), 2U * 3);
  EXPECT_TRUE(steps.contains({0, 1, 3}) && steps.contains({0, 1, 5}));
}

TEST_F(TimelineFiles, AreWrittenAtTheEndOfAShorterJob) {
  run_smp_ranks(2, config(2, 100), [&] {
    train(5);
    engine::context("test").timeline->finish();  // as smp::shutdown does, when the models are gone
  });
  EXPECT_EQ(events("step").size(), 2U * 2);
}

TEST_F(TimelineFiles, HoldStepsOfModelsThatFollowOneAnother) {
  run_smp_ranks(2, config(2, 3), [&] {
    train(4);
    train(2);
  });
  const auto steps = events("step");
  EXPECT_EQ(steps.size(), 2U * 3);
  EXPECT_TRUE(steps.contains({0, 1, 3}) && steps.contains({0, 1, 5}));
}

TEST_F(TimelineFiles, AreNotWrittenWithoutARecordedStep) {
  run_smp_ranks(2, config(2, 100), [&] {
    train(3);
    engine::context("test").timeline->finish();  // as smp::shutdown does, when the models are gone
  });
  EXPECT_FALSE(fs::exists(trace()));
}

// The replica without batches takes part in the other's steps, and so in the writing.
TEST_F(TimelineFiles, AreWrittenWhereReplicasHaveUnevenNumbersOfBatches) {
  run_smp_ranks(4, config(2, 3), [] {
    DistributedModel model(make_net());
    auto step = tests::training_step(model);
    smp::join([&] {
      for (int s = 0; s < (dp_rank() == 0 ? 7 : 4); ++s) step(rows(4, 8, 1), rows(4, 4, 2));
    });
  });
  EXPECT_EQ(events("step").size(), 4U * 3);
  const auto actions = events("action");
  EXPECT_EQ(actions.at({0, 0, 5}).count("F 1"), 1U);
  EXPECT_FALSE(actions.contains({1, 0, 5}));
}

// Forwards run when the body reads, backwards behind the last body.
TEST_F(TimelineFiles, HoldStepsWhoseBodiesRead) {
  run_smp_ranks(2, config(2, 3), [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      EXPECT_GT(loss.item<double>(), 0);
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 6; ++s) step(rows(4, 8, 1));
  });
  for (const auto& [place, names] : events("action")) {
    EXPECT_EQ(names.count("F 0"), 1U);
    EXPECT_EQ(names.count("B 1"), 1U);
  }
  EXPECT_GE(events("work").at({0, 0, 3}).count("body"), 2U);
  EXPECT_TRUE(fs::exists(drawing()));
}

TEST_F(TimelineFiles, HoldTheStepsOfTheLayoutThatTheFirstStepChooses) {
  Config automatic = config(0, 3);
  automatic.parallelism = Parallelism::kAuto;
  run_smp_ranks(2, automatic, [] { train(6); });
  EXPECT_EQ(events("step").size(), 2U * 3);
}

TEST_F(TimelineFiles, ChangeNoBits) {
  std::vector<at::Tensor> losses;
  for (const bool records : {false, true}) {
    Config one = config(2, 3);
    if (!records) one.timeline.clear();
    run_smp_ranks(2, one, [&] {
      DistributedModel model(make_net());
      auto step = tests::training_step(model);
      for (int s = 0; s < 6; ++s) {
        const at::Tensor loss = step(rows(4, 8, 1), rows(4, 4, 2)).stack();
        if (rank() == 0) losses.push_back(loss);
      }
    });
  }
  for (size_t s = 0; s < 6; ++s) support::expect_bit_equal(losses[s], losses[s + 6], "step " + std::to_string(s));
}

TEST_F(TimelineFiles, AreRefusedWhereTheyCannotBe) {
  const auto refusal = engine::timeline_complaint;
  EXPECT_TRUE(
      contains(refusal(trace() + "/none/trace.json"), "expected a file that can be written, got '" + trace() + "/none/"));
  EXPECT_TRUE(contains(refusal(fs::path(trace()).parent_path()), "got a folder. Remove it"));
  for (const std::string& path : {trace(), drawing()}) {
    fs::create_symlink("elsewhere", path);
    EXPECT_TRUE(contains(refusal(trace()), "'" + path + "', which is to be replaced, got a symbolic link"));
    fs::remove(path);
  }
  EXPECT_TRUE(contains(refusal(drawing()), "expected the name of a JSON file"));
  EXPECT_EQ(refusal(""), "");
  std::ofstream(trace()) << "earlier";
  EXPECT_EQ(refusal(trace()), "");
  std::ifstream in(trace());
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "earlier");
  EXPECT_EQ(std::distance(fs::directory_iterator(fs::path(trace()).parent_path()), fs::directory_iterator()), 1);
}

// Only rank 0 would write them.
TEST_F(TimelineFiles, ThatRank0CannotWriteAreRefusedOnEveryRank) {
  const std::string path = trace() + "/none/trace.json";
  tests::run_ranks(2, [&](runtime::Transport& transport) {
    const std::shared_ptr<runtime::Transport> borrowed(std::shared_ptr<void>(), &transport);
    const runtime::Launch launch{.rank = transport.rank(), .size = transport.size()};
    const std::string text =
        message_of<c10::ValueError>([&] { engine::make_context({.timeline = path}, launch, borrowed); });
    EXPECT_TRUE(contains(text, "expected a file that can be written, got '" + path)) << text;
  });
}

TEST(DrawingPath, StandsBesideTheTrace) {
  EXPECT_EQ(engine::drawing_path("a/trace.json"), "a/trace.svg");
  EXPECT_EQ(engine::drawing_path("a/trace"), "a/trace.svg");
  EXPECT_EQ(engine::drawing_path("run.1"), "run.1.svg");
}

}  // namespace
}  // namespace smp
