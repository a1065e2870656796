// Bodies that read values in the first step of a model: before anything has been placed, and when that is refused.
#include <stdexcept>

#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::expect_as_in_a_loop;
using tests::Loop;
using tests::make_net;
using tests::MicrobatchRun;
using tests::NormNet;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

struct ReadLayout {
  int ranks;
  int64_t pipeline_ranks;
};

Config config_of(const ReadLayout& layout, int64_t microbatches = 2) {
  return {.pipeline_parallel_degree = layout.pipeline_ranks, .microbatches = microbatches, .log_level = LogLevel::kOff};
}

std::shared_ptr<SmallNet> net_of_rank() {
  auto net = std::make_shared<SmallNet>();
  tests::fill(*net, 10 + static_cast<uint64_t>(rank()));
  return net;
}

class FirstReads : public ::testing::TestWithParam<ReadLayout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, FirstReads,
                         ::testing::Values(ReadLayout{1, 1}, ReadLayout{2, 1}, ReadLayout{2, 2}, ReadLayout{4, 2},
                                           ReadLayout{3, 3}));

// Ranks that initialise differently: what is read is what is returned.
TEST_P(FirstReads, SeeTheWeightsThatTrain) {
  run_smp_ranks(GetParam().ranks, config_of(GetParam()), [] {
    DistributedModel model(net_of_rank());
    std::vector<float> read;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      read.push_back(loss.item<float>());
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 2; ++s) {
      read.clear();
      const StepOutput losses = step(rows(4, 8, s + dp_rank()));
      if (pp_rank() > 0) continue;
      ASSERT_EQ(read.size(), 2U);
      for (int64_t m = 0; m < 2; ++m) EXPECT_EQ(read[m], losses[m].item<float>()) << "step " << s << " microbatch " << m;
    }
  });
}

TEST_P(FirstReads, OfBuffersThatEarlierMicrobatchesHaveWritten) {
  const Loop<NormNet> loop{.ranks = GetParam().ranks, .steps = 2, .config = config_of(GetParam(), 4)};
  expect_as_in_a_loop<NormNet>(loop, [](const MicrobatchRun& run) {
    const at::Tensor loss = run.forward(run.data).square().mean();
    const bool is_large = loss.item<float>() > 0;
    run.backward(is_large && run.microbatch % 2 == 1 ? loss.exp() : loss);
    return loss;
  });
}

// Refused after a read: no model has been placed, and nothing of the plan is left.
TEST_P(FirstReads, ThatAreRefusedLeaveNothing) {
  run_smp_ranks(GetParam().ranks, config_of(GetParam()), [] {
    DistributedModel model(make_net());
    bool throws = true;
    int num_hooks = 0;
    model.register_pre_partition_hook([&] {
      ++num_hooks;
      for (const auto& parameter : model.local_parameters()) EXPECT_GT(parameter.abs().sum().item<float>(), 0);
      EXPECT_EQ(model.local_parameters().size(), 8U);
    });
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      if (loss.item<float>() > 0 && throws) throw std::runtime_error("not yet");
      model.backward(loss);
      return loss;
    });
    EXPECT_TRUE(contains(message_of<std::exception>([&] { step(rows(4, 8, 1)); }), "not yet"));
    EXPECT_FALSE(model.partitioned());
    EXPECT_EQ(model.local_parameters().size(), 8U);
    EXPECT_EQ(num_hooks, 0);
    throws = false;
    step(rows(4, 8, 1));
    EXPECT_TRUE(model.partitioned());
    EXPECT_EQ(num_hooks, 1);
  });
}

TEST_P(FirstReads, LetHooksAskForLocalParameters) {
  run_smp_ranks(GetParam().ranks, config_of(GetParam()), [] {
    DistributedModel model(make_net());
    int64_t before = 0, after = -1;
    model.register_pre_partition_hook([&] { before = static_cast<int64_t>(model.local_named_parameters().size()); });
    model.register_post_partition_hook([&] { after = static_cast<int64_t>(model.local_named_parameters().size()); });
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      EXPECT_GT(loss.item<float>(), 0);
      model.backward(loss);
      return loss;
    });
    step(rows(4, 8, 1));
    EXPECT_EQ(before, 8);
    EXPECT_GE(after, 0);
  });
}

at::Tensor train_and_read(const MicrobatchRun& run) {
  const at::Tensor loss = run.forward(run.data).square().mean();
  run.trace.push_back(loss.item<double>());
  return run.trained(loss);
}

TEST_P(FirstReads, KeepTheirProgramsInACacheOfOne) {
  Loop<SmallNet> loop{.ranks = GetParam().ranks, .steps = 5, .config = config_of(GetParam())};
  loop.config.max_cached_graphs = 1;
  loop.batch = [](int step) { return rows(step % 3 == 1 ? 8 : 4, 8, step); };
  expect_as_in_a_loop<SmallNet>(loop, train_and_read);
}

