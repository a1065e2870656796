// A thousand ways to damage the newest save of a series: each is found, and the one before it loads, or it does no harm.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

namespace fs = std::filesystem;
using tests::run_smp_ranks;
using tests::SmallNet;

constexpr int kMutationsOfAKind = 100;

std::string content_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void put_content(const fs::path& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

class Mutation {
 public:
  Mutation(const fs::path& newest, const fs::path& older, uint64_t seed) : random_(seed) {
    for (const auto& entry : fs::directory_iterator(newest)) files_.push_back(entry.path());
    for (const auto& entry : fs::directory_iterator(older)) older_.push_back(entry.path());
    std::sort(files_.begin(), files_.end());  // as long as a save has the same names
    std::sort(older_.begin(), older_.end());
  }

  void apply(int kind) {
    const fs::path file = files_[below(files_.size())];
    std::string content = content_of(file);
    const size_t at = below(content.size());
    switch (kind) {
      case 0:  // one bit, as a disk loses it
        content[at] = static_cast<char>(content[at] ^ (1 << below(8)));
        break;
      case 1:
        content.resize(at);
        break;
      case 2:  // a page that was never written
        for (size_t i = at; i < std::min(content.size(), at + 512); ++i) content[i] = 0;
        break;
      case 3:
        for (size_t i = at; i < std::min(content.size(), at + 64); ++i) content[i] = static_cast<char>(below(256));
        break;
      case 4:
        content += std::string(1 + below(64), 'x');
        break;
      case 5:
        content.erase(at, 1 + below(16));
        break;
      case 6:
        fs::remove(file);
        return;
      case 7:  // of another rank, or of the index
        content = content_of(files_[below(files_.size())]);
        break;
      case 8:  // of the other save
        content = content_of(older_[below(older_.size())]);
        break;
      default:  // two bytes change places, which keeps their sum
        std::swap(content[at], content[below(content.size())]);
    }
    put_content(file, content);
  }
  static constexpr int kKinds = 10;

 private:
  size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  std::mt19937_64 random_;
  std::vector<fs::path> files_, older_;
};

TEST(MutatedSaves, ArePassedOverOrHarmless) {
  const TemporaryFolder place;
  const std::string folder = place.path("run"), whole = place.path("whole");
  run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff}, [&] {
    tests::SavedTraining<SmallNet, tests::BySgd> training;
    auto& model = training.model;
    auto& optimizer = training.optimizer;
    // Parameters, and what the optimizer has of them.
    const auto state = [&] {
      std::vector<at::Tensor> all;
      for (const at::Tensor& parameter : model.local_parameters()) all.push_back(parameter.detach().clone());
      for (const auto& [name, fields] : optimizer.local_state_dict().entries)
        for (const auto& [field, tensor] : fields) all.push_back(tensor);
      return all;
    };
    SaveSeries saves(folder);
    std::array<std::vector<at::Tensor>, 2> states;
    for (const int index : {0, 1}) {
      training.train(index, index + 1);
      saves.save(index + 1, model, optimizer, {{"step", std::to_string(index + 1)}});
      states[static_cast<size_t>(index)] = state();
    }
    if (rank() == 0) fs::copy(folder, whole, fs::copy_options::recursive);
    int num_found = 0;
    for (int mutation = 0; mutation < Mutation::kKinds * kMutationsOfAKind; ++mutation) {
      const int kind = mutation % Mutation::kKinds;
      SCOPED_TRACE("mutation " + std::to_string(mutation) + " of kind " + std::to_string(kind));
      if (rank() == 0) {
        fs::remove_all(folder);
        fs::copy(whole, folder, fs::copy_options::recursive);
        Mutation(folder + "/step_2", folder + "/step_1", static_cast<uint64_t>(mutation)).apply(kind);
      }
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : model.local_parameters()) parameter.fill_(mutation);
      }
      barrier();
      const auto resumed = saves.resume(model, optimizer);
      ASSERT_TRUE(resumed);
      ASSERT_EQ(resumed->user, (UserContent{{"step", std::to_string(resumed->step)}}));
      const auto got = state();
      const auto& want = states.at(static_cast<size_t>(resumed->step) - 1);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) support::expect_bit_equal(got[i], want[i], "state " + std::to_string(i));
      if (testing::Test::HasFailure()) return;
      num_found += resumed->step == 1 ? 1 : 0;
      barrier();
    }
    if (rank() == 0)
      std::printf("%d of %d were found, the others harmless\n", num_found, Mutation::kKinds * kMutationsOfAKind);
    EXPECT_GT(num_found, 8 * Mutation::kKinds * kMutationsOfAKind / 10);
  });
}

}  // namespace
}  // namespace smp
