// What comes from other ranks and from files is decoded without being believed: objects, records, states and configurations.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "runtime/exchange/wire.h"
#include "smp/comm.h"
#include "smp/engine/checkpoint/spread_save.h"
#include "smp/engine/models/models.h"
#include "smp/engine/timeline/step_timeline.h"
#include "smp/engine/timeline/stragglers.h"
#include "smp/safetensors.h"
#include "tests/support/damage.h"
#include "tests/support/library_decoders.h"
#include "tests/support/messages.h"
#include "tests/unit/examples/temporary_folder.h"

namespace smp {
namespace {

using support::contains;
using support::Decoder;
using support::expect_survives_damage;
using support::message_of;
using support::Tree;

struct Nothing {};

}  // namespace

template <>
struct Fields<Nothing> {
  static auto of(auto&) { return std::tie(); }
};

namespace {

using comm_internal::bytes_of;
using comm_internal::object_of;

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

TEST(Decoders, OfTheLibraryReadWhatWasWritten) {
  using partitioner::Activity;
  const partitioner::RankTimeline timeline{1, 2, {{7, true, 10, 90, {{Activity::kResults, {}, 20, 90}}}, {}}};
  EXPECT_EQ(runtime::decode<partitioner::RankTimeline>(runtime::encode(timeline), "timeline"), timeline);
  const std::string number = runtime::encode(engine::NonfiniteNumber{
      .place = engine::NonfinitePlace::kLoss, .is_nan = true, .rank = 3, .microbatch = 5, .parameter = "fc.weight"});
  EXPECT_EQ(runtime::encode(runtime::decode<engine::NonfiniteNumber>(number, "number")), number);
  const engine::SeenSave save{.id = "0123456789abcdef", .num_ranks = 2, .ranks = {0, 1}, .written = 7, .is_indexed = true};
  runtime::WireWriter view;
  engine::put_view({.has_save = true, .is_damaged = false, .saves = {save}}, view);
  const std::string bytes = view.take();
  const engine::SeenSave read = runtime::read_all(bytes, "view", engine::get_view).saves.at(0);
  EXPECT_TRUE(read.id == save.id && read.ranks == save.ranks && read.written == 7 && read.is_indexed);
  engine::Pace sent{.period_ns = 3, .has_run = true, .process = "pid 7"};
  sent.sections[engine::Pace::kBetween] = {.ns = 5, .slowdown = 1.5};
  const engine::Pace pace = runtime::decode<engine::Pace>(runtime::encode(sent), "pace");
  EXPECT_TRUE(pace.period_ns == 3 && pace.has_run && pace.process == "pid 7");
  EXPECT_TRUE(pace.sections[engine::Pace::kBetween].ns == 5 && pace.sections[engine::Pace::kBetween].slowdown == 1.5);
}

TEST(Decoders, OfTheLibrarySurviveDamage) {
  for (const Decoder& decoder : support::library_decoders()) expect_survives_damage(decoder);
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
