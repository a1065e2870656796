// Several models and optimizers in one save: they load together, on any number of ranks, or not at all.
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

struct TwoTrainings {
  explicit TwoTrainings(uint64_t seed = 3) { tests::fill(*first_net, seed), tests::fill(*second_net, seed + 1); }
  std::shared_ptr<SmallNet> first_net = make_net(at::kFloat, 0.3), second_net = make_net();
  DistributedModel<SmallNet> first{first_net}, second{second_net};
  DistributedOptimizer<torch::optim::Adam> adam{torch::optim::Adam(first_net->parameters(), 0.01), first};
  DistributedOptimizer<torch::optim::SGD> sgd{
      torch::optim::SGD(second_net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)), second};
  decltype(tests::training_step(first)) first_step = tests::training_step(first), second_step = tests::training_step(second);

  SaveParts parts() {
    return {.models = {{"generator", first}, {"critic-2", second}}, .optimizers = {{"generator", adam}, {"of_critic", sgd}}};
  }

  std::vector<at::Tensor> train(int first_index, int last) {
    std::vector<at::Tensor> losses;
    const auto step = [&](auto& function, auto& optimizer, int seed) {
      optimizer.zero_grad();
      losses.push_back(function(rows(8, 8, seed), rows(8, 4, seed + 50)).reduce_mean());
      optimizer.step();
    };
    for (int s = first_index; s < last; ++s) step(first_step, adam, s), step(second_step, sgd, s + 200);
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
      const at::Tensor before = training.first.state_dict().at("first.weight");
      const OptimizerState adam = training.adam.state_dict();
      const std::string text = message_of<c10::ValueError>([&] { load_state(folder(), parts_of(training)); });
      EXPECT_TRUE(contains(text, text_part)) << text;
      expect_bit_equal(training.first.state_dict().at("first.weight"), before, "after a refused load");
      expect_bit_equal(training.adam.state_dict().entries.at("first.weight").at("exp_avg"),
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
      for (const bool has_stepped : {false, true}) {
        SCOPED_TRACE("from " + std::to_string(from) + " to " + std::to_string(to) + (has_stepped ? ", behind a step" : ""));
        run_smp_ranks(to, {.microbatches = 2, .seed = 9}, [&] {
          TwoTrainings training(77);
          if (has_stepped) training.train(0, 1);
          EXPECT_EQ(load_state(folder(), training.parts()), (UserContent{{"epoch", "3"}}));
          const auto got = training.train(3, 5);
          for (size_t s = 0; s < got.size(); ++s) expect_bit_equal(got[s], want[s], "loss " + std::to_string(s));
        });
      }
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
    const auto got = resumed.train(3, 5);
    for (size_t s = 0; s < got.size(); ++s) expect_bit_equal(got[s], want[s], "loss " + std::to_string(s));
  });
}

TEST_F(SavePartsTest, LoadThoseThatAreNamed) {
  save(2);
  run_smp_ranks(3, {.microbatches = 2}, [&] {
    TwoTrainings training(77);
    const at::Tensor untouched = training.first_net->first->weight.detach().clone();
    load_state(folder(), SaveParts{.models = {{"critic-2", training.second}}});
    expect_bit_equal(training.first_net->first->weight.detach(), untouched, "the other model");
    TwoTrainings all(78);
    load_state(folder(), all.parts());
    expect_bit_equal(training.second_net->first->weight.detach(), all.second_net->first->weight.detach(), "of the save");
  });
}

TEST_F(SavePartsTest, ThatDoNotFitChangeNothing) {
  save(2);
  expect_refused("expected a save that has the model 'critic', got one with 'critic-2', 'generator'", [](auto& training) {
    return SaveParts{.models = {{"generator", training.first}, {"critic", training.second}}};
  });
  expect_refused("has the optimizer 'generated', got one with 'generator', 'of_critic'", [](auto& training) {
    return SaveParts{.models = {{"generator", training.first}}, .optimizers = {{"generated", training.adam}}};
  });
  expect_refused("state of SGD, got that of Adam", [](auto& training) {
    return SaveParts{.models = {{"generator", training.first}, {"critic-2", training.second}},
                     .optimizers = {{"of_critic", training.adam}, {"generator", training.sgd}}};
  });
}

TEST_F(SavePartsTest, AreNotWhatHasNoName) {
  save(2);
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    TwoTrainings training;
    const std::string text = message_of<c10::ValueError>([&] { load_state(folder(), training.first, training.adam); });
    EXPECT_TRUE(contains(text, "the model without a name, got one with 'critic-2', 'generator'")) << text;
    save_state(folder(), training.first, training.adam);
    const std::string other = message_of<c10::ValueError>([&] { load_state(folder(), training.parts()); });
    EXPECT_TRUE(contains(other, "the model 'critic-2', got one with one without a name")) << other;
  });
}

TEST_F(SavePartsTest, RefuseNamesThatAreNone) {
  run_smp_ranks(1, {}, [&] {
    TwoTrainings training;
    for (const std::string& name :
         {std::string(), std::string("../x"), std::string("a/b"), std::string("a:b"), std::string(".a"),
          std::string("a\0b", 3), std::string(129, 'a'), std::string("\xc3\xa4")}) {
      const SaveParts parts{.models = {{name, training.first}}};
      EXPECT_TRUE(
          contains(message_of<c10::ValueError>([&] { save_state(folder(), parts); }), "expected a name of 1 to 128"));
      EXPECT_TRUE(
          contains(message_of<c10::ValueError>([&] { load_state(folder(), parts); }), "expected a name of 1 to 128"));
    }
    EXPECT_TRUE(
        contains(message_of<c10::ValueError>([&] { save_state(folder(), SaveParts{}); }), "expected a model or more"));
    EXPECT_FALSE(std::filesystem::exists(folder()));
  });
}

}  // namespace
}  // namespace smp
