// Saves in folders that hosts do not share: what is left of them is found, and copied to where it is read.
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

namespace fs = std::filesystem;
using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::run_smp_ranks;

using SpreadTraining = tests::SavedTraining<tests::NormNet>;

class SpreadSaveTest : public testing::Test {
 protected:
  using HostOf = std::function<int(int rank)>;
  struct Saved {
    std::vector<at::Tensor> losses{};  // of the next two steps
    at::Tensor norm_mean{};            // of the first replica
  };

  std::string host(int number) const { return folder_.path("host_" + std::to_string(number)); }
  static int pairs(int rank) { return rank / 2; }
  static void on_ranks(int ranks, int stages, const std::function<void(SpreadTraining&)>& body, uint64_t seed = 3) {
    const Config config{.pipeline_parallel_degree = stages, .microbatches = 2, .seed = 9, .log_level = LogLevel::kOff};
    run_smp_ranks(ranks, config, [&] {
      SpreadTraining training(seed);
      body(training);
    });
  }

  // After two steps and after three.
  Saved save(int ranks, int stages, const HostOf& host_of, SaveCopies copies, int num_kept = 2) const {
    std::mutex mutex;
    Saved saved;
    on_ranks(ranks, stages, [&](SpreadTraining& training) {
      SaveSeries saves(host(host_of(rank())), num_kept, copies);
      training.train(0, 2);
      saves.save(2, training.model, training.optimizer);
      training.train(2, 3);
      saves.save_in_background(3, training.model, training.optimizer, {{"rank", std::to_string(rank())}});
      saves.finish();
      const at::Tensor norm_mean = training.model.state_dict().at("norm.running_mean");
      const auto rest = training.train(3, 5);
      const std::lock_guard lock(mutex);
      saved.losses = rest;
      if (rank() == 0) saved.norm_mean = norm_mean;
    });
    return saved;
  }

  void expect_resumed(int ranks, int stages, const HostOf& host_of, const Saved& want) const {
    const auto resume = [&](SpreadTraining& training) {
      const auto resumed =
          SaveSeries(host(host_of(rank())), 2, SaveCopies::kOnEachHost).resume(training.model, training.optimizer);
      ASSERT_TRUE(resumed);
      EXPECT_EQ(resumed->step, 3);
      EXPECT_EQ(resumed->user, (UserContent{{"rank", "0"}}));
      expect_bit_equal(training.model.state_dict().at("norm.running_mean"), want.norm_mean, "buffer of the first replica");
      expect_bit_equal(training.train(3, 5), want.losses, "losses");
    };
    on_ranks(ranks, stages, resume, /*seed=*/77);
  }

