// A stopped run in files: it goes on with the same bits on any number of ranks, and a wrong file changes nothing.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_folder.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::names_in;
using tests::names_of_save;
using tests::run_smp_ranks;

/// The folder of a save after three steps, and the losses of the next three.
class StateFile : public testing::Test {
 protected:
  using Training = tests::SavedTraining<>;

  std::string folder() const { return folder_.path("save"); }

  std::vector<at::Tensor> save(int ranks, int stages) const {
    std::mutex mutex;
    std::vector<at::Tensor> losses;
    on_ranks(ranks, stages, [&](Training& training) {
      training.train(0, 3);
      save_state(folder(), training.model, training.optimizer, {{"epoch", "3"}, {"rank", std::to_string(rank())}});
      const auto rest = training.train(3, 6);
      const std::lock_guard lock(mutex);
      losses = rest;
    });
    return losses;
  }

  void expect_resumed(int ranks, int stages, const std::vector<at::Tensor>& want, double tolerance = 0) const {
    SCOPED_TRACE("on " + std::to_string(ranks) + " ranks, " + std::to_string(stages) + " stages");
    const auto resume = [&](Training& training) {
      const UserContent user = load_state(folder(), training.model, training.optimizer);
      EXPECT_EQ(user, (UserContent{{"epoch", "3"}, {"rank", "0"}}));
      const auto got = training.train(3, 6);
      for (size_t s = 0; s < got.size(); ++s) {
        tolerance == 0 ? expect_bit_equal(got[s], want[s], "loss")
                       : support::expect_close(got[s], want[s], tolerance, "loss");
      }
    };
    on_ranks(ranks, stages, resume, /*seed=*/77);
  }

  // Every rank refuses with `part` in the text, and trains on as if nothing had been tried.
  void expect_refused(const std::string& part) const {
    on_ranks(2, 2, [&](Training& training) {
      training.train(0, 1);
      const std::string text =
          message_of<c10::ValueError>([&] { load_state(folder(), training.model, training.optimizer); });
      EXPECT_TRUE(contains(text, part)) << text;
      const auto got = training.train(1, 2);
      training.model.load_state_dict(training.model.state_dict());
      EXPECT_EQ(training.model.state_dict().steps->training, 2);
      const std::lock_guard lock(mutex_);
      if (!after_refusal_.defined()) after_refusal_ = got[0];
      expect_bit_equal(got[0], after_refusal_, "loss after a refused load");
    });
  }

  std::string file(int rank) const { return engine::find_save(folder()).path(rank); }
  std::string index() const { return folder() + "/state.json"; }
  static std::string bytes_of(const std::string& path) {
    std::ostringstream bytes;
    bytes << std::ifstream(path, std::ios::binary).rdbuf();
    return bytes.str();
  }
  // With `bytes` in place of what it holds, a file is refused.
  void expect_bad(const std::string& path, const std::string& bytes, const std::string& part) const {
    std::ofstream(path, std::ios::binary) << bytes;
    expect_refused(part);
  }

