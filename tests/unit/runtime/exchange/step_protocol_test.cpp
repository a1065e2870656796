// Messages of a step: every field arrives as it left, alike microbatches take a byte, and what cannot be is refused.
#include "runtime/exchange/step_protocol.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

#include "tests/support/bits.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

using partitioner::Argument;
using support::contains;

std::string refusal_of_message(const std::string& bytes) {
  return support::message_of<std::runtime_error>([&] { decode_step_message(bytes); });
}

void expect_same(const std::vector<ConstantContent>& got, const std::vector<ConstantContent>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].value, want[i].value);
    support::expect_bit_equal(got[i].tensor, want[i].tensor, "constant");
    EXPECT_EQ(got[i].tensor.unsafeGetTensorImpl()->is_wrapped_number(),
              want[i].tensor.unsafeGetTensorImpl()->is_wrapped_number());
  }
}

void expect_same(const NewProgram& got, const NewProgram& want) {
  EXPECT_EQ(got.hash, want.hash);
  EXPECT_EQ(got.graph, want.graph);
  EXPECT_EQ(got.plan, want.plan);
  expect_same(got.constants, want.constants);
}

void expect_same(const MicrobatchProgram& got, const MicrobatchProgram& want) {
  EXPECT_EQ(got.hash, want.hash);
  ASSERT_EQ(got.scalars.size(), want.scalars.size());
  for (size_t i = 0; i < want.scalars.size(); ++i) {
    EXPECT_EQ(got.scalars[i].node, want.scalars[i].node);
    EXPECT_EQ(got.scalars[i].argument, want.scalars[i].argument);
    EXPECT_EQ(got.scalars[i].value, want.scalars[i].value);
  }
  expect_same(got.constants, want.constants);
}

void expect_same(const StepMessage& got, const StepMessage& want) {
  EXPECT_EQ(got.step_function, want.step_function);
  EXPECT_EQ(got.step, want.step);
  EXPECT_EQ(got.evaluation_step, want.evaluation_step);
  EXPECT_EQ(got.reduced, want.reduced);
  EXPECT_EQ(got.settings, want.settings);
  EXPECT_EQ(got.optimizers, want.optimizers);
  EXPECT_EQ(got.error, want.error);
  EXPECT_EQ(got.is_value_error, want.is_value_error);
  EXPECT_EQ(got.round, want.round);
  EXPECT_EQ(got.num_microbatches, want.num_microbatches);
  EXPECT_EQ(got.first, want.first);
  EXPECT_EQ(got.trains, want.trains);
  EXPECT_EQ(got.first_active_replica, want.first_active_replica);
  EXPECT_EQ(got.gradient_divisor, want.gradient_divisor);
  EXPECT_EQ(got.values, want.values);
  EXPECT_EQ(got.payload, want.payload);
  EXPECT_EQ(got.forgotten, want.forgotten);
  ASSERT_EQ(got.new_programs.size(), want.new_programs.size());
  for (size_t i = 0; i < want.new_programs.size(); ++i) expect_same(got.new_programs[i], want.new_programs[i]);
  ASSERT_EQ(got.microbatches.size(), want.microbatches.size());
  for (size_t m = 0; m < want.microbatches.size(); ++m) expect_same(got.microbatches[m], want.microbatches[m]);
}

at::Tensor wrapped_number(double number) {
  at::Tensor wrapped = at::scalar_tensor(number, at::kDouble);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  return wrapped;
}

const std::string kBytes("text with \0 and \xff", 17);

struct Field {
  const char* name;
  std::function<void(StepMessage&)> set;
};

