// Brings the values that step bodies return to every rank of the pipeline. Owns no state.
#pragma once

#include <vector>

#include "runtime/executor/executor.h"
#include "runtime/transport/transport.h"
#include "smp/step_output.h"

namespace smp::engine {

/// One StepOutput per returned tensor. Every rank knows from the graphs who holds what, so each owner sends one message
/// to each other rank. Collective over the pipeline.
std::vector<StepOutput> exchange_results(const std::vector<runtime::MicrobatchRun>& runs, runtime::RankResults results,
                                         runtime::Transport& pipeline);

}  // namespace smp::engine
