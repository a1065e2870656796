// Work of one recorded operator, forward and backward, in machine-independent units.
#pragma once

#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// What a machine has to do; device_model.h turns it into microseconds.
struct Work {
  double flops = 0;            // floating-point operations of products, a multiply-add counted as two
  double half_flops = 0;       // those of products of 16-bit numbers, which are not among `flops`
  double bytes = 0;            // read and written
  double transcendentals = 0;  // exp, log, tanh, … evaluated
  double randoms = 0;          // random numbers drawn
  double kernels = 0;          // dispatched leaf operators
  bool operator==(const Work&) const = default;
};

struct OperatorCost {
  Work forward;
  Work backward;  // all zero unless an output requires a gradient
  bool operator==(const OperatorCost&) const = default;
};

/// Cost of `node` for one microbatch. `trains` is false for evaluation: no backward then.
///
/// A product costs its forward work again for each factor that needs a gradient; a bias only sums
/// the output's gradient. The gradient of a parameter is also added to the accumulated one. Under autocast to 16 bits
/// a product casts its wider operands, and their gradients back.
OperatorCost operator_cost(const Graph& graph, const Node& node, bool trains);

/// The part of a node's backward, in 0 to 1, that makes gradients of parameters, for which nothing waits but the optimizer.
double parameter_share_of_backward(const Graph& graph, const Node& node);

/// An input of which autocast makes a copy of other precision, anew for each use.
struct Cast {
  ValueId input;
  int64_t bytes;  // of the copy
};
/// Inputs of 32 bits of a product whose result has 16, and inputs of 16 bits of a norm or loss whose result has 32.
std::vector<Cast> casts(const Graph& graph, const Node& node);

/// Whether autograd records a backward for `node`.
bool has_backward(const Graph& graph, const Node& node);

}  // namespace smp::partitioner
