// The global gradient norm, the same expression on every rank.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <map>

#include "runtime/exchange/wire.h"
#include "smp/engine/context/call.h"
#include "smp/engine/engine.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {
namespace {

// Norms of the gradients this rank owns: (position in the model, norm), a tied weight by its first owner only.
std::string own_norms(const RankState& own, const runtime::Bindings& model, double norm_type) {
  runtime::WireWriter out;
  const auto& tensors = model.tensors();
  const int me = own.context.pipeline->rank();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& named = tensors[i];
    const bool mine = named.kind == partitioner::ValueKind::kParameter && own.models.home(named.tensor).owner() == me;
    if (!mine || !named.tensor.grad().defined()) continue;
    out.put<uint64_t>(i);
    const at::Tensor& gradient = named.tensor.grad();
    out.put(at::linalg_vector_norm(gradient.is_sparse() ? gradient.coalesce().values() : gradient, norm_type));
  }
  return out.take();
}

}  // namespace

double clip_grad_norm(Model& model, double max_norm, double norm_type) {
  TORCH_CHECK_VALUE(max_norm > 0, "clip_grad_norm_: expected max_norm > 0, got ", max_norm,
                    ". Pass the largest norm to allow; infinity only measures.");
  refuse_in_body("clip_grad_norm_");
  const at::NoGradGuard no_grad;
  const RankState& own = rank_state("clip_grad_norm_");
  std::map<uint64_t, at::Tensor> by_position;
  const std::vector<std::string> all = in_call(own.context, "clip_grad_norm_", runtime::GroupKind::kPipeline, [&] {
    return own.context.pipeline->all_gather(own_norms(own, model.own, norm_type));
  });
  for (const std::string& bytes : all) {
    runtime::read_all(bytes, "norms of gradients", [&](runtime::WireReader& in) {
      while (!in.at_end()) {
        const auto position = in.get<uint64_t>();
        by_position[position] = in.get_tensor();
      }
    });
  }
  if (by_position.empty()) return 0.0;
  c10::ScalarType widest = by_position.begin()->second.scalar_type();
  for (const auto& [position, norm] : by_position) widest = c10::promoteTypes(widest, norm.scalar_type());
  std::vector<at::Tensor> norms;
  for (const auto& [position, norm] : by_position) norms.push_back(norm.to(widest));
  const at::Tensor total = norms.size() == 1 ? norms[0] : at::linalg_vector_norm(at::stack(norms), norm_type);
  const at::Tensor coefficient = (max_norm / (total + 1e-6)).clamp_max(1.0);
  const bool only_measures = std::isinf(max_norm);
  for (const auto& named : model.own.tensors()) {
    at::Tensor gradient = named.tensor.grad();
    const bool is_mine = named.kind == partitioner::ValueKind::kParameter && own.models.is_here(named.tensor);
    if (is_mine && gradient.defined() && !only_measures) gradient.mul_(coefficient.to(gradient.scalar_type()));
  }
  const auto norm = total.item<double>();
  if (!std::isfinite(norm)) model.nonfinite.known = {.place = NonfinitePlace::kGradientNorm};
  return norm;
}

}  // namespace smp::engine
