// Drawing in parts moves a generator as far as drawing whole: for every operator and type that is cut, over sizes around the
// groups of 16 in which LibTorch fills normal tensors and around the size of a part.
#include "runtime/delayed/draw.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/capture/ghosts.h"

namespace smp::runtime {
namespace {

constexpr int64_t kPart = 32;

at::Tensor state_after(const std::function<void(at::Generator)>& draw, bool has_cached_normal) {
  at::Generator generator = at::detail::createCPUGenerator(42);
  if (has_cached_normal) at::empty({3}).normal_(0, 1, generator);  // one by one in pairs: keeps a half
  draw(generator);
  return generator.get_state();
}

const std::vector<int64_t> kSizes = {0,  1,  2,  15, 16, 17, 31, 32,  33,  47,  48,  63,  64,
                                     65, 79, 80, 81, 95, 96, 97, 111, 127, 128, 129, 160, 1000};
const at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void expect_same_state(const char* op, const at::Tensor& result, const std::function<void(at::Generator)>& whole) {
  for (const bool cached : {false, true}) {
    bool is_cut = false;
    const at::Tensor got = state_after(
        [&](at::Generator generator) { is_cut = draw_in_parts(find(op), spec_of(result), generator, kPart); }, cached);
    EXPECT_TRUE(is_cut);
    EXPECT_TRUE(got.equal(state_after(whole, cached)))
        << op << " " << result.dtype() << " " << result.sizes() << (cached ? " after half a pair" : "");
  }
}

TEST(DrawInParts, LeavesTheGeneratorWhereTheWholeUniformDrawDoes) {
  for (const auto dtype : kTypes) {
    for (const int64_t size : kSizes) {
      const at::Tensor result = at::empty({size}, dtype);
      expect_same_state("aten::uniform_", result, [&](at::Generator g) { at::empty({size}, dtype).uniform_(-3, 5, g); });
      expect_same_state("aten::rand", result, [&](at::Generator g) { torch::rand({size}, g, dtype); });
    }
    const at::Tensor apart = at::empty({9, 40}, dtype).t();
    expect_same_state("aten::uniform_", apart, [&](at::Generator g) { at::empty({9, 40}, dtype).t().uniform_(-3, 5, g); });
  }
}

TEST(DrawInParts, LeavesTheGeneratorWhereTheWholeNormalDrawDoes) {
  for (const auto dtype : kTypes) {
    for (const int64_t size : kSizes) {
      const at::Tensor result = at::empty({size}, dtype);
      expect_same_state("aten::normal_", result, [&](at::Generator g) { at::empty({size}, dtype).normal_(1, 2, g); });
      expect_same_state("aten::randn", result, [&](at::Generator g) { torch::randn({size}, g, dtype); });
    }
  }
}

TEST(DrawInParts, DrawsNothingWhereTheOperatorCannotBeCut) {
  const std::pair<const char*, at::Tensor> cases[] = {
      {"aten::normal_", at::empty({40, 9}).t()},  // drawn one by one, not in groups
      {"aten::normal_", at::empty({40}, at::kComplexFloat)},
      {"aten::random_", at::empty({40}, at::kLong)},
      {"aten::exponential_", at::empty({40})},
      {"aten::randperm", at::empty({40}, at::kLong)},
  };
  for (const auto& [op, result] : cases) {
    bool is_cut = true;
    const at::Tensor before = state_after([](at::Generator) {}, false);
    const at::Tensor after =
        state_after([&](at::Generator g) { is_cut = draw_in_parts(find(op), spec_of(result), g, kPart); }, false);
    EXPECT_FALSE(is_cut) << op;
    EXPECT_TRUE(before.equal(after)) << op;
  }
}

}  // namespace
}  // namespace smp::runtime
