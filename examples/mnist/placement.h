// Placement of the network by hand, for --partition manual.
#pragma once

#include "examples/mnist/model.h"

namespace mnist {

/// The four layers that have parameters, in their order, evenly over the stages; more than four
/// stages leave some empty. Before the first step.
void place_by_hand(const ConvNet& net, int num_stages);

}  // namespace mnist
