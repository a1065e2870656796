// Consecutive stages of one rank as a single one.
#pragma once

#include <memory>
#include <vector>

#include "runtime/stage/stage.h"

namespace smp::runtime {

/// `values`: of the whole; `links`: the stages of `segments`, in which the whole is cut.
std::unique_ptr<Stage> make_stage_chain(const partitioner::Segments& segments, StageValues values,
                                        std::vector<std::unique_ptr<Stage>> links);

}  // namespace smp::runtime
