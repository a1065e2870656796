// A stopped run in files: it goes on with the same bits on any number of ranks, and a wrong file
// changes nothing.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
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

struct Training {
  explicit Training(uint64_t seed = 3) { tests::fill(*net, seed); }
  std::shared_ptr<SmallNet> net = make_net(at::kFloat, 0.3);
  DistributedModel<SmallNet> model{net};
  DistributedOptimizer<torch::optim::Adam> optimizer{torch::optim::Adam(net->parameters(), 0.01),
                                                     model};
  decltype(tests::training_step(model)) step = tests::training_step(model);

  std::vector<at::Tensor> train(int first, int last) {
    std::vector<at::Tensor> losses;
    for (int s = first; s < last; ++s) {
      const int64_t mine = 8 / dp_size(), at = dp_rank() * mine;
      optimizer.zero_grad();
      const auto loss =
          step(rows(8, 8, 10 + s).narrow(0, at, mine), rows(8, 4, 50 + s).narrow(0, at, mine));
      losses.push_back(all_reduce_mean(loss.reduce_mean()));
      optimizer.step();
    }
    return losses;
  }
};

/// The folder of a save after three steps, and the losses of the next three.
class StateFile : public testing::Test {
 protected:
  std::string folder() const { return folder_.path("save"); }

  std::vector<at::Tensor> save(int ranks, int stages) const {
    std::mutex mutex;
    std::vector<at::Tensor> losses;
    run_smp_ranks(ranks, config(ranks, stages), [&] {
      Training training;
      training.train(0, 3);
      save_state(folder(), training.model, training.optimizer,
                 {{"epoch", "3"}, {"rank", std::to_string(rank())}});
      const auto rest = training.train(3, 6);
      const std::lock_guard lock(mutex);
      losses = rest;
    });
    return losses;
  }

  void expect_resumed(int ranks, int stages, const std::vector<at::Tensor>& want,
                      double tolerance = 0) const {
    SCOPED_TRACE("on " + std::to_string(ranks) + " ranks, " + std::to_string(stages) + " stages");
    run_smp_ranks(ranks, config(ranks, stages), [&] {
      Training training(77);
      const UserContent user = load_state(folder(), training.model, training.optimizer);
      EXPECT_EQ(user, (UserContent{{"epoch", "3"}, {"rank", "0"}}));
      const auto got = training.train(3, 6);
      for (size_t s = 0; s < got.size(); ++s) {
        tolerance == 0 ? expect_bit_equal(got[s], want[s], "loss")
                       : support::expect_close(got[s], want[s], tolerance, "loss");
      }
    });
  }

  // Every rank refuses with `part` in the text, and trains on as if nothing had been tried.
  void expect_refused(const std::string& part) const {
    run_smp_ranks(2, config(2, 2), [&] {
      Training training;
      training.train(0, 1);
      const std::string text = message_of<c10::ValueError>(
          [&] { load_state(folder(), training.model, training.optimizer); });
      EXPECT_TRUE(contains(text, part)) << text;
      const auto got = training.train(1, 2);
      training.model.load_state_dict(training.model.state_dict());
      EXPECT_EQ(training.model.state_dict().steps->training, 2);
      const std::lock_guard lock(mutex_);
      if (!after_refusal_.defined()) after_refusal_ = got[0];
      expect_bit_equal(got[0], after_refusal_, "loss after a refused load");
    });
  }

  std::string file(int rank, int size) const {
    return folder() + "/rank_" + std::to_string(rank) + "_of_" + std::to_string(size) +
           ".safetensors";
  }

  static Config config(int ranks, int stages) {
    return {.pipeline_parallel_degree = stages, .microbatches = 4 / (ranks / stages), .seed = 9};
  }

 private:
  TemporaryFolder folder_;
  mutable std::mutex mutex_;
  mutable at::Tensor after_refusal_;
};

TEST_F(StateFile, ResumesOnAnyNumberOfStagesWithTheSameBits) {
  for (int from = 1; from <= 4; ++from) {
    SCOPED_TRACE("from " + std::to_string(from));
    const auto want = save(from, from);
    for (int to = 1; to <= 4; ++to) expect_resumed(to, to, want);
  }
}

TEST_F(StateFile, ResumesWithReplicas) {
  const auto want = save(4, 2);
  expect_resumed(4, 2, want);
  expect_resumed(2, 2, want,
                 1e-6);  // replicas add their gradients in another order than microbatches
  expect_resumed(4, 1, want, 1e-6);
}

TEST_F(StateFile, ReplacesAnOlderSaveOfAnotherSize) {
  save(3, 3);
  const auto want = save(2, 2);
  EXPECT_FALSE(std::filesystem::exists(file(0, 3)));
  expect_resumed(2, 2, want);
}

TEST_F(StateFile, RefusesMissingFiles) {
  expect_refused("has no file rank_R_of_P.safetensors");
  save(3, 3);
  std::filesystem::remove(file(2, 3));
  expect_refused("rank_2_of_3.safetensors': No such file");
}

TEST_F(StateFile, RefusesFilesOfDifferentSaves) {
  save(2, 2);
  std::filesystem::copy(file(1, 2), folder() + "/old");
  save(2, 2);
  std::filesystem::remove(file(1, 2));
  std::filesystem::copy(folder() + "/old", file(1, 2));
  expect_refused("got those of 2");
  std::filesystem::remove(file(1, 2));
  std::filesystem::copy(file(0, 2), file(1, 2));
  expect_refused("got that of rank 0 of 2");
  std::filesystem::copy(file(0, 2), file(0, 3));
  expect_refused("got those of 2 and of 3 ranks");
}

