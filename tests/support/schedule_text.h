// Schedules as text, for expectations and failures.
#pragma once

#include <string>

#include "partitioner/schedule/schedule.h"

namespace smp::support {

/// kCompute: without transfers, and a backward with its weight gradients as one "B0" where nothing stands between them.
enum class TableContent { kCompute, kComputeAndTransfers };

/// One line per rank, "stage s | F0 B0"; where a rank has several stages or none, "rank r | 0F0 2F0".
std::string to_table(const partitioner::Schedule& schedule, TableContent content = TableContent::kCompute);

}  // namespace smp::support
