// What makes a schedule, beside its stage graphs: a part of every plan, so that whoever has the plan makes the same table.
#pragma once

#include <cstdint>

namespace smp::partitioner {

enum class ScheduleKind : uint8_t {
  kSimple,       // fill-drain: a rank's backwards start when its forwards are done (GPipe, NeurIPS 2019)
  kInterleaved,  // SageMaker's word for backward first; 1F1B (PipeDream, SOSP 2019) on a chain
};
inline constexpr ScheduleKind kLastScheduleKind = ScheduleKind::kInterleaved;

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kInterleaved;
  /// Interleaved only: microbatches that the first stage may hold. 0: the number of ranks (1F1B on a chain).
  int active_microbatches = 0;
  /// Visits of each rank. Above 1, interleaved and with active_microbatches 0: where stage s lies on rank s % num_ranks in
  /// that many rounds, and num_ranks divides the number of microbatches, Megatron's interleaved 1F1B (looped.h).
  int virtual_stages = 1;
  bool operator==(const ScheduleOptions&) const = default;
};

}  // namespace smp::partitioner
