// CUDA graphs of LibTorch, and where random operators draw within Philox's sequence.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/device/device.h"
#include "runtime/device/graph.h"

namespace smp::runtime {

/// A stream of random numbers is a seed, and each operator has a range of its offsets. An operator takes 4 for every 4
/// numbers that each of its threads draws: 2^18 are enough for 7e10 numbers on 264,000 threads, and leave 16,384 operators
/// to a graph, which counts them in 32 bits.
constexpr uint64_t philox_offset(uint64_t ordinal) { return ordinal << 18; }

struct PhiloxPlace {
  uint64_t seed = 0, offset = 0;
};
/// Of the `ordinal`-th random operator of a stream. A range of offsets is too small for what is drawn by element, and would
/// run into those of the operators behind it: that has a seed of its own (by the multiplier
/// of SplitMix64).
constexpr PhiloxPlace philox_place(uint64_t stream, uint64_t ordinal, Draws draws) {
  if (draws == Draws::kByElement) return {.seed = stream ^ (~ordinal * 0x9e3779b97f4a7c15ULL)};
  return {.seed = stream, .offset = philox_offset(ordinal)};
}

std::unique_ptr<DeviceGraph> make_cuda_graph(const DeviceGraph* before);

}  // namespace smp::runtime
