// How far a misspelt name is from the right one.
#pragma once

#include <cstddef>
#include <string_view>

namespace smp::partitioner {

/// Edits that turn `a` into `b`: insert, delete, replace a letter, or swap two neighbours.
/// Optimal string alignment distance: Wagner and Fischer's table with Damerau's swap.
size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace smp::partitioner
