// What capture needs to know about an operator, read once from its schema, its tags and the table of traits.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::runtime {

/// How capture treats a call.
enum class OperatorClass : uint8_t {
  kRecorded,
  kAnsweredByIdentity,  // aten::equal
  kGeometryQuery,       // runs on the ghosts, is not recorded: result_type, size, …
  kReadsValue,          // item, is_nonzero, allclose, …: needs data
  kDataDependentShape,  // nonzero, masked_select, …
  kReplacesData,        // set_data, Storage arguments
  kRunsBackward,        // autograd from within the body
};

struct OperatorInfo {
  explicit OperatorInfo(const c10::OperatorHandle& op);

  std::string name, overload;
  OperatorClass kind = OperatorClass::kRecorded;
  bool is_random = false;
  bool makes_uninitialised = false;        // empty and its kin: data must be written before it is read
  bool reads_only_geometry = false;        // views, *_like, new_*: may touch uninitialised memory
  bool scalars_set_geometry = false;       // arange, range: a Scalar argument decides the size
  bool zero_returns_argument = false;      // dropout: for a Scalar of zero the result is the argument itself
  bool may_copy_to_host = false;           // the forms of to() that cpu() and printing call
  bool changes_geometry_in_place = false;  // t_, squeeze_, resize_, …
  int num_arguments = 0;
  std::vector<bool> argument_written;    // by position: schema write alias, or hidden mutation by table
  std::vector<bool> write_is_hidden;     // autograd does not notice it: what it has saved stays as it is
  std::vector<bool> argument_is_scalar;  // Scalar or float: may change from step to step without a new graph
  std::vector<bool> argument_is_device;
  int shape_argument = -1;  // one_hot: position of the number that, unless negative, decides the shape instead of the data
  int training_argument = -1;  // dropout, RNNs, norms: position of the flag without which nothing random or hidden happens
  std::vector<int> returned_argument;  // by return: position of the argument it is ((a!)), or -1
};

/// Cached per operator, thread-safe; the reference stays valid.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

/// Whether the recorded call of this operator draws random numbers: not a dropout that rests.
bool draws(const OperatorInfo& info, const partitioner::Node& node);

/// Whether the recorded call writes to this argument: not a norm to its statistics in evaluation.
bool writes(const OperatorInfo& info, const partitioner::Node& node, size_t argument);

}  // namespace smp::runtime
