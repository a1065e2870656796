// Work of one recorded operator, forward and backward, in machine-independent units.
#pragma once

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// What a machine has to do; device_model.h turns it into microseconds.
struct Work {
  double flops = 0;            // floating-point operations of products, a multiply-add counted as two
  double bytes = 0;            // read and written
  double transcendentals = 0;  // exp, log, tanh, … evaluated
  double randoms = 0;          // random numbers drawn
  double kernels = 0;          // dispatched leaf operators
  bool operator==(const Work&) const = default;
};

struct OperatorCost {
  Work forward;
  Work backward;  // all zero unless an output requires a gradient
};

/// Cost of `node` for one microbatch. `trains` is false for evaluation: no backward then.
///
/// A product costs its forward work again for each factor that needs a gradient; a bias only sums
/// the output's gradient. The gradient of a parameter is also added to the accumulated one.
OperatorCost operator_cost(const Graph& graph, const Node& node, bool trains);

/// The part of a node's backward, in 0 to 1, that makes gradients of parameters, for which nothing waits but the optimizer.
double parameter_share_of_backward(const Graph& graph, const Node& node);

/// Whether autograd records a backward for `node`.
bool has_backward(const Graph& graph, const Node& node);

}  // namespace smp::partitioner
