// What counts of the times of one thing that was run again and again, some of them interrupted by other work.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace smp::runtime {

/// Of `count` times in ascending order those that count: [first, end), without the quarter (rounded down) at either end.
std::pair<size_t, size_t> middle_half(size_t count);

/// Relative standard deviation of times in the order in which they were taken; 0 for fewer than two.
///
/// Of what lies between neighbours, so that a machine that grows slower or faster all the time has none (von Neumann, Annals
/// of Mathematical Statistics 1941), and of the smaller half of that, as normal numbers have it: one interruption of a long
/// microbatch would else make its graph look many times as unsteady as others, and lose every comparison with them.
double jitter_of(const std::vector<double>& times);

}  // namespace smp::runtime
