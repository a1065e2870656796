// Series of saves: which stay, and which one a resumed run takes.
#include "smp/save_series.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <utility>

#include "smp/safetensors.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

namespace fs = std::filesystem;
using support::contains;
using support::message_of;
using tests::run_smp_ranks;

class SaveSeriesTest : public testing::Test {
 protected:
  using Training = tests::SavedTraining<>;

  static void on_two_ranks(const std::function<void(Training&)>& body) {
    run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
      Training training;
      body(training);
    });
  }

  std::string folder() const { return folder_.path("run"); }

  // After as many steps as the save is named for.
  void save(std::initializer_list<int> steps, int num_kept = 2) const {
    on_two_ranks([&](Training& training) {
      SaveSeries saves(folder(), num_kept);
      int done = 0;
      for (const int step : steps) {
        training.train(std::exchange(done, step), step);
        saves.save(step, training.model, training.optimizer, {{"step", std::to_string(step)}});
      }
    });
  }

  // Of the save that is taken, as the user content says, and as counted.
  void expect_resumed(int64_t step) const {
    on_two_ranks([&](Training& training) {
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

  fs::path path_of(int64_t step, const std::string& file) const {
    return fs::path(folder()) / ("step_" + std::to_string(step)) / file;
  }

  // The file of a rank of a save; the name has the save's own digits.
  fs::path file_of(int64_t step, int rank) const {
    for (const auto& entry : fs::directory_iterator(path_of(step, "")))
      if (entry.path().filename().string().starts_with("rank_" + std::to_string(rank) + "_of_2.")) return entry.path();
    return "none";
  }

  // As a kill leaves it before the last rank has its file on the disk.
  void cut_short(int64_t step) const {
    fs::remove(path_of(step, "state.json"));
    fs::remove(file_of(step, 1));
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
  cut_short(2);
  fs::create_directories(folder() + "/step_4");
  expect_resumed(1);
}

// Else the save that the run has resumed from would go for one that is known to be damaged.
TEST_F(SaveSeriesTest, ASaveThatWasPassedOverIsNotOneOfThoseKept) {
  const auto resume_and_save = [&](int64_t expected, std::initializer_list<int> steps) {
    on_two_ranks([&](Training& training) {
      SaveSeries saves(folder());
      const auto resumed = saves.resume(training.model, training.optimizer);
      ASSERT_TRUE(resumed);
      EXPECT_EQ(resumed->step, expected);
      for (const int step : steps) saves.save(step, training.model, training.optimizer, {{"step", std::to_string(step)}});
    });
  };
  save({10, 19});
  damage(19);
  resume_and_save(10, {20});
  EXPECT_EQ(names(), (std::set<std::string>{"step_10", "step_19", "step_20"}));
  damage(20);
  resume_and_save(10, {19, 20});  // both anew
  EXPECT_EQ(names(), (std::set<std::string>{"step_19", "step_20"}));
  expect_resumed(20);
}

TEST_F(SaveSeriesTest, ASaveThatFailsLeavesTheEarlierOnes) {
  save({1, 2});
  std::ofstream(folder() + "/step_3") << "in the way";
  on_two_ranks([&](Training& training) {
    training.train(0, 1);
    SaveSeries saves(folder(), 1);
    EXPECT_THROW(saves.save(3, training.model, training.optimizer), c10::Error);
  });
  fs::remove(folder() + "/step_3");
  EXPECT_EQ(names(), (std::set<std::string>{"step_1", "step_2"}));
  expect_resumed(2);
}

TEST_F(SaveSeriesTest, NothingToResumeIsNothingAndNothingThatLoadsIsAnError) {
  const auto resume = [&](const auto& check) {
    on_two_ranks([&](Training& training) {
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
  cut_short(1);
  on_two_ranks([&](Training& training) { EXPECT_FALSE(SaveSeries(folder()).resume(training.model, training.optimizer)); });
  save({1});
  expect_resumed(1);
}

TEST_F(SaveSeriesTest, InTheBackgroundHasTheStateOfItsCall) {
  on_two_ranks([&](Training& training) {
    SaveSeries saves(folder(), 3);
    for (int64_t step = 1; step <= 2; ++step) {  // the second one's into the memory of the first
      training.train(0, 1);
      saves.save_in_background(2 * step, training.model, training.optimizer, {{"step", std::to_string(2 * step)}});
      saves.finish();
      saves.save(2 * step + 1, training.model, training.optimizer);
      saves.save_in_background(2 * step, training.model, training.optimizer, {{"step", std::to_string(2 * step)}});
      training.train(0, 1);
      saves.finish();
    }
  });
  EXPECT_EQ(names(), (std::set<std::string>{"step_3", "step_4", "step_5"}));
  for (int rank = 0; rank < 2; ++rank) {
    const Safetensors expected = read_safetensors(file_of(5, rank)), got = read_safetensors(file_of(4, rank));
    ASSERT_EQ(got.tensors.size(), expected.tensors.size());
    for (size_t i = 0; i < got.tensors.size(); ++i) {
      EXPECT_EQ(got.tensors[i].first, expected.tensors[i].first);
      EXPECT_TRUE(got.tensors[i].second.equal(expected.tensors[i].second)) << got.tensors[i].first;
    }
  }
  fs::remove_all(path_of(5, ""));
  expect_resumed(4);
}

TEST_F(SaveSeriesTest, InTheBackgroundCountsWhenAllFilesAreThere) {
  save({1});
  on_two_ranks([&](Training& training) {
    training.train(0, 1);
    SaveSeries saves(folder());
    saves.save_in_background(2, training.model, training.optimizer, {{"step", "2"}});
  });
  EXPECT_FALSE(fs::exists(path_of(2, "state.json")));
  expect_resumed(2);
  fs::remove(file_of(2, 1));
  expect_resumed(1);
}

TEST_F(SaveSeriesTest, TheLastOfTwoWholeSavesWithoutAnIndexCounts) {
  const auto save_without_index = [&](const std::string& text) {
    on_two_ranks([&](Training& training) {
      SaveSeries(folder()).save_in_background(2, training.model, training.optimizer, {{"step", text}});
    });
  };
  save_without_index("1");
  const auto now = fs::file_time_type::clock::now();
  for (int rank = 0; rank < 2; ++rank) fs::last_write_time(file_of(2, rank), now - std::chrono::hours(1));
  save_without_index("2");
  expect_resumed(2);
}

TEST_F(SaveSeriesTest, InTheBackgroundFailsWithFinish) {
  save({1, 2});
  std::ofstream(folder() + "/step_3") << "in the way";
  on_two_ranks([&](Training& training) {
    training.train(0, 1);
    SaveSeries saves(folder(), 1);
    saves.save_in_background(3, training.model, training.optimizer);
    training.train(0, 1);
    EXPECT_THROW(saves.finish(), c10::Error);
    saves.finish();  // nothing is under way any more
    saves.save_in_background(4, training.model, training.optimizer, {{"step", "4"}});
    saves.finish();
  });
  fs::remove(folder() + "/step_3");
  EXPECT_EQ(names(), (std::set<std::string>{"step_4"}));
  expect_resumed(4);
}

// The rank that cannot write is of the first replica when the save begins, and of the second when it is to count.
TEST_F(SaveSeriesTest, InTheBackgroundFailsThoughTheLayoutHasChangedMeanwhile) {
  std::ofstream(folder() + "_of_rank_1") << "in the way";
  run_smp_ranks(2, {.parallelism = Parallelism::kAuto, .microbatches = 1, .log_level = LogLevel::kOff}, [&] {
    Training training;
    SaveSeries saves(folder() + (rank() == 1 ? "_of_rank_1" : ""));
    saves.save_in_background(1, training.model, training.optimizer);
    training.step(tests::rows(8, 8, 1), tests::rows(8, 4, 2));  // the whole batch, on every rank
    training.optimizer.step();
    EXPECT_EQ(dp_size(), 2);
    EXPECT_TRUE(contains(message_of([&] { saves.finish(); }), "Not a directory"));
  });
  EXPECT_FALSE(fs::exists(path_of(1, "state.json")));
}

TEST_F(SaveSeriesTest, WhatCannotBeWrittenIsSaidAtTheEndOfTheSeries) {
  std::ofstream(folder()) << "in the way";
  testing::internal::CaptureStderr();
  run_smp_ranks(1, {.log_level = LogLevel::kOff}, [&] {
    Training training;
    SaveSeries(folder()).save_in_background(7, training.model, training.optimizer);
  });
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(text, "smp: the save of step 7 failed: ") && contains(text, "Not a directory")) << text;
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
  on_two_ranks([&](Training& training) {
    const auto call = [&] { SaveSeries(folder()).resume(training.model, training.optimizer); };
    EXPECT_TRUE(contains(message_of<c10::ValueError>(call), "expected a folder of saves, or none, got: Not a directory"));
  });
}

TEST_F(SaveSeriesTest, AFileOfASavesNameIsNone) {
  save({1, 2});
  std::ofstream(fs::path(folder()) / "step_3") << "text";
  expect_resumed(2);
  save({4});
  EXPECT_EQ(names(), (std::set<std::string>{"step_2", "step_3", "step_4"}));
}

TEST_F(SaveSeriesTest, ARenamedSaveIsNotOfTheStepOfItsNewName) {
  save({1, 2});
  fs::rename(fs::path(folder()) / "step_1", fs::path(folder()) / "step_9");
  expect_resumed(2);
}

TEST_F(SaveSeriesTest, StaysInItsFolderWhereTheProgramGoesElsewhere) {
  const fs::path before = fs::current_path();
  fs::create_directories(folder_.path("elsewhere/run/step_1"));
  run_smp_ranks(1, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
    fs::current_path(folder_.path(""));
    Training training;
    SaveSeries saves("run", 1);
    for (const int64_t step : {1, 2}) {
      saves.save_in_background(step, training.model, training.optimizer);
      fs::current_path(folder_.path("elsewhere"));
    }
    saves.finish();
    fs::current_path(before);
  });
  EXPECT_EQ(names(), (std::set<std::string>{"step_2"}));
  EXPECT_TRUE(fs::exists(folder_.path("elsewhere/run/step_1")));
}

TEST_F(SaveSeriesTest, NeverRemovesTheSaveThatItHasMade) {
  save({8}, 1);
  save({2}, 1);
  EXPECT_EQ(names(), (std::set<std::string>{"step_2", "step_8"}));
}

TEST(SaveSeries, RefusesNumbersBelowTheirLeast) { EXPECT_THROW(SaveSeries("run", 0), c10::ValueError); }

}  // namespace
}  // namespace smp
