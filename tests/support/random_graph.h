// Seeded random models for the oracle: few elements, many of the structures that splitting can get wrong.
#pragma once

#include <cstdint>
#include <functional>

#include "tests/support/model_zoo.h"

namespace smp::support {

struct RandomGraphOptions {
  int operations = 24;  // steps of the program; one step is one to three operators
  bool with_dropout = true;
  bool with_writes = true;         // relu_, add_, mul_, also through views
  bool with_tied_weights = false;  // linear layers used a second time
  bool with_more_losses = false;   // a loss, and so a backward, for each output that depends on a parameter
  std::function<at::Tensor(const at::Tensor&)> tanh{};  // called in the place of at::tanh, if given
};

/// A model of random structure, decided by `graph_seed` alone: linears, norms, elementwise operators, transposes, reshapes,
/// chunks, selects, expands, writes in place, values used at several places, up to four outputs. Takes one float32 tensor
/// [batch, 8]. `make(seed)` decides the weights.
ZooModel random_graph(uint64_t graph_seed, RandomGraphOptions options = {});

}  // namespace smp::support
