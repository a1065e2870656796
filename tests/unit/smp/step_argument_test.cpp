// How step arguments become microbatches: their values, alignment and memory, and what a writing body may not change.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "smp/engine/arguments/split.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using engine::split_arguments;
using support::expect_bit_equal;
using tests::eager_step;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

bool is_aligned(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64 == 0; }

/// Checks the parts of `batch` and tells whether the first of them lies in the memory of `batch`.
bool shares_memory(const at::Tensor& batch, int64_t microbatches) {
  const auto parts = split_arguments({{.tensor = batch}}, {.microbatches = microbatches});
  EXPECT_EQ(parts.size(), static_cast<size_t>(microbatches));
  for (int64_t m = 0; m < microbatches; ++m) {
    const at::Tensor& part = parts[static_cast<size_t>(m)].at(0);
    const int64_t number = batch.size(0) / microbatches;
    expect_bit_equal(part, batch.narrow(0, m * number, number).clone(), "microbatch " + std::to_string(m));
    EXPECT_TRUE(is_aligned(part)) << "microbatch " << m;
    EXPECT_EQ(part.storage_offset(), 0);
  }
  return parts[0][0].const_data_ptr() == batch.const_data_ptr();
}

TEST(SplitArguments, AlignedPartsStayInTheArgumentsMemory) { EXPECT_TRUE(shares_memory(rows(8, 16, 1), 4)); }
TEST(SplitArguments, PartsThatWouldBeMisalignedAreCopied) { EXPECT_FALSE(shares_memory(rows(8, 3, 1), 4)); }
TEST(SplitArguments, PartsOfAMisalignedArgumentAreCopied) {
  EXPECT_FALSE(shares_memory(rows(9, 17, 1).flatten().narrow(0, 1, 128).view({8, 16}), 4));
}
TEST(SplitArguments, TransposedArgumentsAreCopied) { EXPECT_FALSE(shares_memory(rows(16, 8, 1).t(), 4)); }
TEST(SplitArguments, ChannelsLastStaysChannelsLast) {
  const at::Tensor images = rows(4, 3 * 5 * 5, 1).view({4, 3, 5, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_FALSE(shares_memory(images, 2));
  EXPECT_TRUE(
      split_arguments({{.tensor = images}}, {.microbatches = 2})[0][0].is_contiguous(at::MemoryFormat::ChannelsLast));
}
TEST(SplitArguments, RowsWithoutElementsSplit) {
  EXPECT_EQ(split_arguments({{.tensor = rows(4, 0, 1)}}, {.microbatches = 2})[1][0].size(0), 2);
}
TEST(SplitArguments, PartsOutliveTheArgument) {
  std::vector<std::vector<at::Tensor>> parts;
  {
    const at::Tensor batch = rows(8, 16, 1);
    parts = split_arguments({{.tensor = batch}}, {.microbatches = 2});
  }
  expect_bit_equal(parts[1][0], rows(8, 16, 1).narrow(0, 4, 4).clone(), "after the argument has gone");
}

// A row of 8 floats: two microbatches of 2 rows are aligned, four of 1 row are not.
class WritingBody : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(WritingBody, LeavesTheArgumentAlone) {
  const auto [ranks, microbatches] = GetParam();
  run_smp_ranks(ranks, {.microbatches = microbatches}, [microbatches = microbatches] {
    const auto net = make_net(), twin = make_net();
    DistributedModel<tests::SmallNet> model(net);
    auto step = smp::step([&](at::Tensor data, at::Tensor target) {
      data.mul_(2);
      const at::Tensor loss = torch::mse_loss(model(data), target);
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      twin->zero_grad();
      const at::Tensor data = rows(4, 8, 10 + s), target = rows(4, 4, 20 + s);
      const auto losses = step(data, target).outputs();
      expect_bit_equal(data, rows(4, 8, 10 + s), "the argument");
      expect_bit_equal(losses, eager_step(*twin, data * 2, target, microbatches), "step " + std::to_string(s));
      expect_twins(model, *twin, "step " + std::to_string(s));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, WritingBody, testing::Combine(testing::Values(1, 2), testing::Values(1, 2, 4)));

class SharedArguments : public testing::TestWithParam<int> {
 protected:
  /// The text of a step of `body` on two arguments, twice: recorded and matched.
  template <class Body>
  static void expect_refusal(const Body& body, const std::function<std::pair<at::Tensor, at::Tensor>()>& arguments,
                             const std::vector<std::string>& texts) {
    run_smp_ranks(GetParam(), {.microbatches = 2}, [&] {
      const auto net = make_net();
      DistributedModel<tests::SmallNet> model(net);
      auto step = smp::step([&](at::Tensor data, at::Tensor other) { return body(model, data, other); });
      for (int s = 0; s < 2; ++s) {
        const auto [data, other] = arguments();
        const std::string text = support::message_of<c10::ValueError>([&] { step(data, other); });
        for (const std::string& part : texts) EXPECT_TRUE(support::contains(text, part)) << part << " in: " << text;
        step(data.clone(), other.clone());
      }
    });
  }
  static at::Tensor write_first(DistributedModel<tests::SmallNet>& model, at::Tensor data, at::Tensor other) {
    data.add_(1);
    return model(data).detach() + model(other).detach();
  }
};

TEST_P(SharedArguments, OneTensorTwiceIsRefused) {
  const auto twice = [] {
    const at::Tensor data = rows(4, 8, 1);
    return std::pair(data, data);
  };
  expect_refusal(write_first, twice, {"step argument 0", "shares with argument 1", "clone()"});
}

TEST_P(SharedArguments, RowsInCommonAreRefused) {
  const auto windows = [] {
    const at::Tensor all = rows(6, 8, 1);
    return std::pair(all.narrow(0, 2, 4), all.narrow(0, 0, 4));
  };
  expect_refusal(write_first, windows, {"step argument 0", "shares with argument 1"});
}

TEST_P(SharedArguments, AnExpandedOneIsRefused) {
  const auto expanded = [] { return std::pair(rows(1, 8, 1).expand({4, 8}), rows(4, 8, 2)); };
  expect_refusal(write_first, expanded, {"step argument 0", "strides [0, 1]", "clone()"});
}

TEST_P(SharedArguments, ATensorThatTheBodyUsesBesidesIsRefused) {
  at::Tensor seen;
  const auto body = [&seen](DistributedModel<tests::SmallNet>& model, at::Tensor data, at::Tensor other) {
    data.add_(1);
    return model(data + seen).detach() + other.sum();
  };
  run_smp_ranks(1, {.microbatches = 1}, [&] {
    DistributedModel<tests::SmallNet> model(make_net());
    auto step = smp::step([&](at::Tensor data, at::Tensor other) { return body(model, data, other); });
    for (int s = 0; s < 2; ++s) {
      seen = rows(4, 8, 1);
      const std::string text = support::message_of<c10::ValueError>([&] { step(seen, rows(4, 8, 2)); });
      EXPECT_TRUE(support::contains(text, "step argument 0") && support::contains(text, "sizes [4, 8]")) << text;
      step(seen.clone(), rows(4, 8, 2));
    }
  });
}

TEST_P(SharedArguments, ColumnsOfOneTensorGo) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    DistributedModel<tests::SmallNet> model(net);
    auto step = smp::step([&](at::Tensor data, at::Tensor other) { return write_first(model, data, other); });
    const at::Tensor all = rows(4, 16, 1);
    const at::Tensor want = twin->forward(all.narrow(1, 0, 8) + 1) + twin->forward(all.narrow(1, 8, 8).contiguous());
    support::expect_close(step(all.narrow(1, 0, 8), all.narrow(1, 8, 8)).concat(), want, 1e-6, "columns");
  });
}

TEST_P(SharedArguments, ABufferThatTheBodyWritesIsRefused) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    struct Net : torch::nn::Module {
      at::Tensor forward(const at::Tensor& x) {
        const at::NoGradGuard no_grad;
        table.add_(1);
        return layer(x) + table.sum();
      }
      torch::nn::Linear layer = register_module("layer", torch::nn::Linear(8, 8));
      at::Tensor table = register_buffer("table", torch::ones({4, 8}));
    };
    const auto net = std::make_shared<Net>();
    DistributedModel<Net> model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    const std::string text = support::message_of<c10::ValueError>([&] { step(net->table.view({8, 4}).t()); });
    EXPECT_TRUE(support::contains(text, "step argument 0") && support::contains(text, "'table', which the body writes to"))
        << text;
    expect_bit_equal(net->table, torch::ones({4, 8}), "the buffer");
  });
}