/// Each field with a value that no default has, and that needs all of its bits.
const std::vector<Field>& fields() {
  static const std::vector<Field> all{
      {"step_function", [](StepMessage& m) { m.step_function = 0x1234567; }},
      {"step", [](StepMessage& m) { m.step = 0x123456789abcdef0; }},
      {"evaluation_step", [](StepMessage& m) { m.evaluation_step = 0x0fedcba987654321; }},
      {"reduced", [](StepMessage& m) { m.reduced = {Averaging::kKeeps, Averaging::kMakesNone}; }},
      {"settings",
       [](StepMessage& m) {
         m.settings = {{.prefix = kBytes,
                        .num_trainable = 0x123456789abcdef0,
                        .num_parameters = 0x0fedcba987654321,
                        .pattern = 0x87654321,
                        .has_hook = true,
                        .num_hooks = 0x1234567},
                       {}};
       }},
      {"optimizers", [](StepMessage& m) { m.optimizers = "SGD"; }},
      {"error", [](StepMessage& m) { m.error = "the loader is broken"; }},
      {"is_value_error", [](StepMessage& m) { m.is_value_error = true; }},
      {"round", [](StepMessage& m) { m.round = Round::kShadow; }},
      {"num_microbatches", [](StepMessage& m) { m.num_microbatches = std::numeric_limits<int32_t>::max(); }},
      {"first", [](StepMessage& m) { m.first = 3; }},
      {"trains", [](StepMessage& m) { m.trains = true; }},
      {"first_active_replica", [](StepMessage& m) { m.first_active_replica = 70000; }},
      {"gradient_divisor", [](StepMessage& m) { m.gradient_divisor = 70001; }},
      {"values", [](StepMessage& m) { m.values = {"", kBytes, "2"}; }},
      {"an empty payload", [](StepMessage& m) { m.payload = ""; }},
      {"payload", [](StepMessage& m) { m.payload = kBytes; }},
      {"forgotten", [](StepMessage& m) { m.forgotten = {5, std::numeric_limits<uint64_t>::max()}; }},
      {"new_programs",
       [](StepMessage& m) {
         m.new_programs = {{.hash = 7,
                            .graph = "graph",
                            .plan = kBytes,
                            .constants = {{3, at::arange(6).reshape({2, 3}).t()}, {4, wrapped_number(0.1)}}},
                           {.hash = 8, .graph = {}, .plan = "plan", .constants = {}}};
       }},
      {"microbatches",
       [](StepMessage& m) {
         m.microbatches = {{.hash = 7},
                           {.hash = 7},
                           {.hash = 8},
                           {.hash = 8, .scalars = {}, .constants = {{4, at::ones({2}, at::kBFloat16)}}},
                           {.hash = 8}};
       }},
      {"scalars",
       [](StepMessage& m) {
         m.microbatches = {
             {.hash = 9, .scalars = {{1, 2, true}, {1, 3, int64_t{-4}}, {2, 0, -0.0}, {2, 1, std::complex<double>(1, -2)}}}};
       }},
  };
  return all;
}

TEST(StepMessage, EachFieldArrivesAsItLeft) {
  const std::string usual = encode(StepMessage{});
  for (const Field& field : fields()) {
    SCOPED_TRACE(field.name);
    StepMessage sent;
    field.set(sent);
    EXPECT_NE(encode(sent), usual) << "it is not written";
    expect_same(decode_step_message(encode(sent)), sent);
  }
}

TEST(StepMessage, AllFieldsTogetherArriveAsTheyLeft) {
  StepMessage sent;
  for (const Field& field : fields()) field.set(sent);
  const std::string bytes = encode(sent);
  expect_same(decode_step_message(bytes), sent);
  EXPECT_EQ(encode(decode_step_message(bytes)), bytes);
}

TEST(StepMessage, EveryRoundArrives) {
  for (const Round round : {Round::kWhole, Round::kForward, Round::kProbe, Round::kFinish, Round::kShadow, Round::kJoined}) {
    EXPECT_EQ(decode_step_message(encode(StepMessage{.round = round})).round, round);
  }
}

