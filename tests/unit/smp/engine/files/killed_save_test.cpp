// A save that is killed at any of its system calls, or to which the system refuses one: the earlier state loads, or the new
// one.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <functional>

#include "smp/save_series.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/system_faults.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_folder.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::Ended;
using tests::names_in;
using tests::names_of_save;
using tests::run_smp_ranks;

// In a child process, counted from the SIGUSR1 on that `work` sends to itself.
Ended run_with_fault(int number, int error, const std::function<void()>& work) {
  const pid_t child = fork();
  if (child != 0) return support::trace_with_fault(child, number, error);
  support::let_parent_trace();
  try {
    at::set_num_threads(1);  // makes LibTorch's pool anew after a fork, one thread at a time
    work();
  } catch (const std::exception& failure) {
    if (error == support::kKills) std::fprintf(stderr, "%s\n", failure.what());
    _exit(1);
  }
  _exit(0);
}

class KilledSave : public testing::Test {
 protected:
  using Net = torch::nn::LinearImpl;

  std::string folder() const { return folder_.path("step_1"); }

  // A state that is told from others by all its numbers and its text.
  void save(int number, int ranks, bool sends_signal = true) const {
    run_smp_ranks(ranks, {.pipeline_parallel_degree = ranks}, [&] {
      auto net = std::make_shared<Net>(3, 2);
      tests::fill(*net, static_cast<uint64_t>(number));
      DistributedModel<Net> model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), number), model);
      if (sends_signal && rank() == 0) raise(SIGUSR1);
      const UserContent user{{"number", std::to_string(number)}};
      if (!in_background_) return save_state(folder(), model, optimizer, user);
      SaveSeries saves(folder_.path(""));
      saves.save_in_background(1, model, optimizer, user);
      saves.finish();
    });
  }

  // The number of the state in the folder; 0 where it has none.
  int loaded() const {
    int number = 0;
    const auto load = [&] {
      auto net = std::make_shared<Net>(3, 2), want = std::make_shared<Net>(3, 2);
      DistributedModel<Net> model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.5), model);
      number = std::stoi(load_state(folder(), model, optimizer).at("number"));
      tests::fill(*want, static_cast<uint64_t>(number));
      support::expect_bit_equal(net->weight.detach(), want->weight.detach(), "weight");
      support::expect_bit_equal(net->bias.detach(), want->bias.detach(), "bias");
      EXPECT_EQ(optimizer.state_dict().groups[0].options.at("lr"), number);
    };
    const std::string refusal = support::message_of([&] { run_smp_ranks(1, {}, load); });
    EXPECT_TRUE(refusal.empty() || support::contains(refusal, "has no file state.json")) << refusal;
    return number;
  }

  // Saves again and again in the folder that the last one has left, each with a fault one call later, until none comes.
  void expect_old_or_new(int ranks, int earlier) const {
    constexpr std::array kErrors = {ENOSPC, EIO, EDQUOT};
    int num_found_new = 0;
    Ended ended{.has_come = true};
    int number = 0;
    while (ended.has_come && !HasFailure()) {
      ++number;
      const int error = is_refused_ ? kErrors[static_cast<size_t>(number) % kErrors.size()] : support::kKills;
      SCOPED_TRACE("call " + std::to_string(number) + ", error " + std::to_string(error));
      ended = run_with_fault(number, error, [&] { save(number, ranks); });
      EXPECT_TRUE(ended.has_come || ended.is_well);
      const int found = loaded();
      EXPECT_TRUE(found == number || (!ended.is_well && found == earlier))
          << "found " << found << ", the earlier is " << earlier;
      num_found_new += ended.has_come && found == number;
      earlier = found;
    }
    EXPECT_GE(num_found_new, 2);  // the calls after the one that decides
    EXPECT_GE(number, 15);
    EXPECT_EQ(names_in(folder()), names_of_save(folder()));
  }

  bool in_background_ = false;
  bool is_refused_ = false;  // the call, in place of a kill

 private:
  TemporaryFolder folder_;
};

TEST_F(KilledSave, LeavesNoStateOrItsOwnInANewFolder) { expect_old_or_new(1, 0); }

TEST_F(KilledSave, LeavesNoStateOrItsOwnInANewFolderOnTwoRanks) { expect_old_or_new(2, 0); }

TEST_F(KilledSave, LeavesNoStateOrItsOwnInTheBackground) {
  in_background_ = true;
  expect_old_or_new(2, 0);
}

#ifdef __x86_64__
TEST_F(KilledSave, LeavesTheOldStateOrItsOwnWhereTheDiskIsFullOrFails) {
  is_refused_ = true;
  expect_old_or_new(2, 0);
}

TEST_F(KilledSave, LeavesTheOldStateOrItsOwnWhereTheDiskIsFullOrFailsInTheBackground) {
  is_refused_ = in_background_ = true;
  expect_old_or_new(2, 0);
}
#endif

TEST_F(KilledSave, LeavesTheOldStateOrItsOwn) {
  save(999, 3, /*sends_signal=*/false);
  expect_old_or_new(1, 999);
}

TEST_F(KilledSave, LeavesTheOldStateOrItsOwnOnTwoRanks) {
  save(999, 2, /*sends_signal=*/false);
  expect_old_or_new(2, 999);
}

TEST_F(KilledSave, LeavesAStateWithoutAnIndexOrItsOwn) {
  save(999, 2, /*sends_signal=*/false);
  tests::remove_index(folder());
  expect_old_or_new(1, 999);
}

}  // namespace
}  // namespace smp
