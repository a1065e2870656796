// What of the optimizers must be the same on all ranks: how often each has stepped, and its options.
#pragma once

#include <string>

#include "runtime/transport/transport.h"

namespace smp::engine {

struct RankState;

/// Of all DistributedOptimizers that are alive, in lines. Options are those that their views know.
std::string describe_optimizers(const RankState& rank);

/// Why ranks that describe their optimizers differently cannot go on: the first difference.
std::string differing_optimizers(const std::string& caller, const std::string& optimizers, const std::string& rank,
                                 const std::string& other_optimizers, const std::string& other_rank);

/// Throws c10::ValueError on all ranks alike where they describe their optimizers differently; those with "" have nothing to
/// compare. Collective over `ranks`, each of which is called `kind` and its number.
void check_same_optimizers(runtime::Transport& ranks, const std::string& own, const std::string& kind, const char* caller);
/// The same of what `rank` has, in the world or its pipeline.
void check_optimizers(const RankState& rank, runtime::Transport& ranks, const char* caller);
/// All ranks hold the same updates again. On all of them alike.
void forget_optimizer_steps(const RankState& rank);

/// The shortest text that reads back as the same number.
std::string exact_text(double value);

}  // namespace smp::engine