  int num_files(const std::string& folder) const {
    int count = 0;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(folder, none)) count += entry.path().extension() == ".safetensors";
    return count;
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(SpreadSaveTest, EachHostHasAWholeSaveAndOutlivesTheOther) {
  const Saved want = save(4, 2, pairs, SaveCopies::kOnEachHost);
  for (const int number : {0, 1}) EXPECT_EQ(num_files(host(number) + "/step_3"), 2);
  const auto aside = [&](int number) { fs::rename(host(number), host(number + 10)); };
  for (const int lost : {0, 1}) {
    SCOPED_TRACE("without host " + std::to_string(lost));
    aside(lost);
    expect_resumed(4, 2, pairs, want);
    fs::remove_all(host(lost));
    fs::rename(host(lost + 10), host(lost));
  }
}

TEST_F(SpreadSaveTest, OfOneReplicaIsOnTheHostsOfItsStages) {
  const Saved want = save(2, 2, [](int rank) { return rank; }, SaveCopies::kOne);
  for (const int number : {0, 1}) EXPECT_EQ(num_files(host(number) + "/step_3"), 1);
  expect_resumed(2, 2, [](int rank) { return rank; }, want);
  expect_resumed(2, 2, [](int rank) { return 1 - rank; }, want);  // each reads what the other has
  expect_resumed(3, 3, [](int rank) { return rank; }, want);      // a new host
  for (const int number : {0, 1, 2}) EXPECT_LE(num_files(host(number) + "/step_3"), 2);
}

TEST_F(SpreadSaveTest, FilesOfOneHostWithoutTheOthersAreNotTaken) {
  save(2, 2, [](int rank) { return rank; }, SaveCopies::kOne);
  fs::remove_all(host(1));
  on_ranks(2, 2, [&](SpreadTraining& training) {
    const at::Tensor before = training.net->first->weight.detach().clone();
    const std::string text =
        message_of<c10::ValueError>([&] { SaveSeries(host(rank())).resume(training.model, training.optimizer); });
    EXPECT_TRUE(contains(text, "expected one of 2 saves")) << text;
    expect_bit_equal(training.net->first->weight.detach(), before, "after a refused resume");
  });
}

TEST_F(SpreadSaveTest, OfSeveralSavesTheOneThatIsWholeSomewhereCounts) {
  const Saved want = save(4, 2, pairs, SaveCopies::kOnEachHost);
  // Host 0 comes back with what it had before: a save of the same step of which one file is gone.
  on_ranks(2, 2, [&](SpreadTraining& training) {
    training.train(0, 1);
    save_state(host(7), training.model, training.optimizer);
  });
  fs::remove_all(host(0) + "/step_3");
  fs::rename(host(7), host(0) + "/step_3");
  for (const auto& entry : fs::directory_iterator(host(0) + "/step_3")) {
    if (entry.path().filename().string().starts_with("rank_1_")) fs::remove(entry.path());
  }
  expect_resumed(4, 2, pairs, want);
}

TEST_F(SpreadSaveTest, ADamagedIndexIsNotPassedOver) {
  save(4, 2, pairs, SaveCopies::kOnEachHost, /*num_kept=*/1);
  std::ofstream(host(0) + "/step_3/state.json") << "{}";
  on_ranks(4, 2, [&](SpreadTraining& training) {
    const std::string text =
        message_of<c10::ValueError>([&] { SaveSeries(host(pairs(rank()))).resume(training.model, training.optimizer); });
    EXPECT_TRUE(contains(text, "The file is damaged; take another save")) << text;
  });
}

TEST_F(SpreadSaveTest, TheNewestOfSeveralSeriesCounts) {
  const Saved want = save(2, 2, [](int) { return 0; }, SaveCopies::kOne);
  save(2, 2, [](int rank) { return rank + 1; }, SaveCopies::kOne);
  fs::remove_all(host(2));  // so nothing of the second series loads
  on_ranks(2, 2, [&](SpreadTraining& training) {
    SaveSeries in_memory(host(rank() + 1)), on_disk(host(0));
    const auto resumed = SaveSeries::resume_newest({&in_memory, &on_disk}, training.model, training.optimizer);
    ASSERT_TRUE(resumed);
    EXPECT_EQ(resumed->step, 3);
    expect_bit_equal(training.train(3, 4).front(), want.losses.front(), "loss");
    on_disk.save(4, training.model, training.optimizer);
    EXPECT_EQ(SaveSeries::resume_newest({&in_memory, &on_disk}, training.model, training.optimizer)->step, 4);
  });
}

TEST_F(SpreadSaveTest, RanksThatSaveDifferentPartsAreRefused) {
  on_ranks(2, 2, [&](SpreadTraining& training) {
    training.train(0, 1);
    SaveParts parts{.models = {{"net", training.model}}};
    if (rank() == 0) parts.optimizers.emplace("adam", training.optimizer);
    const auto refused = [&](const std::string& kind, const auto& call) {
      const std::string text = message_of<c10::ValueError>(call);
      EXPECT_TRUE(contains(text, "the same parts on all ranks, got " + kind +
                                     " with models 'net' and optimizers 'adam' on rank 0 and " + kind +
                                     " with models 'net' and optimizers on rank 1"))
          << text;
    };
    refused("a save", [&] { save_state(host(0), parts); });
    refused("a load", [&] { load_state(host(0), parts); });
    const SaveCopies copies = rank() == 0 ? SaveCopies::kOne : SaveCopies::kOnEachHost;
    SaveSeries series(host(0), 2, copies);
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { series.save(1, training.model, training.optimizer); }),
                         "on rank 0 and a save on each host of step 1 with models ''"));
    SaveSeries alike(host(0));
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { alike.save(rank(), training.model, training.optimizer); }),
                         "got a save of step 0 with models '' and optimizers '' on rank 0 and a save of step 1"));
    EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { alike.save(-1, training.model, training.optimizer); }),
                         "a step of 0 or more, got -1"));
    std::vector<SaveSeries*> different{&alike};
    if (rank() == 0) different.clear();
    const std::string text =
        message_of<c10::ValueError>([&] { SaveSeries::resume_newest(different, training.model, training.optimizer); });
    EXPECT_TRUE(contains(text, "expected a series or more, as many on all ranks")) << text;
    EXPECT_FALSE(fs::exists(host(0)));
  });
}

