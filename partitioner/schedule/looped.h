// The order of work where ranks are visited round after round. Internal to the schedule room.
#pragma once

#include <vector>

#include "partitioner/plan/action.h"
#include "partitioner/schedule/microbatch_graphs.h"

namespace smp::partitioner {

/// Whether all microbatches run one program whose stage s lies on rank s % num_ranks, `visits` times around two ranks or
/// more, and come in full groups of as many as there are ranks. A smaller group in the columns below would wait for itself.
bool is_looped(const MicrobatchGraphs& graphs, int visits);

/// By rank, the computations of interleaved 1F1B as in Megatron-LM (Narayanan et al., SC 2021): as many microbatches as
/// there are ranks go through the first visit of a rank, then through its second, and so on; their backwards the other way
/// round. Rank r begins with 2 (ranks - 1 - r) + (visits - 1) ranks forwards, then forwards and backwards take turns.
///
/// The lists are those of a chain, without the backwards that the graph does not have. Whatever
/// else a stage reads comes from stages that a chain has behind it too, so these lists never wait
/// for each other in a circle where those of a chain do not.
std::vector<std::vector<Action>> looped_columns(const MicrobatchGraphs& graphs, int visits);

}  // namespace smp::partitioner
