// Values that the leader computes by itself while a body runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/recording.h"
#include "runtime/stage/stage.h"

namespace smp::engine {

/// Runs `nodes` of the read's graph on copies of whatever they write to, and returns the values that the body wants.
/// `inputs`: the microbatch; `bindings`: parameters and buffers, whose data have to be here.
std::vector<at::Tensor> compute_locally(const runtime::ValueRead& read, const std::vector<partitioner::NodeId>& nodes,
                                        const std::vector<at::Tensor>& inputs, const runtime::Bindings& bindings,
                                        const runtime::RandomState& random);

}  // namespace smp::engine
