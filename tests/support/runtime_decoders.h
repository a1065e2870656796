// Decoders of what comes from other ranks and from launchers: messages of the runtime, graphs, plans, costs, variables.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tests/support/decoder.h"

namespace smp::support {

/// As it travels.
std::string encoded(const at::Tensor& tensor);

Decoder tensors();
Decoder step_messages();
Decoder boundaries();
Decoder offers();

/// These and others.
std::vector<Decoder> runtime_decoders();

}  // namespace smp::support
