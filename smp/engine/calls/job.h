// The start of a job on this rank, below smp::init: what tests begin with, whose ranks are threads.
#pragma once

#include <memory>

#include "smp/engine/context/context.h"
#include "smp/engine/context/versions.h"

namespace smp::engine {

/// Checks the software of the ranks and their configurations, against each other and the world, then forms the groups.
/// Collective. Throws c10::ValueError on every rank.
std::shared_ptr<Context> make_context(const Config& resolved, const runtime::Launch& launch,
                                      std::shared_ptr<runtime::Transport> world, const std::string& software = versions());

}  // namespace smp::engine
