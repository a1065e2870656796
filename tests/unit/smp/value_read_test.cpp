// Bodies that read values while they run, against the same loop without smp: the same bits, in the same order.
#include <sstream>
#include <stdexcept>

#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::message_of;
using tests::expect_as_in_a_loop;
using tests::make_net;
using tests::MicrobatchRun;
using tests::NormNet;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using tests::Texts;

struct ValueRead {
  std::string name;
  std::function<at::Tensor(const MicrobatchRun&)> body;
};

void PrintTo(const ValueRead& read, std::ostream* out) { *out << read.name; }

std::vector<ValueRead> value_reads() {
  return {
      {"OfTheLossBeforeItsBackward",
       [](const MicrobatchRun& run) {
         const at::Tensor loss = run.forward(run.data).square().mean();
         run.trace.push_back(loss.item<double>());
         return run.trained(loss);
       }},
      {"OfTheLossAfterItsBackward",
       [](const MicrobatchRun& run) {
         const at::Tensor loss = run.forward(run.data).square().mean();
         run.backward(loss);
         run.trace.push_back(loss.item<double>());
         return loss;
       }},
      {"SeveralInOneBody",
       [](const MicrobatchRun& run) {
         const at::NoGradGuard no_grad;
         const at::Tensor output = run.forward(run.data);
         run.trace.push_back(output.sum().item<double>());
         const at::Tensor correct = output.argmax(1).eq(0).sum();
         run.trace.push_back(static_cast<double>(correct.item<int64_t>()));
         return output;
       }},
      {"SeeWhatEarlierBodiesLeftInVariables",
       [](const MicrobatchRun& run) {
         const double before = run.trace.empty() ? 0.0 : run.trace.back();
         const at::Tensor loss = (run.forward(run.data) * (1 + before)).square().mean();
         run.backward(loss);
         run.trace.push_back(loss.item<double>() / 100);
         return loss;
       }},
      {"ChooseTheNextOperators",
       [](const MicrobatchRun& run) {
         at::Tensor output = run.forward(run.data);
         run.trace.push_back(output.sum().item<double>());
         output = run.trace.back() > 0 ? output.square() : output.exp();
         return run.trained(output.mean());
       }},
      {"ScaleWhatFollows",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data);
         const auto scale = output.abs().max().item<float>();
         run.trace.push_back(scale);
         return run.trained((output / scale).square().mean());
       }},
      {"OfTheInputsNeedNoPipeline",
       [](const MicrobatchRun& run) {
         at::Tensor input = run.data.clone();
         if ((input.mul_(2).sum() > 0).item<bool>()) input = -input;
         run.trace.push_back(input[0][0].item<double>());
         return run.trained((input.sum() > 1).item<bool>() ? run.forward(input).mean() : run.forward(input).square().mean());
       }},
      {"SkipABackward",
       [](const MicrobatchRun& run) {
         const at::Tensor loss = run.forward(run.data).square().mean();
         run.trace.push_back(loss.item<double>());
         if (run.trace.size() % 3 != 2) run.backward(loss);
         return loss;
       }},
      {"OfAPrintedTensor",
       [](const MicrobatchRun& run) {
         const at::Tensor loss = run.forward(run.data).square().mean();
         std::ostringstream text;
         text << loss;
         run.trace.push_back(std::stod(text.str()));
         return run.trained(loss);
       }},
      {"ThroughAPointerAfterCpu",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data);
         const at::Tensor best = output.argmax(1).cpu();
         const auto rows_of_best = best.accessor<int64_t, 1>();
         for (int64_t i = 0; i < best.size(0); ++i) run.trace.push_back(static_cast<double>(rows_of_best[i]));
         const at::Tensor twice = best.add(1).mul_(2);
         run.trace.push_back(static_cast<double>(twice.data_ptr<int64_t>()[0]));
         run.trace.push_back(twice.sum().item<double>());
         return run.trained(torch::nll_loss(torch::log_softmax(output, 1), best.to(output.device())));
       }},
      {"OfTensorsThatAreUsedFurtherKeepTheirGradient",
       [](const MicrobatchRun& run) {
         const at::Tensor output = run.forward(run.data.to(at::kCPU).to(run.data.device())).cpu();
         run.trace.push_back(output[0][0].item<double>());
         run.trace.push_back(output.abs().contiguous().data_ptr<float>()[1]);
         return run.trained(output.square().mean());
       }},
  };
}

