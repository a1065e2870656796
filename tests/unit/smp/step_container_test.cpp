// Step arguments that hold tensors: what is cut, in which order, and what stays whole.
#include <gtest/gtest.h>

#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

/// Runs `body` on `argument` in four microbatches; compares its [2, 8] results with `expected` [8, 8].
template <class Argument, class Body>
void expect_cut(Argument& argument, const Body& body, const at::Tensor& expected) {
  run_smp_ranks(1, {.microbatches = 4}, [&] {
    DistributedModel<SmallNet> model(make_net());
    auto step = smp::step(body);
    const at::NoGradGuard no_grad;
    for (int s = 0; s < 2; ++s) {
      const StepOutput output = step(argument);
      ASSERT_EQ(output.size(), 4);
      for (int m = 0; m < 4; ++m) expect_bit_equal(output[m], expected.narrow(0, 2 * m, 2).clone(), "microbatch");
    }
  });
}

const at::Tensor& left() {
  static const at::Tensor tensor = rows(8, 8, 1);
  return tensor;
}
const at::Tensor& right() {
  static const at::Tensor tensor = rows(8, 8, 2);
  return tensor;
}
at::Tensor difference() { return left() - right(); }

TEST(StepContainer, AVectorIsCutIntoVectors) {
  std::vector<at::Tensor> batch = {left(), right()};
  expect_cut(batch, [](std::vector<at::Tensor>& b) { return b[0] - b[1]; }, difference());
  expect_cut(batch, [](const std::vector<at::Tensor>& b) { return b[0] - b[1]; }, difference());
  expect_cut(batch, [](std::vector<at::Tensor> b) { return b[0] - b[1]; }, difference());
  EXPECT_TRUE(batch[0].is_same(left()));
}

TEST(StepContainer, AConstVectorIsCut) {
  const std::vector<at::Tensor> batch = {left(), right()};
  expect_cut(batch, [](const std::vector<at::Tensor>& b) { return b[0] - b[1]; }, difference());
}

TEST(StepContainer, APairIsCut) {
  auto batch = std::make_pair(left(), right());
  expect_cut(batch, [](const auto& b) { return b.first - b.second; }, difference());
}

TEST(StepContainer, ATupleKeepsWhatIsNoTensor) {
  auto batch = std::make_tuple(left(), 3, right());
  expect_cut(batch, [](const auto& b) { return (std::get<0>(b) - std::get<2>(b)) * std::get<1>(b); }, difference() * 3);
}

TEST(StepContainer, AnOptionalIsCutWhereItHasAValue) {
  std::optional<at::Tensor> batch = left();
  expect_cut(batch, [](const std::optional<at::Tensor>& b) { return *b * 2; }, left() * 2);
}

TEST(StepContainer, AnExampleIsCut) {
  torch::data::Example<> batch(left(), right());
  expect_cut(batch, [](const torch::data::Example<>& b) { return b.data - b.target; }, difference());
  torch::data::TensorExample unlabelled(left());
  expect_cut(unlabelled, [](const torch::data::TensorExample& b) { return b.data * 2; }, left() * 2);
}

TEST(StepContainer, NestedContainersAreCut) {
  std::map<std::string, std::vector<std::array<at::Tensor, 1>>> batch = {{"b", {{right()}}}, {"a", {{left()}}}};
  expect_cut(batch, [](auto& b) { return b["a"][0][0] - b["b"][0][0]; }, difference());
}

TEST(StepContainer, TensorsBesideAContainerKeepTheirPlaces) {
  run_smp_ranks(1, {.microbatches = 4}, [] {
    DistributedModel<SmallNet> model(make_net());
    auto step = smp::step([](at::Tensor x, const std::vector<at::Tensor>& b, at::Tensor y, double scale) {
      return (x * b[0] - b[1] * y) * scale;
    });
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> batch = {left(), right()};
    const at::Tensor y = rows(8, 8, 3);
    expect_bit_equal(step(right(), batch, y, 2.0).concat(), (right() * left() - right() * y) * 2, "all");
  });
}

TEST(StepContainer, AnIndivisibleTensorInsideIsRefused) {
  run_smp_ranks(1, {.microbatches = 4}, [] {
    DistributedModel<SmallNet> model(make_net());
    auto step = smp::step([](const std::vector<at::Tensor>& b) { return b[0]; });
    EXPECT_THROW(step(std::vector<at::Tensor>{rows(8, 8, 1), rows(7, 8, 1)}), c10::ValueError);
  });
}

// What cannot be cut does not compile; what holds no tensors reaches the body as it is.
using step_internal::holds_tensors;
static_assert(holds_tensors<std::unordered_map<std::string, at::Tensor>>);
static_assert(holds_tensors<std::shared_ptr<std::vector<at::Tensor>>>);
static_assert(holds_tensors<c10::List<at::Tensor>>);
static_assert(holds_tensors<at::ArrayRef<at::Tensor>>);
static_assert(!holds_tensors<std::vector<int>>);
static_assert(!holds_tensors<std::function<at::Tensor(at::Tensor)>>);
static_assert(!holds_tensors<std::shared_ptr<SmallNet>>);
static_assert(!holds_tensors<torch::nn::Linear>);
static_assert(!holds_tensors<DistributedModel<SmallNet>>);

}  // namespace
}  // namespace smp
