// Which random operators can be cut, and how.
#include "runtime/delayed/draw.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/uniform.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "runtime/capture/operator_info.h"

namespace smp::runtime {
namespace {

enum class Distribution { kUniform, kNormal };

// With a single tensor argument at most, which is the result or has its geometry.
const std::unordered_map<std::string_view, Distribution> kCut = {
    {"aten::uniform_", Distribution::kUniform},  {"aten::rand", Distribution::kUniform},
    {"aten::rand_like", Distribution::kUniform}, {"aten::normal_", Distribution::kNormal},
    {"aten::randn", Distribution::kNormal},      {"aten::randn_like", Distribution::kNormal},
};
const std::unordered_set<std::string_view> kByGeometry = {
    "aten::uniform_",    "aten::normal_", "aten::random_",   "aten::exponential_", "aten::geometric_",
    "aten::log_normal_", "aten::cauchy_", "aten::rand_like", "aten::randn_like",   "aten::randint_like",
};

bool is_contiguous(const partitioner::TensorSpec& spec) {
  int64_t expected = 1;
  for (size_t d = spec.sizes.size(); d-- > 0;) {
    if (spec.sizes[d] != 1 && spec.strides[d] != expected) return false;
    expected *= spec.sizes[d];
  }
  return true;
}

}  // namespace

bool draws_by_geometry(const c10::OperatorHandle& op, bool has_tensors) {
  const OperatorInfo& info = operator_info(op);
  if (!has_tensors) return true;
  return kByGeometry.contains(info.name) || (info.name == "aten::bernoulli_" && info.overload == "float");
}

bool draw_in_parts(const c10::OperatorHandle& op, const partitioner::TensorSpec& result, at::Generator generator,
                   int64_t elements) {
  const auto found = kCut.find(operator_info(op).name);
  const bool is_cut_type = result.dtype == at::kFloat || result.dtype == at::kDouble || result.dtype == at::kHalf ||
                           result.dtype == at::kBFloat16;
  if (found == kCut.end() || !is_cut_type) return false;
  int64_t left = 1;
  for (int64_t size : result.sizes) left *= size;
  const bool is_normal = found->second == Distribution::kNormal;
  // A normal tensor is filled in groups of 16, and a last incomplete group draws anew; below 16,
  // and where elements are not adjacent, one by one, in pairs.
  if (is_normal && !is_contiguous(result)) return false;
  const at::Tensor scratch =
      at::empty({std::min(left, 2 * elements)}, at::TensorOptions(result.dtype).device(generator.device()));
  while (left > 0) {
    const int64_t part = left > 2 * elements ? elements : left;
    at::Tensor drawn = scratch.narrow(0, 0, part);
    is_normal ? drawn.normal_(0, 1, generator) : drawn.uniform_(0, 1, generator);
    left -= part;
  }
  return true;
}

}  // namespace smp::runtime
