// Tensors made outside of the step and used in it: every use has the content of its time, however it was written.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

void write(const at::Tensor& tensor, int64_t element, float value) { tensor.data_ptr<float>()[element] = value; }

constexpr int64_t kManyRows = 1 << 14;  // [2^14, 4] floats: 256 KiB

/// Tensors that are no part of the module for smp.
struct ConstantsNet : SmallNet {
  at::Tensor large = torch::ones({kManyRows, 4}), mask = torch::ones({4}), zero = torch::zeros({4});
  at::Tensor mean = rows(1, 4, 5)[0], variance = torch::ones({4}) * 2, unfrozen = rows(4, 4, 6).requires_grad_();
  at::Tensor table = rows(4, 8, 3), row = rows(1, 4, 3).expand({2, 4}), columns = rows(4, 4, 4).t();
};

struct ConstantsCase {
  std::string name;
  /// What a body does with the model's output; `call` counts from 1.
  std::function<at::Tensor(ConstantsNet& net, const at::Tensor& output, int call)> tail;
  int64_t rows = 2;  // of a microbatch

  friend void PrintTo(const ConstantsCase& row, std::ostream* out) { *out << row.name; }
};

std::vector<ConstantsCase> constants() {
  return {
      {"LargeOneWrittenThroughItsPointerBetweenMicrobatches",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         write(net.large, net.large.numel() - 1, static_cast<float>(call % 3));
         return output * net.large;
       },
       kManyRows},
      {"SmallOneWrittenThroughItsPointerBetweenMicrobatches",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         write(net.mask, 0, static_cast<float>(call % 3));
         return output * net.mask;
       }},
      // Microbatch 0 of a step has the content of the recording, microbatch 1 has not: both are captured before any runs.
      {"OneThatGoesBackToItsFirstContent",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         write(net.mask, 0, call < 3 || call % 2 == 1 ? 1.0F : static_cast<float>(call - 1));
         return output * net.mask;
       }},
      {"WrittenBeforeTheFirstDifferenceOfARun",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         write(net.mask, 1, static_cast<float>(call));
         const at::Tensor scaled = output * net.mask;
         return call % 3 == 0 ? scaled.tanh() : scaled.relu();
       }},
      {"ViewsOfOneStorage",
       [](ConstantsNet& net, const at::Tensor& output, int) {
         const at::Tensor head = net.table.slice(0, 0, 2).slice(1, 0, 4), tail = net.table.slice(0, 2, 4).slice(1, 4, 8);
         return output * head + tail.data() * output - head.t().contiguous().t();
       }},
      {"ExpandedAndTransposedOnes",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         write(net.row, 2, static_cast<float>(call % 3));
         write(net.columns, 5, static_cast<float>(call % 2));
         return (output * net.row).matmul(net.columns);
       }},
      {"StatisticsOfANormInEvaluation",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         write(net.mean, 1, static_cast<float>(call % 3));
         return torch::batch_norm(output, {}, {}, net.mean, net.variance, /*training=*/false, 0.1, 1e-5, false) +
                torch::instance_norm(output.unsqueeze(2).expand({2, 4, 3}), {}, {}, net.mean, net.variance,
                                     /*use_input_stats=*/false, 0.1, 1e-5, false)
                    .mean(2);
       }},
      {"TrainableOneWithoutGradMode",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         const at::NoGradGuard no_grad;
         write(net.unfrozen, 1, static_cast<float>(call % 3));
         return output.matmul(net.unfrozen);
       }},
      {"OnlyTheSignOfZeroChanges",
       [](ConstantsNet& net, const at::Tensor& output, int call) {
         write(net.zero, 0, call % 2 == 0 ? 0.0F : -0.0F);
         return output.abs() / net.zero;
       }},
  };
}

class Constants : public testing::TestWithParam<std::tuple<ConstantsCase, int>> {};

TEST_P(Constants, HaveTheContentOfTheirTime) {
  const auto& [row, ranks] = GetParam();
  tests::Loop<ConstantsNet> loop{.ranks = ranks, .config = {.microbatches = 2}, .trains = false};
  loop.batch = [num_rows = 2 * row.rows](int step) { return rows(num_rows, 8, 10 + step); };
  tests::expect_as_in_a_loop<ConstantsNet>(loop, [&tail = row.tail](const tests::BodyRun<ConstantsNet>& run) {
    return tail(run.net, run.forward(run.data), 2 * run.step + run.microbatch + 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, Constants, testing::Combine(testing::ValuesIn(constants()), testing::Values(1, 2)),
                         tests::name_on_ranks<ConstantsCase>);

/// The text that a step throws whose body writes to `mask` after it has used it.
std::string message_of_late_write(int64_t elements, bool writes_at_once) {
  std::string message;
  run_smp_ranks(1, {}, [&] {
    const auto net = make_net();
    Model model(net);
    const at::Tensor mask = torch::ones({elements, 4});
    bool writes = writes_at_once;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor once = model(data) * mask;
      if (writes) write(mask, 3, mask.data_ptr<float>()[3] + 1);
      return once * mask;
    });
    const at::Tensor data = rows(elements, 8, 1);
    if (!writes) step(data);
    writes = true;
    message = message_of([&] { step(data); });
    writes = false;
    expect_bit_equal(step(data)[0], (net->forward(data) * mask * mask).detach(), "after the refusal");
  });
  return message;
}

TEST(LateWrite, IsRefusedWhileRecordingAndWhileMatching) {
  for (const int64_t elements : {1, 1 << 15}) {
    for (const bool writes_at_once : {true, false}) {
      const std::string message = message_of_late_write(elements, writes_at_once);
      EXPECT_NE(message.find("rewritten after its first use"), std::string::npos) << message;
    }
  }
}

TEST(Constant, ThatIsTrainableIsRefusedInGradMode) {
  run_smp_ranks(1, {}, [] {
    DistributedModel model(make_net());
    const at::Tensor scale = torch::ones({8}, torch::requires_grad());
    auto step = smp::step([&](at::Tensor data) {
      at::Tensor once;
      {
        const at::NoGradGuard no_grad;
        once = model(data * scale);
      }
      return once + model(data * scale);
    });
    const std::string message = message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_NE(message.find("sizes [8] that requires a gradient"), std::string::npos) << message;
  });
}

TEST(Constant, WithoutItsOwnBytesIsRefused) {
  run_smp_ranks(1, {}, [] {
    const auto net = make_net();
    Model model(net);
    const at::Tensor lazy = torch::view_as_complex(rows(4, 2, 1)).conj();
    auto step = smp::step([&](at::Tensor data) { return model(data) * torch::real(lazy * lazy); });
    const std::string message = message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_NE(message.find("resolve_conj"), std::string::npos) << message;
  });
}

}  // namespace
}  // namespace smp