TEST_F(StateFile, RefusesEveryTruncatedOrChangedFile) {
  save(2, 2);
  std::string good(std::filesystem::file_size(file(1, 2)), ' ');
  std::ifstream(file(1, 2), std::ios::binary)
      .read(good.data(), static_cast<std::streamsize>(good.size()));
  const auto expect_bad = [&](const std::string& bytes, const std::string& part) {
    std::ofstream(file(1, 2), std::ios::binary) << bytes;
    expect_refused(part);
  };
  expect_bad(good.substr(0, good.size() - 1), "The file is damaged");
  expect_bad(good.substr(0, 4), "at least 8 bytes");
  for (const size_t at :
       {good.size() - 1, good.size() / 2, good.find("0.01"), good.find("training_steps") + 17}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    expect_bad(bad, "expected the checksum");
  }
}

TEST_F(StateFile, RefusesAnotherModelAndAnotherOptimizer) {
  save(2, 2);
  run_smp_ranks(2, config(2, 2), [&] {
    Training training;
    DistributedOptimizer<torch::optim::SGD> sgd{torch::optim::SGD(training.net->parameters(), 0.1),
                                                training.model};
    const at::Tensor before = training.net->first->weight.detach().clone();
    EXPECT_TRUE(
        contains(message_of<c10::ValueError>([&] { load_state(folder(), training.model, sgd); }),
                 "state of SGD, got that of Adam"));
    expect_bit_equal(training.net->first->weight.detach(), before, "after a refused load");
  });
  run_smp_ranks(2, config(2, 2), [&] {
    auto other = std::make_shared<torch::nn::LinearImpl>(8, 8);
    DistributedModel<torch::nn::LinearImpl> model(other);
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { load_state(folder(), model); }),
                         "missing: 'weight'"));
  });
}

TEST_F(StateFile, KeepsTheOldSaveWhenANewOneCannotBeWritten) {
  const auto want = save(2, 2);
  run_smp_ranks(2, config(2, 2), [&] {
    Training training;
    training.train(0, 1);
    // Rank 1's temporary name is taken by a folder.
    if (rank() == 1) std::filesystem::create_directory(file(1, 2) + ".writing");
    EXPECT_TRUE(
        contains(message_of([&] { save_state(folder(), training.model, training.optimizer); }),
                 "expected to open"));
  });
  EXPECT_FALSE(std::filesystem::exists(file(0, 2) + ".writing"));
  expect_resumed(2, 2, want);
}

TEST_F(StateFile, KeepsTheOldSaveWhenANewOneCannotTakeItsPlace) {
  for (const int earlier_size : {1, 2}) {
    std::filesystem::remove_all(folder());
    const auto want = save(earlier_size, earlier_size);
    const std::string taken = file(earlier_size == 1 ? 1 : 2, earlier_size == 1 ? 2 : 3);
    std::filesystem::create_directories(taken + "/folder");
    const int ranks = earlier_size == 1 ? 2 : 3;
    run_smp_ranks(ranks, config(ranks, ranks), [&] {
      Training training;
      training.train(0, 1);
      EXPECT_TRUE(
          contains(message_of([&] { save_state(folder(), training.model, training.optimizer); }),
                   "expected to rename"));
    });
    std::filesystem::remove_all(taken);
    EXPECT_FALSE(std::filesystem::exists(file(0, ranks)));
    expect_resumed(earlier_size, earlier_size, want);
  }
}

TEST_F(StateFile, PutsFilesBackWhenOneOfTheSameSizeCannotTakeItsPlace) {
  const auto want = save(2, 2);
  const auto bytes = [&] { return read_safetensors(file(0, 2)).metadata.at("checksum"); };
  const std::string before = bytes();
  run_smp_ranks(2, config(2, 2), [&] {
    Training training;
    training.train(0, 1);
    barrier();
    if (rank() == 1) std::filesystem::rename(file(1, 2), file(1, 2) + ".aside");
    if (rank() == 1) std::filesystem::create_directories(file(1, 2) + "/folder");
    barrier();
    EXPECT_TRUE(
        contains(message_of([&] { save_state(folder(), training.model, training.optimizer); }),
                 "expected to rename"));
  });
  std::filesystem::remove_all(file(1, 2));
  std::filesystem::rename(file(1, 2) + ".aside", file(1, 2));
  EXPECT_EQ(bytes(), before);
  EXPECT_FALSE(std::filesystem::exists(file(0, 2) + ".earlier"));
  expect_resumed(2, 2, want);
}

TEST_F(StateFile, BringsBackUserContentOfAnyBytes) {
  const UserContent user = {{"epoch", "3"},
                            {"generator", std::string("\x80\xff\x00\x01", 4)},
                            {std::string("\xfe\x00", 2), "text"},
                            {"empty", ""}};
  run_smp_ranks(2, config(2, 2), [&] {
    Training training;
    save_state(folder(), training.model, user);
    EXPECT_EQ(load_state(folder(), training.model), user);
  });
}

TEST_F(StateFile, OfAModelAloneAndOfAModelFromBoth) {
  save(2, 2);
  run_smp_ranks(1, config(1, 1), [&] {
    Training training;
    EXPECT_EQ(load_state(folder(), training.model).at("epoch"), "3");
    save_state(folder(), training.model);
    EXPECT_TRUE(load_state(folder(), training.model).empty());
    EXPECT_TRUE(contains(message_of<c10::ValueError>(
                             [&] { load_state(folder(), training.model, training.optimizer); }),
                         "an empty one on every rank"));
  });
}

}  // namespace
}  // namespace smp
