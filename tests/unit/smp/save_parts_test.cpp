// Several models and optimizers in one save: they load together, on any number of ranks, or not at all.
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::run_smp_ranks;
using tests::SmallNet;

struct TwoTrainings {
  explicit TwoTrainings(uint64_t seed = 3) : first(seed), second(seed + 1) {}
  tests::SavedTraining<SmallNet, tests::ByAdam> first;
  tests::SavedTraining<SmallNet, tests::BySgd> second;

  SaveParts parts() {
    return {.models = {{"generator", first.model}, {"critic-2", second.model}},
            .optimizers = {{"generator", first.optimizer}, {"of_critic", second.optimizer}}};
  }

  std::vector<at::Tensor> train(int first_step, int last) {
    std::vector<at::Tensor> losses;
    for (int s = first_step; s < last; ++s) {
      losses.push_back(first.train(s, s + 1).front());
      losses.push_back(second.train(s + 200, s + 201).front());
    }
    return losses;
  }
};

class SavePartsTest : public testing::Test {
 protected:
  std::string folder() const { return folder_.path("save"); }

  // After three steps; the losses of the next two.
  std::vector<at::Tensor> save(int ranks) const {
    std::mutex mutex;
    std::vector<at::Tensor> losses;
    run_smp_ranks(ranks, {.microbatches = 2, .seed = 9}, [&] {
      TwoTrainings training;
      training.train(0, 3);
      save_state(folder(), training.parts(), {{"epoch", "3"}});
      const auto rest = training.train(3, 5);
      const std::lock_guard lock(mutex);
      losses = rest;
    });
    return losses;
  }

  // parts(training) do not load, and change neither of the two.
  template <class PartsOf>
  void expect_refused(const std::string& text_part, const PartsOf& parts_of) const {
    run_smp_ranks(2, {.microbatches = 2, .seed = 9}, [&] {
      TwoTrainings training(40);
      training.train(0, 1);
      const at::Tensor before = training.first.model.state_dict().at("first.weight");
      const OptimizerState adam = training.first.optimizer.state_dict();
      const std::string text = message_of<c10::ValueError>([&] { load_state(folder(), parts_of(training)); });
      EXPECT_TRUE(contains(text, text_part)) << text;
      expect_bit_equal(training.first.model.state_dict().at("first.weight"), before, "after a refused load");
      expect_bit_equal(training.first.optimizer.state_dict().entries.at("first.weight").at("exp_avg"),
                       adam.entries.at("first.weight").at("exp_avg"), "state after a refused load");
    });
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(SavePartsTest, ResumeOnAnyNumberOfStagesWithTheSameBits) {
  for (const int from : {1, 2, 3}) {
    const auto want = save(from);
    for (const int to : {1, 2, 4}) {
      const bool has_stepped = (from + to) % 2 == 1;  // for more stages and for fewer
      SCOPED_TRACE("from " + std::to_string(from) + " to " + std::to_string(to) + (has_stepped ? ", behind a step" : ""));
      run_smp_ranks(to, {.microbatches = 2, .seed = 9}, [&] {
        TwoTrainings training(77);
        if (has_stepped) training.train(0, 1);
        EXPECT_EQ(load_state(folder(), training.parts()), (UserContent{{"epoch", "3"}}));
        expect_bit_equal(training.train(3, 5), want, "losses");
      });
    }
  }
}

TEST_F(SavePartsTest, OfASeriesInTheBackground) {
  run_smp_ranks(2, {.microbatches = 2, .seed = 9, .log_level = LogLevel::kOff}, [&] {
    TwoTrainings training;
    training.train(0, 3);
    SaveSeries saves(folder());
    saves.save_in_background(3, training.parts(), {{"epoch", "3"}});
    const auto want = training.train(3, 5);
    TwoTrainings resumed(77);
    const auto found = saves.resume(resumed.parts());
    ASSERT_TRUE(found);
    EXPECT_EQ(found->step, 3);
    expect_bit_equal(resumed.train(3, 5), want, "losses");
  });
}

TEST_F(SavePartsTest, LoadThoseThatAreNamed) {
  save(2);
  run_smp_ranks(3, {.microbatches = 2}, [&] {
    TwoTrainings training(77);
    const at::Tensor untouched = training.first.net->first->weight.detach().clone();
    load_state(folder(), SaveParts{.models = {{"critic-2", training.second.model}}});
    expect_bit_equal(training.first.net->first->weight.detach(), untouched, "the other model");
    TwoTrainings all(78);
    load_state(folder(), all.parts());
    expect_bit_equal(training.second.net->first->weight.detach(), all.second.net->first->weight.detach(), "of the save");
  });
}

TEST_F(SavePartsTest, ThatDoNotFitChangeNothing) {
  save(2);
  expect_refused("expected a save that has the model 'critic', got one with 'critic-2', 'generator'", [](auto& training) {
    return SaveParts{.models = {{"generator", training.first.model}, {"critic", training.second.model}}};
  });
  expect_refused("has the optimizer 'generated', got one with 'generator', 'of_critic'", [](auto& training) {
    return SaveParts{.models = {{"generator", training.first.model}},
                     .optimizers = {{"generated", training.first.optimizer}}};
  });
  expect_refused("state of SGD, got that of Adam", [](auto& training) {
    return SaveParts{.models = {{"generator", training.first.model}, {"critic-2", training.second.model}},
                     .optimizers = {{"of_critic", training.first.optimizer}, {"generator", training.second.optimizer}}};
  });
}

TEST_F(SavePartsTest, AreNotWhatHasNoName) {
  save(2);
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    TwoTrainings training;
    const std::string text =
        message_of<c10::ValueError>([&] { load_state(folder(), training.first.model, training.first.optimizer); });
    EXPECT_TRUE(contains(text, "the model without a name, got one with 'critic-2', 'generator'")) << text;
    save_state(folder(), training.first.model, training.first.optimizer);
    const std::string other = message_of<c10::ValueError>([&] { load_state(folder(), training.parts()); });
    EXPECT_TRUE(contains(other, "the model 'critic-2', got one with one without a name")) << other;
  });
}

TEST_F(SavePartsTest, RefuseNamesThatAreNone) {
  run_smp_ranks(1, {}, [&] {
    TwoTrainings training;
    const auto expect_text = [](const std::string& part, const std::function<void()>& call) {
      EXPECT_TRUE(contains(message_of<c10::ValueError>(call), part)) << part;
    };
    for (const std::string& name :
         {std::string(), std::string("../x"), std::string("a/b"), std::string("a:b"), std::string(".a"),
          std::string("a\0b", 3), std::string(129, 'a'), std::string("\xc3\xa4")}) {
      const SaveParts parts{.models = {{name, training.first.model}}};
      expect_text("expected a name of 1 to 128", [&] { save_state(folder(), parts); });
      expect_text("expected a name of 1 to 128", [&] { load_state(folder(), parts); });
    }
    expect_text("expected a model or more", [&] { save_state(folder(), SaveParts{}); });
    EXPECT_FALSE(std::filesystem::exists(folder()));
  });
}

}  // namespace
}  // namespace smp
