// Series of saves: which stay, and which one a resumed run takes.
#include "smp/save_series.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

namespace fs = std::filesystem;
using support::contains;
using support::message_of;
using tests::run_smp_ranks;
using tests::SmallNet;

class SaveSeriesTest : public testing::Test {
 protected:
  struct Training {
    explicit Training(uint64_t seed) { tests::fill(*net, seed); }
    std::shared_ptr<SmallNet> net = tests::make_net(at::kFloat, 0.3);
    DistributedModel<SmallNet> model{net};
    DistributedOptimizer<torch::optim::SGD> optimizer{torch::optim::SGD(net->parameters(), 0.01), model};
    decltype(tests::training_step(model)) step = tests::training_step(model);

    void train() {
      step(tests::rows(8, 8, 1), tests::rows(8, 4, 2));
      optimizer.step();
    }
  };

  std::string folder() const { return folder_.path("run"); }

  // After as many steps as the save is named for.
  void save(std::initializer_list<int64_t> steps, int num_kept = 2) const {
    run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
      Training training(3);
      SaveSeries saves(folder(), num_kept);
      int64_t done = 0;
      for (const int64_t step : steps) {
        for (; done < step; ++done) training.train();
        saves.save(step, training.model, training.optimizer, {{"step", std::to_string(step)}});
      }
    });
  }

  // Of the save that is taken, as the user content says, and as counted.
  void expect_resumed(int64_t step) const {
    run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
      Training training(7);
      const auto resumed = SaveSeries(folder()).resume(training.model, training.optimizer);
      ASSERT_TRUE(resumed);
      EXPECT_EQ(resumed->step, step);
      EXPECT_EQ(resumed->user, (UserContent{{"step", std::to_string(step)}}));
    });
  }

  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder())) found.insert(entry.path().filename());
    return found;
  }

  void damage(int64_t step) const {
    for (const auto& entry : fs::directory_iterator(fs::path(folder()) / ("step_" + std::to_string(step)))) {
      if (entry.path().extension() == ".safetensors") fs::resize_file(entry.path(), fs::file_size(entry.path()) - 1);
    }
  }

  TemporaryFolder folder_;
};

TEST_F(SaveSeriesTest, KeepsTheNewest) {
  save({1, 2, 9, 10});
  EXPECT_EQ(names(), (std::set<std::string>{"step_9", "step_10"}));
  expect_resumed(10);
}

TEST_F(SaveSeriesTest, LeavesWhatIsNotOfASave) {
  save({1}, 1);
  std::ofstream(folder() + "/step_1/notes.txt") << "mine";
  std::ofstream(folder() + "/step_x") << "mine";
  fs::create_directories(folder() + "/step_01");
  save({2, 3}, 1);
  EXPECT_EQ(names(), (std::set<std::string>{"step_1", "step_01", "step_3", "step_x"}));
  EXPECT_FALSE(fs::exists(folder() + "/step_1/state.json"));
  EXPECT_TRUE(fs::exists(folder() + "/step_1/notes.txt"));
}

TEST_F(SaveSeriesTest, PassesOverADamagedSaveAndAnUnfinishedOne) {
  save({1, 2, 3}, 3);
  damage(3);
  fs::remove(folder() + "/step_2/state.json");
  fs::create_directories(folder() + "/step_4");
  expect_resumed(1);
}

TEST_F(SaveSeriesTest, ASaveThatFailsLeavesTheEarlierOnes) {
  save({1, 2});
  std::ofstream(folder() + "/step_3") << "in the way";
  run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
    Training training(3);
    training.train();
    SaveSeries saves(folder(), 1);
    EXPECT_THROW(saves.save(3, training.model, training.optimizer), c10::Error);
  });
  fs::remove(folder() + "/step_3");
  EXPECT_EQ(names(), (std::set<std::string>{"step_1", "step_2"}));
  expect_resumed(2);
}

TEST_F(SaveSeriesTest, NothingToResumeIsNothingAndNothingThatLoadsIsAnError) {
  const auto resume = [&](const auto& check) {
    run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
      Training training(7);
      SaveSeries saves(folder());
      check([&] { return saves.resume(training.model, training.optimizer).has_value(); });
    });
  };
  resume([](const auto& call) { EXPECT_FALSE(call()); });
  save({1, 2});
  damage(1);
  damage(2);
  resume([](const auto& call) {
    const std::string text = message_of<c10::ValueError>([&] { call(); });
    EXPECT_TRUE(contains(text, "SaveSeries::resume: expected one of 2 saves in")) << text;
    EXPECT_TRUE(contains(text, "step_2")) << text;
  });
}

TEST_F(SaveSeriesTest, ARunWhoseFirstSaveWasCutShortBeginsAnew) {
  save({1});
  fs::remove(folder() + "/step_1/state.json");
  run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
    Training training(7);
    EXPECT_FALSE(SaveSeries(folder()).resume(training.model, training.optimizer));
  });
  save({1});
  expect_resumed(1);
}

TEST_F(SaveSeriesTest, UnfinishedSavesDoNotPushFinishedOnesOut) {
  save({1, 2});
  fs::create_directories(folder() + "/step_3");
  std::ofstream(folder() + "/step_3/rank_0_of_2.0123456789abcdef.safetensors") << "cut short";
  save({4});
  EXPECT_EQ(names(), (std::set<std::string>{"step_2", "step_3", "step_4"}));
  save({5});
  EXPECT_EQ(names(), (std::set<std::string>{"step_4", "step_5"}));
}

TEST_F(SaveSeriesTest, ASaveOfAnEarlierVersionCounts) {
  save({1});
  for (const auto& entry : fs::directory_iterator(folder() + "/step_1")) {
    const std::string path = entry.path();  // rank_0_of_2.ID.safetensors
    if (entry.path().extension() == ".safetensors") fs::rename(path, path.substr(0, path.size() - 29) + ".safetensors");
  }
  fs::remove(folder() + "/step_1/state.json");
  expect_resumed(1);
}

TEST_F(SaveSeriesTest, AFolderThatCannotBeReadIsAnError) {
  std::ofstream(folder()) << "in the way";
  run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
    Training training(7);
    const auto call = [&] { SaveSeries(folder()).resume(training.model, training.optimizer); };
    EXPECT_TRUE(contains(message_of<c10::ValueError>(call), "expected a folder of saves, or none, got: Not a directory"));
  });
}

TEST_F(SaveSeriesTest, NeverRemovesTheSaveThatItHasMade) {
  save({8}, 1);
  save({2}, 1);
  EXPECT_EQ(names(), (std::set<std::string>{"step_2", "step_8"}));
}

TEST(SaveSeries, RefusesNumbersBelowTheirLeast) { EXPECT_THROW(SaveSeries("run", 0), c10::ValueError); }

}  // namespace
}  // namespace smp
