// Recordings alone: which of a signature comes first, which of them are one, and which is forgotten.
#include "runtime/capture/recordings.h"

#include <gtest/gtest.h>

#include <string>

#include "partitioner/graph/graph_io.h"
#include "tests/support/graph_builder.h"

namespace smp::runtime {
namespace {

using smp::testing::GraphBuilder;
using RecordingPtr = std::shared_ptr<Recording>;
constexpr int64_t kMany = 100;

/// As the recorder closes one: of a body with `num_operators`, under the signature `key`.
RecordingPtr recording_of_relus(int num_operators, const std::string& key = "key") {
  GraphBuilder g;
  partitioner::ValueId x = g.input({4});
  for (int n = 0; n < num_operators; ++n) x = g.relu(x);
  auto recording = std::make_shared<Recording>();
  recording->graph = g.build(x);
  recording->graph.key = key;
  recording->hash = partitioner::hash(recording->graph);
  return recording;
}

Recordings::Bucket bucket_of(const Recordings& recordings, const std::string& key) {
  const Recordings::Bucket* bucket = recordings.find(key);
  return bucket == nullptr ? Recordings::Bucket() : *bucket;
}

TEST(Recordings, FindNothingOfANewSignature) {
  Recordings recordings(kMany);
  EXPECT_EQ(recordings.find("key"), nullptr);
  recordings.add(recording_of_relus(1, "key"));
  EXPECT_NE(recordings.find("key"), nullptr);
  EXPECT_EQ(recordings.find("other"), nullptr);
}

TEST(Recordings, TheOneAddedLastComesFirst) {
  Recordings recordings(kMany);
  const RecordingPtr one = recording_of_relus(1), two = recording_of_relus(2), three = recording_of_relus(3);
  for (const RecordingPtr& each : {one, two, three}) EXPECT_EQ(recordings.add(each), each);
  EXPECT_EQ(bucket_of(recordings, "key"), (Recordings::Bucket{three, two, one}));
}

TEST(Recordings, TheOneMovedToTheFrontLeavesTheOthersInTheirOrder) {
  Recordings recordings(kMany);
  const RecordingPtr one = recording_of_relus(1), two = recording_of_relus(2), three = recording_of_relus(3);
  for (const RecordingPtr& each : {one, two, three}) recordings.add(each);
  recordings.move_to_front(one);
  EXPECT_EQ(bucket_of(recordings, "key"), (Recordings::Bucket{one, three, two}));
  recordings.move_to_front(one);
  EXPECT_EQ(bucket_of(recordings, "key"), (Recordings::Bucket{one, three, two}));
}

TEST(Recordings, EqualOnesAreOneThatComesFirst) {
  Recordings recordings(kMany);
  const RecordingPtr one = recording_of_relus(1), two = recording_of_relus(2);
  recordings.add(one);
  recordings.add(two);
  EXPECT_EQ(recordings.add(recording_of_relus(1)), one);
  EXPECT_EQ(bucket_of(recordings, "key"), (Recordings::Bucket{one, two}));
  EXPECT_GT(one->last_use, two->last_use) << "it counts as used";
}

TEST(Recordings, OfOneHashAndDifferentGraphsAreTwo) {
  Recordings recordings(kMany);
  const RecordingPtr one = recording_of_relus(1), two = recording_of_relus(2);
  two->hash = one->hash;
  recordings.add(one);
  EXPECT_EQ(recordings.add(two), two);
  EXPECT_EQ(bucket_of(recordings, "key").size(), 2U);
}

TEST(Recordings, OfTwoSignaturesAreTwo) {
  Recordings recordings(kMany);
  const RecordingPtr one = recording_of_relus(1, "one"), other = recording_of_relus(1, "other");
  other->hash = one->hash;
  recordings.add(one);
  EXPECT_EQ(recordings.add(other), other);
  EXPECT_EQ(bucket_of(recordings, "one"), Recordings::Bucket{one});
  EXPECT_EQ(bucket_of(recordings, "other"), Recordings::Bucket{other});
}

TEST(Recordings, TheOneUsedLongestAgoIsForgottenWhateverItsSignature) {
  Recordings recordings(3);
  const RecordingPtr old = recording_of_relus(1, "a"), used = recording_of_relus(2, "a"), third = recording_of_relus(3, "b");
  for (const RecordingPtr& each : {old, used, third}) recordings.add(each);
  recordings.note_use(*old);
  recordings.note_use(*used);
  const RecordingPtr fourth = recording_of_relus(4, "a");
  recordings.add(fourth);
  EXPECT_EQ(recordings.find("b"), nullptr) << "none is left of that signature";
  EXPECT_EQ(bucket_of(recordings, "a"), (Recordings::Bucket{fourth, used, old}));
  recordings.add(recording_of_relus(5, "b"));
  EXPECT_EQ(bucket_of(recordings, "a"), (Recordings::Bucket{fourth, used}));
}

TEST(Recordings, MovingOneToTheFrontIsNoUseOfIt) {
  Recordings recordings(2);
  const RecordingPtr one = recording_of_relus(1), two = recording_of_relus(2), three = recording_of_relus(3);
  recordings.add(one);
  recordings.add(two);
  recordings.move_to_front(one);
  recordings.add(three);
  EXPECT_EQ(bucket_of(recordings, "key"), (Recordings::Bucket{three, two}));
}

TEST(Recordings, WhereOneIsKeptItIsTheNewest) {
  Recordings recordings(1);
  recordings.add(recording_of_relus(1, "a"));
  const RecordingPtr newest = recording_of_relus(2, "b");
  recordings.add(newest);
  EXPECT_EQ(recordings.find("a"), nullptr);
  EXPECT_EQ(bucket_of(recordings, "b"), Recordings::Bucket{newest});
}

}  // namespace
}  // namespace smp::runtime
