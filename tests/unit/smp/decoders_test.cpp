// What comes from other ranks and from files is decoded without being believed: objects, records, states and configurations.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "partitioner/graph/graph.h"
#include "smp/comm.h"
#include "smp/config.h"
#include "smp/engine/checkpoint/optimizer_state.h"
#include "smp/engine/checkpoint/spread_save.h"
#include "smp/engine/planning/measure_costs.h"
#include "smp/engine/replicas/replica_step.h"
#include "smp/engine/timeline/step_timeline.h"
#include "smp/safetensors.h"
#include "tests/support/damage.h"
#include "tests/support/messages.h"
#include "tests/support/plan_cases.h"
#include "tests/unit/examples/temporary_folder.h"

namespace smp {
namespace {

using support::contains;
using support::Decoder;
using support::expect_survives_damage;
using support::message_of;

enum class Colour : uint8_t { kRed, kBlue };

struct Tree {
  int number = 0;
  std::vector<Tree> children;
};

struct Everything {
  at::Tensor tensor;
  std::map<std::string, std::vector<std::optional<at::Tensor>>> by_name;
  std::tuple<bool, Colour, double> facts;
  std::pair<std::array<int16_t, 3>, std::string> pair;
  std::vector<bool> flags;
  Tree tree;
};

struct Nothing {};

}  // namespace

template <>
struct Fields<Tree> {
  static auto of(auto& tree) { return std::tie(tree.number, tree.children); }
};
template <>
struct Fields<Everything> {
  static auto of(auto& all) { return std::tie(all.tensor, all.by_name, all.facts, all.pair, all.flags, all.tree); }
};
template <>
struct Fields<Nothing> {
  static auto of(auto&) { return std::tie(); }
};

namespace {

using comm_internal::bytes_of;
using comm_internal::object_of;

Decoder objects() {
  const at::Tensor numbers = at::arange(6, at::kFloat).reshape({2, 3});
  const Everything all{numbers.t(),
                       {{"a", {numbers, std::nullopt, at::Tensor()}}, {"b", {}}},
                       {true, Colour::kBlue, 0.5},
                       {{1, 2, 3}, "text"},
                       {true, false},
                       {1, {{2, {{3, {}}, {4, {}}}}, {5, {}}}}};
  return {"object", {bytes_of(all), bytes_of(Everything{})}, [](std::string_view bytes) {
            object_of<Everything>(std::string(bytes));
          }};
}

Tree tree_of_depth(int depth) {
  Tree tree;
  for (; depth > 0; --depth) tree = Tree{depth, {std::move(tree)}};
  return tree;
}

TEST(Objects, CountsThatTheBytesCannotHoldAreRefused) {
  std::string bytes = bytes_of(std::vector<std::string>{"a"});
  bytes[5] = 1;
  const std::string text = message_of<c10::ValueError>([&] { object_of<std::vector<std::string>>(bytes); });
  EXPECT_TRUE(contains(text, "at most 9 elements of a container") && contains(text, "got 1099511627777")) << text;
}

// Without a byte for each, a message of 8 bytes would keep the reader busy for ever.
TEST(Objects, ElementsThatWriteNothingAreRefusedOnBothSides) {
  EXPECT_TRUE(contains(message_of<c10::ValueError>([] { bytes_of(std::vector<Nothing>(2)); }),
                       "a byte or a tensor at least of each of 2"));
  EXPECT_TRUE(contains(message_of<c10::ValueError>([] { object_of<std::vector<Nothing>>(std::string(8, '\xFF')); }),
                       "at most 0 elements"));
  EXPECT_EQ(object_of<std::vector<Nothing>>(bytes_of(std::vector<Nothing>())).size(), 0);
}

TEST(Objects, DeepTreesAreRefusedOnBothSides) {
  const Tree tree = object_of<Tree>(bytes_of(tree_of_depth(300)));
  EXPECT_EQ(tree.children.front().number, 2);
  EXPECT_TRUE(contains(message_of<c10::ValueError>([] { bytes_of(tree_of_depth(2000)); }), "at most 1000 levels"));
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += std::string("\0\0\0\0\1\0\0\0\0\0\0\0", 12);
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { object_of<Tree>(deep); }), "at most 1000 levels"));
}

TEST(Objects, ABoolIsZeroOrOne) {
  EXPECT_TRUE(contains(message_of<c10::ValueError>([] { object_of<bool>("\2"); }), "expected 0 or 1 as a bool, got 2"));
}

