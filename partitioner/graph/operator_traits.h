// What operators do that neither their schema nor their tags say: one table by name, read by capture, tapes and planner.
// Costs have a table of their own (cost/operator_table.cpp); what follows from arguments, as a norm in evaluation, is said
// where they are read (runtime/capture/operator_info.h).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace smp::partitioner {

/// Bits of a row.
enum class Trait : uint32_t {
  kReadsValue = 1 << 0,    // item, allclose: the result is a number, which needs data
  kAsksGeometry = 1 << 1,  // size, result_type: answered on ghosts, not recorded
  kReplacesData = 1 << 2,  // set_data: the tensor becomes another one
  kRunsBackward = 1 << 3,
  kShapeFromData = 1 << 4,           // nonzero: not all have LibTorch's tag
  kMakesUninitialised = 1 << 5,      // empty: data must be written before it is read
  kScalarSetsGeometry = 1 << 6,      // arange
  kZeroGivesArgument = 1 << 7,       // dropout: for p = 0 the result is the argument itself
  kChangesGeometryInPlace = 1 << 8,  // t_, resize_
  kWritesStatistics = 1 << 9,        // of arguments running_mean and running_var, which the schema calls read
  kLooksAtNumbers = 1 << 10,         // on the host, while it runs: a tape would repeat what it did for those
  kSavesNothing = 1 << 11,           // its backward needs sizes and dtypes alone
  kNeverThrows = 1 << 12,            // whatever the floating-point numbers
  kOnHandle = 1 << 13,               // changes or asks for what a handle says, never for values
  kOverwritesSelf = 1 << 14,         // all of it, and reads nothing of it
};

/// Whether the operator ("aten::add"), in this overload, has the trait. Unknown operators have none.
bool has(Trait trait, std::string_view op, std::string_view overload = "");

/// The rows: "aten::add", and "aten::narrow.Tensor" for one overload.
std::vector<std::string_view> operators_with_traits();

}  // namespace smp::partitioner
