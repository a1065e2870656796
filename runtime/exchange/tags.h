// The tags of messages between ranks of a group, in one place, so that none is used twice.
#pragma once

#include "runtime/transport/transport.h"

namespace smp::runtime {

enum Tag : int {
  kStepTag = 1,               // the leader's message at the start of a step
  kResultTag = 2,             // returned tensors at its end
  kStateTag = 3,              // state_dict
  kObjectTag = 4,             // objects that a program sends; over the world
  kCallTag = 5,               // which call a rank is in; over the world
  kReadTag = 7,               // values that the leader's body reads
  kTiedTag = 8,               // copies of parameters that several ranks read
  kTiedGradientTag = 9,       // and their gradients
  kLayoutTag = 10,            // which ranks form pipelines, in the first step
  kMeasureTag = 11,           // graphs whose operators are to be timed, and the times
  kTimelineTag = 12,          // what a rank has recorded; over the world
  kClockTag = 13,             // what time it is; over the world
  kSaveTag = 14,              // files of a save; over the world
  kFirstStageTag = 64,        // from here: activations and gradients, four for each pair of stages
  kFirstBucketTag = 5 << 20,  // from here, between replicas: gradients and their sums, two for each reducer
};

/// Stages of one plan, and reducers of the same replicas, whose messages have tags of their own.
constexpr int kMaxStages = (1 << 10) - 2;
constexpr int kMaxReducers = (kSumTag - kFirstBucketTag) / 2;
static_assert(kFirstStageTag + 4 * (kMaxStages + 2) * (kMaxStages + 2) <= kFirstBucketTag);

}  // namespace smp::runtime
