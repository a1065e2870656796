// Placement of the language model by hand, for --partition manual.
#pragma once

#include "examples/transformer_lm/model.h"

namespace transformer_lm {

/// The embedding goes to the first stage, the decoder to the last, the encoder layers evenly over
/// all. Before the first step.
void place_by_hand(const TransformerLm& net, int num_stages);

}  // namespace transformer_lm