// Only one replica turns to a second model, after a read.
TEST(FirstReadsOfReplicas, ThatPlaceAnotherModelThanOthersAreRefused) {
  for (const ReadLayout& layout : {ReadLayout{2, 1}, ReadLayout{4, 2}}) {
    run_smp_ranks(layout.ranks, config_of(layout), [] {
      DistributedModel model(make_net()), other(make_net());
      int s = 0;
      auto step = smp::step([&](at::Tensor data) {
        at::Tensor loss = model(data).square().mean();
        if (loss.item<float>() > 0 && s == 1 && dp_rank() == 0) loss = loss + other(data).square().mean();
        model.backward(loss);
        return loss;
      });
      step(rows(4, 8, 1));
      ++s;
      const std::string text = message_of<c10::ValueError>([&] { step(rows(4, 8, 1)); });
      EXPECT_TRUE(contains(text, "the same operators on the same shapes")) << text;
      EXPECT_FALSE(other.partitioned());
      ++s;
      step(rows(4, 8, 1));
    });
  }
}

TEST(FirstReadsOfReplicas, MayBeOneReplicasOnly) {
  for (const ReadLayout& layout : {ReadLayout{2, 1}, ReadLayout{4, 2}}) {
    run_smp_ranks(layout.ranks, config_of(layout), [] {
      const auto gradients = [](const std::shared_ptr<SmallNet>& net, bool reads) {
        DistributedModel model(net);
        auto step = smp::step([&](at::Tensor data) {
          const at::Tensor loss = model(data).square().mean();
          if (reads && dp_rank() == 0) {
            EXPECT_GT(loss.item<float>(), 0);
          }
          model.backward(loss);
          return loss;
        });
        const std::vector<at::Tensor> all = allgather(step(rows(4, 8, 1)).stack().cpu(), CommGroup::DP_GROUP);
        expect_bit_equal(all[0], all[1], "the same data on the same weights");
        for (int s = 0; s < 2; ++s) step(rows(4, 8, 10 + dp_rank()));
        std::vector<at::Tensor> of_rank;
        for (const at::Tensor& parameter : model.local_parameters()) of_rank.push_back(parameter.grad().clone());
        return of_rank;
      };
      gradients(net_of_rank(), true);
      expect_bit_equal(gradients(make_net(), true), gradients(make_net(), false), "gradients");
    });
  }
}

// A body that swallows what a read throws does not get further than its end.
TEST(ReadsThatFail, EndTheStepOfABodyThatCatchesThem) {
  run_smp_ranks(4, config_of({4, 2}), [] {
    DistributedModel model(make_net());
    int call = 0;
    auto step = smp::step([&](at::Tensor data) {
      if (call == 1 && dp_rank() == 1) throw std::runtime_error("not yet");
      const at::Tensor loss = model(data).square().mean();
      try {
        EXPECT_GT(loss.item<float>(), 0);
      } catch (const std::exception&) {
      }
      model.backward(loss);
      return loss;
    });
    step(rows(4, 8, 1));
    ++call;
    EXPECT_TRUE(contains(message_of<std::exception>([&] { step(rows(4, 8, 1)); }), "not yet"));
    ++call;
    step(rows(4, 8, 1));
  });
}

TEST(ReadsThatFail, InARoundEndTheJobThoughTheBodyCatchesThem) {
  for (const int ranks : {1, 2}) {
    const std::string text = message_of<std::exception>([ranks] {
      run_smp_ranks(ranks, config_of({ranks, ranks}), [] {
        DistributedModel model(make_net());
        auto step = smp::step([&](at::Tensor data, at::Tensor index) {
          const at::Tensor loss = model(data).index_select(0, index).square().mean();
          try {
            loss.item<float>();
          } catch (const std::exception&) {
          }
          return loss;
        });
        step(rows(4, 8, 1), at::full({2}, 7, at::kLong));
      });
    });
    EXPECT_TRUE(contains(text, "index out of range")) << text;
  }
}

// Each body has a number of its own that a read decides: not every one of them makes all later ones run again.
TEST(ReadsThatDecideNumbers, RunEachForwardAFewTimes) {
  expect_as_in_a_loop<SmallNet>({.ranks = 2, .steps = 3, .config = {.microbatches = 8}}, [](const MicrobatchRun& run) {
    const at::Tensor loss = run.forward(run.data).square().mean();
    const double average = run.trace.empty() ? 1 : run.trace.back();
    run.trace.push_back(0.9 * average + 0.1 * loss.item<double>());
    run.backward(loss / run.trace.back());
    return loss;
  });
}

// The training mode decides the random stream, and bodies that read run before it is known.
TEST(ReadsBeforeABackward, TrainInEvaluationModeWhereDropoutRests) {
  const auto in_evaluation = [] {
    const auto net = make_net(at::kFloat, 0.5);
    net->eval();
    return net;
  };
  expect_as_in_a_loop<SmallNet>({.ranks = 2, .steps = 2, .make = in_evaluation}, train_and_read);
}

TEST(ReadsBeforeABackward, AreRefusedWhereTheyWouldDrawFromTheOtherStream) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    DistributedModel model(make_net(at::kFloat, 0.5));
    model.eval();
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = torch::dropout(model(data), 0.5, true).square().mean();
      EXPECT_GE(loss.item<double>(), 0);
      model.backward(loss);
      return loss;
    });
    const std::string text = message_of<c10::NotImplementedError>([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "turned out to be training")) << text;
    EXPECT_FALSE(model.local_parameters().front().grad().defined());
  });
}

}  // namespace
}  // namespace smp
