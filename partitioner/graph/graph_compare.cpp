// Equality of graphs by bits.
#include <algorithm>
#include <bit>

#include "partitioner/graph/graph_io.h"

namespace smp::partitioner {
namespace {

bool same(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

bool same(const std::complex<double>& a, const std::complex<double>& b) {
  return same(a.real(), b.real()) && same(a.imag(), b.imag());
}

bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) { return same(x, y); });
}

bool same(const ScalarList& a, const ScalarList& b) {
  return std::equal(a.elements.begin(), a.elements.end(), b.elements.begin(), b.elements.end(),
                    [](const auto& x, const auto& y) {
                      const double* left = std::get_if<double>(&x);
                      const double* right = std::get_if<double>(&y);
                      return left != nullptr && right != nullptr ? same(*left, *right) : x == y;
                    });
}

template <typename T>
bool same(const T& a, const T& b) {
  return a == b;
}

bool same_node(const Node& a, const Node& b) {
  return a.op == b.op && a.overload == b.overload && a.outputs == b.outputs && a.written_storages == b.written_storages &&
         a.grad_enabled == b.grad_enabled && a.autocast == b.autocast && a.random_ordinal == b.random_ordinal &&
         a.recompute_region == b.recompute_region && a.module == b.module &&
         std::equal(a.arguments.begin(), a.arguments.end(), b.arguments.begin(), b.arguments.end(), same_argument);
}

}  // namespace

bool same_argument(const Argument& a, const Argument& b) {
  if (a.index() != b.index()) return false;
  return std::visit([&b](const auto& left) { return same(left, std::get<std::decay_t<decltype(left)>>(b)); }, a);
}

bool same_graph(const Graph& a, const Graph& b) {
  return a.values == b.values && a.inputs == b.inputs && a.returned == b.returned && a.read == b.read &&
         a.backward_roots == b.backward_roots && a.key == b.key &&
         std::equal(a.nodes.begin(), a.nodes.end(), b.nodes.begin(), b.nodes.end(), same_node);
}

}  // namespace smp::partitioner
