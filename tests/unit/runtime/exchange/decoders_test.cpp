// What comes from other ranks is decoded without being believed: messages of the runtime, graphs, plans and costs.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstring>

#include "runtime/exchange/state_exchange.h"
#include "runtime/exchange/step_protocol.h"
#include "runtime/exchange/wire.h"
#include "tests/support/damage.h"
#include "tests/support/messages.h"
#include "tests/support/runtime_decoders.h"

namespace smp::runtime {
namespace {

using support::boundaries;
using support::contains;
using support::Decoder;
using support::encoded;
using support::expect_survives_damage;
using support::offers;
using support::step_messages;
using support::tensors;

template <class T>
void overwrite(std::string& message, size_t at, T number) {
  ASSERT_LE(at + sizeof number, message.size());
  std::memcpy(message.data() + at, &number, sizeof number);
}

TEST(WireTensor, EveryGeometryArrivesAsItWas) {
  const at::Tensor numbers = at::arange(24, at::kFloat).reshape({2, 3, 4});
  const std::vector<int64_t> many_dimensions(300, 1);
  for (const at::Tensor& sent : {numbers, numbers.transpose(0, 2), numbers.select(1, 1), at::empty({0, 3}),
                                 at::scalar_tensor(2.0), at::ones(many_dimensions), numbers.to(at::kComplexFloat)}) {
    const at::Tensor came = read_tensor(encoded(sent), "test");
    EXPECT_EQ(came.scalar_type(), sent.scalar_type());
    EXPECT_EQ(came.strides(), sent.clone().strides());
    EXPECT_TRUE(came.equal(sent));
  }
}

// Allocated by strides and filled by elements, such a tensor would be written 4 MiB behind its end.
TEST(WireTensor, StridesOfZeroAreRefused) {
  std::string bytes = encoded(at::ones({1024, 1024}));
  constexpr size_t kStrides[] = {6 + 8, 6 + 24};  // behind type, wrapped number and dimensions, each behind its size
  for (const size_t at : kStrides) overwrite<int64_t>(bytes, at, 0);
  const std::string text = support::refusal_of(tensors(), bytes);
  EXPECT_TRUE(contains(text, "strides of a dense tensor of sizes [1024, 1024]") && contains(text, "got [0, 0]")) << text;
}

// As far from the first element to the last as that of a dense one, but several elements lie in one place.
TEST(WireTensor, StridesThatOverlapAreRefused) {
  std::string bytes = encoded(at::ones({3, 3}));
  overwrite<int64_t>(bytes, 6 + 8, 4);
  overwrite<int64_t>(bytes, 6 + 24, 0);
  EXPECT_TRUE(contains(support::refusal_of(tensors(), bytes), "strides of a dense tensor"));
}

TEST(WireTensor, OtherLiesAreNamedWithTheirByte) {
  const std::string good = encoded(at::ones({2, 3}));
  const auto refused = [&](size_t at, auto number) {
    std::string bad = good;
    overwrite(bad, at, number);
    return support::refusal_of(tensors(), bad);
  };
  EXPECT_TRUE(contains(refused(0, int8_t{99}), "expected a number from 0 to")) << refused(0, int8_t{99});
  EXPECT_TRUE(contains(refused(0, static_cast<int8_t>(at::kQInt8)), "the type of a dense tensor at byte 0, got 12"));
  EXPECT_TRUE(contains(refused(1, uint8_t{3}), "from 0 to 2 at byte 1, got 3"));
  EXPECT_TRUE(contains(refused(1, uint8_t{1}), "a wrapped number without dimensions"));
  EXPECT_TRUE(contains(refused(2, uint32_t{3000}), "3000 items of at least 16 bytes at byte 6, got 64 bytes that are left"));
  EXPECT_TRUE(contains(refused(6, int64_t{-2}), "at byte 6, got -2"));
  EXPECT_TRUE(contains(refused(6, int64_t{1} << 62), "got 24 bytes"));
  EXPECT_TRUE(contains(refused(14, int64_t{-3}), "at byte 14, got -3"));
  EXPECT_TRUE(contains(refused(14, int64_t{1}), "strides of a dense tensor"));
  EXPECT_TRUE(contains(refused(38, uint64_t{1} << 40), "more bytes at byte 46, got 24 bytes"));
  std::string no_bool = encoded(at::ones({1}, at::kBool));
  no_bool.back() = 2;
  EXPECT_TRUE(contains(support::refusal_of(tensors(), no_bool), "bytes of 0 and 1 as bools"));
}

TEST(WireTensor, WhatTheReaderRefusesIsNotWritten) {
  EXPECT_THROW(encoded(at::ones({2}).to_sparse()), c10::ValueError);
  EXPECT_THROW(encoded(at::empty({2}, at::TensorOptions(at::kMeta))), c10::ValueError);
}

// One such count in a message of 87 bytes asked for gigabytes.
TEST(StepMessages, CountsThatTheBytesCannotHoldAreRefused) {
  const std::string good = encode(StepMessage{});
  const Decoder decoder = step_messages();
  int refused = 0;
  for (size_t at = 0; at + 4 <= good.size(); ++at) {
    for (const uint32_t count : {0xFFFFFFFFu, 0x7FFFFFFFu, 0x10000000u, 1000u}) {
      std::string bad = good;
      overwrite(bad, at, count);
      refused += support::refusal_of(decoder, bad).empty() ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 100);
}

// A repetition is one byte, and constants may be large.
TEST(StepMessages, OnlyPlainMicrobatchesAreRepeated) {
  StepMessage message;
  message.microbatches = {{.hash = 7, .scalars = {}, .constants = {{4, at::ones({8})}}}, {.hash = 8}};
  std::string bytes = encode(message);
  constexpr size_t kOfSecond = sizeof(bool) + sizeof(uint64_t) + 2 * sizeof(uint32_t);
  bytes.replace(bytes.size() - kOfSecond, kOfSecond, 1, '\1');
  EXPECT_TRUE(contains(support::refusal_of(step_messages(), bytes), "microbatch 1 as such"));
}

TEST(Boundary, StridesBehindTheMessageAreRefused) {
  const Decoder decoder = boundaries();
  std::string bytes = decoder.corpus.front();
  const int64_t strides[] = {3, 1};
  const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(strides), sizeof strides));
  overwrite<int64_t>(bytes, at, 1 << 20);
  EXPECT_TRUE(contains(support::refusal_of(decoder, bytes), "do not fit its sizes and strides"));
}

TEST(Offers, OfPartsOfTensorsAreRefused) {
  std::string bytes = StateExchange::encode({{"w", at::ones({3})}}, "");
  overwrite<int32_t>(bytes, bytes.size() - sizeof(uint64_t) - sizeof(int32_t), 2);  // before the hash
  const std::string text = support::refusal_of(offers(), bytes);
  EXPECT_TRUE(contains(text, "expected whole tensors, got part 0 of 2 of 'w'")) << text;
}

TEST(Decoders, SurviveDamage) {
  for (const Decoder& decoder : support::runtime_decoders()) expect_survives_damage(decoder);
}

}  // namespace
}  // namespace smp::runtime
