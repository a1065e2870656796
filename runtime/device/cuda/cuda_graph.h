// CUDA graphs of LibTorch, and where random operators draw within Philox's sequence.
#pragma once

#include <memory>

#include "runtime/device/graph.h"

namespace smp::runtime {

/// A stream of random numbers is a seed, and each operator has a range of its offsets. An operator takes 4 for every 4
/// numbers that each of its threads draws: 2^18 are enough for 7e10 numbers on 264,000 threads, and leave 16,384 operators
/// to a graph, which counts them in 32 bits.
constexpr uint64_t philox_offset(uint64_t ordinal) { return ordinal << 18; }

std::unique_ptr<DeviceGraph> make_cuda_graph(const DeviceGraph* before);

}  // namespace smp::runtime
