// What a captured body says about the run of its microbatch: compared with other runs, and made part of a message.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/capture/bindings.h"
#include "runtime/capture/recording.h"
#include "runtime/exchange/step_protocol.h"
#include "smp/engine/models/program.h"

namespace smp::engine {

/// Step functions with one graph share its program; where this one has other constants, they travel.
void add_own_constants(const runtime::Recording& recording, const Program& program, runtime::MicrobatchProgram& microbatch);

/// A step returns one tensor per microbatch and position. Throws c10::ValueError where bodies return other numbers of them.
void check_same_returns(const std::vector<runtime::CapturedBody>& bodies);

/// Throws c10::NotImplementedError where a parameter would get a sparse gradient that several ranks have to add up.
void check_dense_gradients(const runtime::Recording& recording,
                           const std::function<bool(const std::string& parameter)>& is_shared);

/// What to say of a hook on a parameter whose gradient several ranks make in parts, each of which the hook would be given;
/// empty: there is none.
std::string hook_on_parts(const std::vector<std::shared_ptr<Program>>& programs, const runtime::Bindings& bindings);

/// Whether two bodies run the same program on the same scalars and constants.
bool same_run(const runtime::CapturedBody& a, const runtime::CapturedBody& b);

/// What `assumed` says beyond a run so far does not matter yet.
runtime::CapturedBody so_far(const runtime::ValueRead& read, runtime::CapturedBody assumed);

/// Whether some operator draws random numbers.
bool has_random(const runtime::Recording& recording);

}  // namespace smp::engine
