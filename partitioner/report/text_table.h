// How reports write numbers and columns. Internal to the report room.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace smp::partitioner {

/// "812.4 us", "8.12 ms", "1.50 s".
std::string time_text(double us);

/// "12.3 %" of 0.123.
std::string percent_text(double part);

/// A number with two decimals below 10 and one above, then the unit.
std::string with_unit(double number, const char* unit);

using Row = std::vector<std::string>;

/// Columns separated by " | ", aligned to the right except one; no column: pass a number that none has.
std::string aligned(const std::vector<Row>& rows, size_t left_aligned_column);

}  // namespace smp::partitioner
