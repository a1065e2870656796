// Decoders of what comes from other ranks, users and files: objects, records, states, configurations.
#pragma once

#include <tuple>
#include <vector>

#include "smp/comm.h"
#include "tests/support/decoder.h"

namespace smp::support {

/// An object of any depth.
struct Tree {
  int number = 0;
  std::vector<Tree> children;
};

std::vector<Decoder> library_decoders();

}  // namespace smp::support

template <>
struct smp::Fields<smp::support::Tree> {
  static auto of(auto& tree) { return std::tie(tree.number, tree.children); }
};
