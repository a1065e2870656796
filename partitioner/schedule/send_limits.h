// Which tables end when sends wait for their receivers.
#pragma once

#include "partitioner/schedule/schedule.h"

namespace smp::partitioner {

/// True when no rank waits for ever, although each send waits until its receiver has come to all but send_limit() - 1 of the
/// messages before it. Expects a table that passes check(), of microbatches of one program.
bool may_limit_sends(const Schedule& schedule);

}  // namespace smp::partitioner
