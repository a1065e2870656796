// Ranks of a whole smp job as threads of one test process.
#pragma once

#include <functional>

#include "smp/config.h"

namespace smp::tests {

/// Runs fn() on `num_ranks` threads; inside, smp::rank() and the rest of the API are those of that rank, as after
/// smp::init(config). Where the program has chosen a GPU, all compute there. The first exception ends the other ranks and is
/// rethrown.
void run_smp_ranks(int num_ranks, const Config& config, const std::function<void()>& fn);

}  // namespace smp::tests