class ReadBodies : public testing::TestWithParam<std::tuple<ValueRead, int>> {};

TEST_P(ReadBodies, TrainAsInALoop) {
  const auto& [read, ranks] = GetParam();
  expect_as_in_a_loop<SmallNet>({.ranks = ranks}, read.body);
  expect_as_in_a_loop<NormNet>({.ranks = ranks}, read.body);
}

INSTANTIATE_TEST_SUITE_P(Values, ReadBodies, testing::Combine(testing::ValuesIn(value_reads()), testing::Values(1, 2, 3)),
                         tests::name_on_ranks<ValueRead>);

class ValueReads : public testing::TestWithParam<int> {};

TEST_P(ValueReads, OfAnExceptionLeaveNothingBehind) {
  const auto refusal = [](int step) { return step == 1 ? Texts{"too large: 1"} : Texts(); };
  expect_as_in_a_loop<NormNet>({.ranks = GetParam(), .steps = 3, .refusal = refusal}, [](const MicrobatchRun& run) {
    const at::Tensor loss = run.trained(run.forward(run.data).square().mean());
    const auto value = loss.item<float>();
    if (run.step == 1 && run.microbatch == 1) throw std::runtime_error("too large: " + std::to_string(value > 0));
    return loss;
  });
}

// Another structure in each microbatch, so that the second is recorded when the first has run.
TEST_P(ValueReads, OfAModelThatIsPlacedAlready) {
  expect_as_in_a_loop<NormNet>({.ranks = GetParam()}, [](const MicrobatchRun& run) {
    at::Tensor output = run.forward(run.data);
    if (run.step == 0) return run.trained(output.square().mean());
    if (run.microbatch % 2 == 1) output = output.exp();
    run.trace.push_back(output.sum().item<double>());
    run.trace.push_back(output.max().item<double>());
    return output;
  });
}

TEST_P(ValueReads, OfASingleMicrobatchThatTakesAnotherPath) {
  expect_as_in_a_loop<NormNet>({.ranks = GetParam(), .steps = 6, .config = {.microbatches = 1}},
                               [](const MicrobatchRun& run) {
                                 const at::Tensor output = run.forward(run.data);
                                 const bool is_large = output.abs().sum().item<float>() > 0 && run.step % 3 == 2;
                                 return run.trained(is_large ? output.exp().mean() : output.square().mean());
                               });
}

TEST_P(ValueReads, DrawTheSameRandomNumbers) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto losses = [](bool reads) {
      DistributedModel model(make_net(at::kFloat, 0.5));
      std::vector<double> read, returned;
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = model(data).square().mean();
        if (reads) read.push_back(loss.item<double>());
        model.backward(loss);
        return loss;
      });
      for (int s = 0; s < 3; ++s) {
        const StepOutput output = step(rows(4, 8, 1));
        for (const at::Tensor& loss : output.outputs()) returned.push_back(loss.item<double>());
      }
      if (reads && pp_rank() == 0) {
        EXPECT_EQ(read, returned);
      }
      return returned;
    };
    EXPECT_EQ(losses(true), losses(false));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ValueReads, testing::Values(1, 2, 3));

TEST(ValueReadsOfReplicas, MayStartAgainAfterAReplicaRefusedBeforeTheOtherReads) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    DistributedModel model(make_net());
    int call = 0;
    auto step = smp::step([&](at::Tensor data) {
      if (call < 2 && dp_rank() == 1) throw std::runtime_error("not yet");
      const at::Tensor loss = model(data).square().mean();
      if (dp_rank() == 0) {
        EXPECT_GT(loss.item<float>(), 0);
      }
      model.backward(loss);
      return loss;
    });
    for (; call < 2; ++call) {
      const std::string text = message_of<std::exception>([&] { step(rows(4, 8, 1)); });
      EXPECT_TRUE(contains(text, "not yet")) << text;
    }
    step(rows(4, 8, 1));
    for (const at::Tensor& parameter : model.local_parameters()) EXPECT_TRUE(parameter.grad().defined());
  });
}

TEST(ValueReadsOfReplicas, ThatThrowOnOneReplicaEndTheStepOnAll) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      if (dp_rank() == 1 && loss.item<float>() > 0) throw std::runtime_error("enough");
      return loss;
    });
    const std::string text = message_of<std::exception>([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "enough")) << text;
    for (const at::Tensor& parameter : model.local_parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

}  // namespace
}  // namespace smp