Decoder files() {
  const auto folder = std::make_shared<TemporaryFolder>();
  const at::Tensor numbers = at::arange(6, at::kFloat);
  write_safetensors(folder->path("a"),
                    {.tensors = {{"ab", numbers.reshape({2, 3})}, {"c", at::ones({}, at::kLong)}, {"d", at::ones({0, 4})}},
                     .metadata = {{"key", "value"}}});
  write_safetensors(folder->path("b"), {});
  return {"safetensors", {folder->read("a"), folder->read("b")}, [folder](std::string_view bytes) {
            folder->write("c", std::string(bytes));
            read_safetensors(folder->path("c"));
          }};
}

Decoder configurations() {
  return {"configuration",
          {Config{}.to_json(), R"({"microbatches": 4, "pipeline": "simple", "rank_speed": [1, 0.5]})"},
          [](std::string_view text) { Config::from_json(text); }};
}

Decoder groups() {
  OptimizerState state{
      .kind = "Adam", .groups = {{{{"lr", 0.1}, {"eps", 1e-8}}, {"fc.weight", "fc.bias"}}, {}}, .entries = {}};
  return {"groups", {engine::groups_to_json(state)}, [](std::string_view text) {
            OptimizerState read;
            engine::groups_from_json(std::string(text), read);
          }};
}

Decoder timelines() {
  using partitioner::Activity;
  const partitioner::RankTimeline rank{
      1,
      2,
      {{7,
        true,
        10,
        90,
        {{Activity::kAction, {partitioner::ActionKind::kForward, 1, 2, -1}, 10, 20}, {Activity::kResults, {}, 20, 90}}},
       {}}};
  EXPECT_EQ(engine::decode_timeline(engine::encode(rank)), rank);
  return {"timeline", {engine::encode(rank), engine::encode(partitioner::RankTimeline{})}, [](std::string_view bytes) {
            engine::decode_timeline(bytes);
          }};
}

Decoder replica_steps() {
  engine::ReplicaStep step{
      .step_function = 2, .training_steps = 5, .trains = true, .reduced = "1", .error = "no", .homes = "fc 0\n"};
  return {"replica step", {engine::encode(step), engine::encode(engine::ReplicaStep{})}, [](std::string_view bytes) {
            engine::decode_replica_step(bytes);
          }};
}

Decoder measurements() {
  const std::vector<engine::GraphToPlan> graphs{{testing::mlp(1), {}}, {partitioner::Graph{}, {}}};
  return {"measurement",
          {engine::encode_wanted(graphs, {100, 200}), engine::encode_wanted({}, {})},
          [](std::string_view bytes) { engine::decode_wanted(bytes); }};
}

Decoder folder_views() {
  const engine::SeenSave whole{
      .id = "0123456789abcdef", .num_ranks = 3, .ranks = {0, 1, 2}, .written = 7, .is_indexed = true};
  runtime::WireWriter out, empty;
  engine::put_view({.has_save = true, .is_damaged = false, .saves = {whole, {.id = "fedcba9876543210"}}}, out);
  engine::put_view({}, empty);
  const std::string bytes = out.take();
  const auto read = [](std::string_view text) { return runtime::read_all(text, "view", engine::get_view); };
  EXPECT_TRUE(read(bytes).saves.front().is_complete());
  return {"view of a save's folder", {bytes, empty.take()}, read};
}

TEST(Decoders, OfTheLibrarySurviveDamage) {
  for (const Decoder& decoder :
       {objects(), files(), configurations(), groups(), timelines(), replica_steps(), measurements(), folder_views()}) {
    expect_survives_damage(decoder);
  }
}

TEST(Safetensors, SizesThatOverflowBesideAnEmptyDimensionAreRefused) {
  const TemporaryFolder folder;
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[0,4611686018427387904,4611686018427387904],"data_offsets":[0,0]}})";
  folder.write("a", std::string({static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0}) + header);
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { read_safetensors(folder.path("a")); }),
                       "as many bytes for 'a' as its shape has"));
}

TEST(Safetensors, AKeyThatComesTwiceWithinARowIsRefused) {
  const TemporaryFolder folder;
  const std::string header = R"({"a":{"dtype":"U8","shape":[2],"shape":[1],"data_offsets":[0,1]}})";
  folder.write("a", std::string({static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0}) + header + "x");
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { read_safetensors(folder.path("a")); }), "'shape' twice"));
}

}  // namespace
}  // namespace smp