TEST(StepMessage, NumbersKeepTheirBits) {
  for (const double number :
       {-0.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), 5e-324}) {
    StepMessage sent;
    sent.microbatches = {{.hash = 1, .scalars = {{0, 1, number}}}};
    const StepMessage came = decode_step_message(encode(sent));
    EXPECT_EQ(std::bit_cast<uint64_t>(std::get<double>(came.microbatches.at(0).scalars.at(0).value)),
              std::bit_cast<uint64_t>(number));
  }
}

TEST(StepMessage, AMicrobatchLikeTheOneBeforeItTakesAByte) {
  StepMessage one, many;
  one.microbatches.assign(1, {.hash = 7});
  many.microbatches.assign(100, {.hash = 7});
  EXPECT_EQ(encode(many).size(), encode(one).size() + 99);
  many.microbatches[50].hash = 8;
  EXPECT_EQ(decode_step_message(encode(many)).microbatches[50].hash, 8U);
  EXPECT_EQ(decode_step_message(encode(many)).microbatches[51].hash, 7U);
}

/// Puts a number where `before` and `after` first differ, which are messages that differ in one field.
template <class T>
std::string with_number(const StepMessage& before, const StepMessage& after, T number) {
  std::string bytes = encode(before);
  const std::string other = encode(after);
  size_t at = 0;
  while (at < bytes.size() && bytes[at] == other[at]) ++at;
  std::memcpy(bytes.data() + at, &number, sizeof number);
  return bytes;
}

TEST(StepMessage, NumbersOutOfRangeAreRefusedWithTheirRange) {
  const StepMessage usual;
  const auto refused = [&](const StepMessage& after, auto number) {
    return refusal_of_message(with_number(usual, after, number));
  };
  EXPECT_TRUE(contains(refused({.round = Round::kForward}, uint8_t{6}), "from 0 to 5")) << "one more than kJoined";
  EXPECT_TRUE(contains(refused({.num_microbatches = 1}, int32_t{-1}), "got -1"));
  EXPECT_TRUE(contains(refused({.first = 1}, int32_t{-2}), "got -2"));
  EXPECT_TRUE(contains(refused({.first_active_replica = 1}, int32_t{-3}), "got -3"));
  EXPECT_TRUE(contains(refused({.gradient_divisor = 2}, int32_t{0}), "a number from 1 to")) << "gradients would be infinite";
  EXPECT_TRUE(contains(refused({.trains = true}, uint8_t{2}), "from 0 to 1"));
  const StepMessage averages{.reduced = {Averaging::kAverages}}, keeps{.reduced = {Averaging::kKeeps}};
  EXPECT_TRUE(contains(refusal_of_message(with_number(averages, keeps, uint8_t{3})), "from 0 to 2"));
}

TEST(StepMessage, ValuesAndNodesThatNoGraphHasAreRefused) {
  StepMessage of_node, of_argument, of_value;
  of_node.microbatches = {{.hash = 1, .scalars = {{-1, 0, true}}}};
  of_argument.microbatches = {{.hash = 1, .scalars = {{0, -1, true}}}};
  of_value.microbatches = {{.hash = 1, .scalars = {}, .constants = {{-1, at::ones({1})}}}};
  for (const StepMessage& message : {of_node, of_argument, of_value}) {
    EXPECT_TRUE(contains(refusal_of_message(encode(message)), "a number from 0 to")) << refusal_of_message(encode(message));
  }
}

TEST(StepMessage, OtherBytesAreNoMessage) {
  std::string bytes = encode(StepMessage{});
  ++bytes[0];  // as another version of the protocol would begin
  EXPECT_EQ(refusal_of_message(bytes), "step message: expected one, got other bytes");
  EXPECT_TRUE(contains(refusal_of_message(""), "step message: expected 4 more bytes at byte 0, got 0 bytes that are left"));
  EXPECT_TRUE(contains(refusal_of_message(encode(StepMessage{}) + "x"), "expected the end"));
}

}  // namespace
}  // namespace smp::runtime