TEST_F(SpreadSaveTest, ModelsBeforeTheirFirstStepAreThoseOfTheFirstReplica) {
  on_ranks(2, 1, [&](SpreadTraining& training) {
    tests::fill(*training.net, 40 + static_cast<uint64_t>(rank()));
    SaveSeries(host(rank()), 2, SaveCopies::kOnEachHost).save(1, training.model, training.optimizer);
  });
  on_ranks(1, 1, [&](SpreadTraining& training) {
    ASSERT_TRUE(SaveSeries(host(1)).resume(training.model, training.optimizer));
    tests::NormNet first;
    tests::fill(first, 40);
    expect_bit_equal(training.net->first->weight.detach(), first.first->weight.detach(), "of the first replica");
  });
}

TEST_F(SpreadSaveTest, ModelsBeforeTheirFirstStepThatDifferWithinAPipelineAreRefused) {
  for (const SaveCopies copies : {SaveCopies::kOne, SaveCopies::kOnEachHost}) {
    on_ranks(2, 2, [&](SpreadTraining& training) {
      SaveSeries saves(host(0), 2, copies);
      saves.save(1, training.model, training.optimizer);
      if (rank() == 1) training.net->last->bias.data().add_(1);
      const std::string text = message_of<c10::Error>([&] { saves.save(2, training.model, training.optimizer); });
      EXPECT_TRUE(contains(text, "got another 'last.bias' on pipeline rank 1 than on 0. Seed all ranks alike")) << text;
      training.train(0, 1);
      saves.save(2, training.model, training.optimizer);
    });
  }
}

TEST_F(SpreadSaveTest, HostsRemoveTheirOlderSaves) {
  save(4, 2, pairs, SaveCopies::kOnEachHost, /*num_kept=*/1);
  for (const int number : {0, 1}) {
    EXPECT_FALSE(fs::exists(host(number) + "/step_2"));
    EXPECT_TRUE(fs::exists(host(number) + "/step_3/state.json"));
  }
}

TEST_F(SpreadSaveTest, ReplicasOfOneHostWriteOnce) {
  // A file that is written twice has one name in the end, but two until then.
  fs::create_directories(host(0) + "/step_3");
  const int events = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  ASSERT_GE(inotify_add_watch(events, (host(0) + "/step_3").c_str(), IN_CREATE), 0);
  save(4, 2, [](int) { return 0; }, SaveCopies::kOnEachHost);
  std::array<char, 1 << 14> seen{};
  const ssize_t num_bytes = read(events, seen.data(), seen.size());
  close(events);
  std::vector<std::string> named;
  for (ssize_t at = 0; at < num_bytes;) {
    inotify_event event{};
    std::memcpy(&event, seen.data() + at, sizeof event);
    named.emplace_back(seen.data() + at + sizeof event);
    at += static_cast<ssize_t>(sizeof event + event.len);
  }
  EXPECT_EQ(std::count_if(named.begin(), named.end(), [](const auto& name) { return name.starts_with("rank_"); }), 2);
}

}  // namespace
}  // namespace smp
