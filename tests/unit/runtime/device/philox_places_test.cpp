// Where random operators draw on a GPU: no two of them the same numbers.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "runtime/device/cuda/cuda_graph.h"
#include "runtime/device/random.h"

namespace smp::runtime {
namespace {

constexpr uint64_t kStream = 0x5eed, kOperators = 16384;

TEST(PhiloxPlaces, OfOperatorsOfOneStreamLieBehindEachOther) {
  constexpr uint64_t kMost = uint64_t{1} << 18;  // offsets of an operator
  uint64_t free = 0;
  for (uint64_t ordinal = 0; ordinal < kOperators; ++ordinal) {
    const PhiloxPlace place = philox_place(kStream, ordinal, Draws::kByThread);
    ASSERT_EQ(place.seed, kStream);
    ASSERT_GE(place.offset, free) << ordinal;
    ASSERT_EQ(place.offset % 4, 0) << "LibTorch takes no others";
    free = place.offset + kMost;
  }
  EXPECT_LE(free - 1, std::numeric_limits<uint32_t>::max()) << "in which a graph counts";
}

TEST(PhiloxPlaces, OfWhatIsDrawnByElementHaveSeedsOfTheirOwn) {
  std::set<uint64_t> seeds;
  size_t num_seeds = 0;
  for (uint64_t microbatch = 0; microbatch < 64; ++microbatch) {
    const uint64_t stream = random_stream({.base_seed = 1, .step = 2, .microbatch = microbatch});
    seeds.insert(stream), ++num_seeds;  // of all others
    for (uint64_t ordinal = 0; ordinal < 64; ++ordinal, ++num_seeds)
      seeds.insert(philox_place(stream, ordinal, Draws::kByElement).seed);
  }
  EXPECT_EQ(seeds.size(), num_seeds);
}

TEST(PhiloxPlaces, AreByElementWhereAnAttentionDropsOut) {
  const auto attention = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_scaled_dot_product_flash_attention", "");
  const auto draws = [&](double dropout) {
    const at::Tensor none;
    return draws_of(attention, {none, none, none, dropout, false, false, c10::IValue()});
  };
  EXPECT_EQ(draws(0.1), Draws::kByElement);
  EXPECT_EQ(draws(0), Draws::kByThread);
  const auto bernoulli = c10::Dispatcher::singleton().findSchemaOrThrow("aten::bernoulli_", "float");
  EXPECT_EQ(draws_of(bernoulli, {at::Tensor(), 0.5, c10::IValue()}), Draws::kByThread);
}

}  // namespace
}  // namespace smp::runtime
