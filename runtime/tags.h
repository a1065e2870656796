// The tags of messages between ranks of a group, in one place, so that none is used twice.
#pragma once

namespace smp::runtime {

enum Tag : int {
  kStepTag = 1,          // the leader's message at the start of a step
  kResultTag = 2,        // returned tensors at its end
  kStateTag = 3,         // state_dict
  kObjectTag = 4,          // objects that a program sends; over the world
  kObjectReceivedTag = 5,  // and the answer that they have arrived
  kValueTag = 6,           // what step bodies return beside tensors
  kReadTag = 7,            // values that the leader's body reads
  kLayoutTag = 10,       // which ranks form pipelines, in the first step
  kTiedTag = 8,          // copies of parameters that several ranks read
  kTiedGradientTag = 9,  // and their gradients
  kFirstStageTag = 64,   // from here: activations and gradients, by pair of stages
  kFirstBucketTag = 1 << 29,  // from here, between replicas: gradients and their sums, two for each model
};

}  // namespace smp::runtime