  static void on_ranks(int ranks, int stages, const std::function<void(Training&)>& body, uint64_t seed = 3) {
    run_smp_ranks(ranks, {.pipeline_parallel_degree = stages, .microbatches = 4 / (ranks / stages), .seed = 9}, [&] {
      Training training(seed);
      body(training);
    });
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
  EXPECT_EQ(names_in(folder()), names_of_save(folder()));
  expect_resumed(2, 2, want);
}

TEST_F(StateFile, ResumesASaveWithoutAnIndexAndReplacesIt) {
  const auto want = save(3, 3);
  tests::remove_index(folder());
  expect_resumed(2, 2, want);
  save(2, 2);
  EXPECT_EQ(names_in(folder()), names_of_save(folder()));
}

TEST_F(StateFile, RemovesWhatKilledSavesHaveLeftAndNothingElse) {
  const auto touch = [&](const std::string& name) { std::ofstream(folder() + "/" + name) << "x"; };
  save(2, 2);
  const std::string other = "0123456789abcdef";
  touch("rank_0_of_2." + other + ".safetensors");
  touch("rank_1_of_2." + other + ".safetensors." + other + ".writing");
  touch("state.json." + other + ".writing");
  const std::set<std::string> not_ours = {"rank_0_of_2.safetensors.bak", "rank_0.safetensors", "notes." + other + ".writing",
                                          "state.json.old"};
  for (const std::string& name : not_ours) touch(name);
  std::filesystem::create_symlink("notes", folder() + "/rank_7_of_8.safetensors");
  const auto want = save(2, 2);
  std::set<std::string> names = names_of_save(folder());
  names.insert(not_ours.begin(), not_ours.end());
  names.insert("rank_7_of_8.safetensors");
  EXPECT_EQ(names_in(folder()), names);
  expect_resumed(2, 2, want);
}

TEST_F(StateFile, RefusesMissingFiles) {
  expect_refused("has no file state.json");
  save(3, 3);
  std::filesystem::remove(file(2));
  expect_refused("': No such file");
}

TEST_F(StateFile, RefusesFilesOfDifferentSaves) {
  save(2, 2);
  const std::string old = folder() + "/old";
  std::filesystem::copy(file(1), old);
  save(2, 2);
  const auto replace = [](const std::string& path, const std::string& by) {
    std::filesystem::copy(by, path, std::filesystem::copy_options::overwrite_existing);
  };
  replace(file(1), old);
  expect_refused("copied from another save");
  replace(file(1), file(0));
  expect_refused("got that of rank 0 of 2");
  tests::remove_index(folder());
  replace(file(1), old);
  expect_refused("got those of 2");
  std::filesystem::copy(file(0), folder() + "/rank_0_of_3.safetensors");
  expect_refused("got those of 2 and of 3 ranks");
}

TEST_F(StateFile, RefusesADamagedIndex) {
  save(2, 2);
  const std::string good = bytes_of(index());
  const auto with = [&](const std::string& part, const std::string& other) {
    return std::string(good).replace(good.find(part), part.size(), other);
  };
  for (const std::string& bad :
       {std::string(), good.substr(0, good.size() / 2), with("smp save 1", "smp save 2"), with("\"ranks\":2", "\"ranks\":0"),
        with("\"ranks\":2", "\"ranks\":\"2\""), with("\"save\":\"", "\"save\":\"../")}) {
    expect_bad(index(), bad, "state.json': expected format \"smp save 1\", save and ranks, got");
  }
}

TEST_F(StateFile, RefusesEveryTruncatedOrChangedFile) {
  save(2, 2);
  const std::string path = file(1), good = bytes_of(path);
  expect_bad(path, good.substr(0, good.size() - 1), "The file is damaged");
  expect_bad(path, good.substr(0, 4), "at least 8 bytes");
  for (const size_t at : {good.size() - 1, good.size() / 2, good.find("0.01"), good.find("training_steps") + 17}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    expect_bad(path, bad, "expected the checksum");
  }
}

TEST_F(StateFile, RefusesPartsOfTensors) {
  save(2, 2);
  std::string bytes = bytes_of(file(1));
  const std::string whole = R"("shards":"whole")";
  bytes.replace(bytes.find(whole), whole.size(), R"("shards":"of tp")");
  expect_bad(file(1), bytes, "expected whole tensors, got shards 'of tp'");
}

TEST_F(StateFile, RefusesAnotherModelAndAnotherOptimizer) {
  save(2, 2);
  on_ranks(2, 2, [&](Training& training) {
    DistributedOptimizer<torch::optim::SGD> sgd{torch::optim::SGD(training.net->parameters(), 0.1), training.model};
    const at::Tensor before = training.net->first->weight.detach().clone();
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { load_state(folder(), training.model, sgd); }),
                         "state of SGD, got that of Adam"));
    expect_bit_equal(training.net->first->weight.detach(), before, "after a refused load");
  });
  run_smp_ranks(2, {}, [&] {
    DistributedModel model(torch::nn::Linear(8, 8));
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { load_state(folder(), model); }), "missing: 'weight'"));
  });
}

TEST_F(StateFile, KeepsTheOldSaveWhenARankCannotWrite) {
  const auto want = save(2, 2);
  const auto names = names_in(folder());
  // The file of one rank is larger than the limit, that of the other is not.
  const auto sizes = std::minmax({std::filesystem::file_size(file(0)), std::filesystem::file_size(file(1))});
  ASSERT_GT(sizes.second, sizes.first + 100);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limited{(sizes.first + sizes.second) / 2, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limited);
  on_ranks(2, 2, [&](Training& training) {
    training.train(0, 1);
    EXPECT_TRUE(contains(
        message_of([&] { save_state(folder(), training.model, training.optimizer, {{"epoch", "3"}, {"rank", "0"}}); }),
        "File too large"));
  });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(names_in(folder()), names);
  expect_resumed(2, 2, want);
}

TEST_F(StateFile, KeepsTheOldSaveWhenANewOneCannotTakeItsPlace) {
  const auto want = save(2, 2);
  std::filesystem::rename(index(), folder() + "/aside");
  const auto names = names_in(folder());
  for (const char* what : {"a folder", "a symbolic link"}) {
    what == std::string("a folder") ? (void)std::filesystem::create_directory(index())
                                    : std::filesystem::create_symlink("aside", index());
    on_ranks(3, 3, [&](Training& training) {
      const std::string text = message_of([&] { save_state(folder(), training.model); });
      EXPECT_TRUE(contains(text, "state.json', which is to be replaced, got ") && contains(text, what)) << text;
    });
    std::filesystem::remove(index());
    EXPECT_EQ(names_in(folder()), names);
  }
  std::filesystem::rename(folder() + "/aside", index());
  expect_resumed(2, 2, want);
}

TEST_F(StateFile, BringsBackUserContentOfAnyBytes) {
  const UserContent user = {{"epoch", "3"},
                            {"generator", std::string("\x80\xff\x00\x01", 4)},
                            {std::string("\xfe\x00", 2), "text"},
                            {"empty", ""}};
  on_ranks(2, 2, [&](Training& training) {
    save_state(folder(), training.model, user);
    EXPECT_EQ(load_state(folder(), training.model), user);
  });
}

TEST_F(StateFile, OfAModelAloneAndOfAModelFromBoth) {
  save(2, 2);
  on_ranks(1, 1, [&](Training& training) {
    EXPECT_EQ(load_state(folder(), training.model).at("epoch"), "3");
    save_state(folder(), training.model);
    EXPECT_TRUE(load_state(folder(), training.model).empty());
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { load_state(folder(), training.model, training.optimizer); }),
                         "an empty one on every rank"));
  });
}

}  // namespace
}  // namespace smp
