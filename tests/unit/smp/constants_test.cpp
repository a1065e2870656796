// Tensors made outside of the step and used in it: every use has the content of its time, however it was written.
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

/// What a body does with the model's output; called once per microbatch, in order.
using Tail = std::function<at::Tensor(const at::Tensor& output)>;

/// Several evaluations by `make_tail()` at the end of the model, with smp and without.
void expect_same_outputs(int ranks, int64_t rows_per_batch, const std::function<Tail()>& make_tail, int steps = 4) {
  run_smp_ranks(ranks, {.microbatches = 2}, [&] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    const at::NoGradGuard no_grad;
    const Tail tail = make_tail(), own_tail = make_tail();
    auto step = smp::step([&](at::Tensor data) { return tail(model(data)); });
    for (int s = 0; s < steps; ++s) {
      const at::Tensor data = rows(rows_per_batch, 8, 10 + s);
      std::vector<at::Tensor> want;
      for (const auto& part : support::split_batch({data}, 2)) want.push_back(own_tail(twin->forward(part[0])));
      expect_bit_equal(step(data).outputs(), want, "step " + std::to_string(s));
    }
  });
}

void write(const at::Tensor& tensor, int64_t element, float value) { tensor.data_ptr<float>()[element] = value; }

class Constants : public testing::TestWithParam<int> {};

TEST_P(Constants, LargeOneWrittenThroughItsPointerBetweenMicrobatches) {
  constexpr int64_t kRows = 1 << 15;  // [2^14, 4] floats per microbatch: 256 KiB
  expect_same_outputs(GetParam(), kRows, [] {
    auto calls = std::make_shared<int>(0);
    const at::Tensor mask = torch::ones({kRows / 2, 4});
    return [=](const at::Tensor& output) {
      write(mask, mask.numel() - 1, static_cast<float>(++*calls % 3));
      return output * mask;
    };
  });
}

TEST_P(Constants, SmallOneWrittenThroughItsPointerBetweenMicrobatches) {
  expect_same_outputs(GetParam(), 4, [] {
    auto calls = std::make_shared<int>(0);
    const at::Tensor mask = torch::ones({4});
    return [=](const at::Tensor& output) {
      write(mask, 0, static_cast<float>(++*calls % 3));
      return output * mask;
    };
  });
}

TEST_P(Constants, OneThatGoesBackToItsFirstContent) {
  expect_same_outputs(GetParam(), 4, [] {
    auto calls = std::make_shared<int>(0);
    const at::Tensor mask = torch::ones({4});
    return [=](const at::Tensor& output) {
      // Microbatch 0 of a step has the content of the recording, microbatch 1 has not: both are captured before any runs.
      write(mask, 0, *calls < 2 || *calls % 2 == 0 ? 1.0F : static_cast<float>(*calls));
      ++*calls;
      return output * mask;
    };
  });
}

TEST_P(Constants, WrittenBeforeTheFirstDifferenceOfARun) {
  expect_same_outputs(GetParam(), 4, [] {
    auto calls = std::make_shared<int>(0);
    const at::Tensor scale = torch::ones({4});
    return [=](const at::Tensor& output) {
      write(scale, 1, static_cast<float>(++*calls));
      const at::Tensor scaled = output * scale;
      return *calls % 3 == 0 ? scaled.tanh() : scaled.relu();
    };
  });
}

TEST_P(Constants, ViewsOfOneStorage) {
  expect_same_outputs(GetParam(), 4, [] {
    const at::Tensor table = rows(4, 8, 3);
    const at::Tensor head = table.slice(0, 0, 2).slice(1, 0, 4), tail = table.slice(0, 2, 4).slice(1, 4, 8);
    return [=](const at::Tensor& output) { return output * head + tail.data() * output - head.t().contiguous().t(); };
  });
}

TEST_P(Constants, ExpandedAndTransposedOnes) {
  expect_same_outputs(GetParam(), 8, [] {
    const at::Tensor row = rows(1, 4, 3).expand({4, 4}), columns = rows(4, 4, 4).t();
    auto calls = std::make_shared<int>(0);
    return [=](const at::Tensor& output) {
      write(row, 2, static_cast<float>(++*calls % 3));
      write(columns, 5, static_cast<float>(*calls % 2));
      return (output * row).matmul(columns);
    };
  });
}

TEST_P(Constants, OnlyTheSignOfZeroChanges) {
  expect_same_outputs(GetParam(), 4, [] {
    auto calls = std::make_shared<int>(0);
    const at::Tensor zero = torch::zeros({4});
    return [=](const at::Tensor& output) {
      write(zero, 0, ++*calls % 2 == 0 ? 0.0F : -0.0F);
      return output.abs() / zero;
    };
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Constants, testing::Values(1, 2));

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
