// What of the optimizers must be the same on all ranks: how often each has stepped, and its
// options.
#pragma once

#include <string>

#include "runtime/transport/transport.h"

namespace smp::engine {

struct RankState;

/// Of all DistributedOptimizers that are alive, in lines. Options are known of LibTorch's
/// elementwise optimizers.
std::string describe_optimizers(const RankState& rank);

/// Why ranks that describe their optimizers differently cannot go on: the first difference.
std::string differing_optimizers(const std::string& caller, const std::string& optimizers,
                                 const std::string& rank, const std::string& other_optimizers,
                                 const std::string& other_rank);

/// Throws c10::ValueError on all ranks alike where they describe their optimizers differently; those with "" have nothing to
/// compare. Collective over `ranks`, each of which is called `kind` and its number.
void check_same_optimizers(runtime::Transport& ranks, const std::string& own, const std::string& kind, const char* caller);

}  // namespace smp::engine