TEST_P(SharedArguments, ABufferThatTheBodyReadsIsRefused) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    struct Net : torch::nn::Module {
      at::Tensor forward(const at::Tensor& x) { return layer(x + table.sum()); }
      torch::nn::Linear layer = register_module("layer", torch::nn::Linear(8, 8));
      at::Tensor table = register_buffer("table", torch::ones({4, 8}));
    };
    const auto net = std::make_shared<Net>();
    DistributedModel<Net> model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data.add_(1)).detach(); });
    const std::string text = support::message_of<c10::ValueError>([&] { step(net->table); });
    EXPECT_TRUE(support::contains(text, "step argument 0") && support::contains(text, "'table'")) << text;
    step(rows(4, 8, 1));
    expect_bit_equal(model.state_dict().at("table"), torch::ones({4, 8}), "the buffer");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedArguments, testing::Values(1, 2));

TEST(StepResults, AreTheUsersOwn) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    const auto net = make_net();
    DistributedModel<tests::SmallNet> model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor output = model(data);
      return std::make_tuple(output, output.view({-1}), output, data);
    });
    const at::Tensor batch = rows(4, 8, 1);
    auto [output, flat, again, data] = step(batch);
    const at::Tensor before = output[0].clone();
    flat[0].zero_();
    again[0].zero_();
    data[0].zero_();
    expect_bit_equal(output[0], before, "a result after writing to the others");
    expect_bit_equal(batch, rows(4, 8, 1), "the argument");
  });
}

}  // namespace
}  // namespace smp
