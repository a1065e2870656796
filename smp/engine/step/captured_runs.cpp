// Comparison of captured bodies.
#include "smp/engine/step/captured_runs.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include "partitioner/graph/graph_io.h"
#include "runtime/stage/gradient_sum.h"

namespace smp::engine {

using namespace partitioner;
using runtime::CapturedBody;
using runtime::ValueRead;

void add_own_constants(const runtime::Recording& recording, const Program& program, runtime::MicrobatchProgram& microbatch) {
  for (const runtime::ConstantTensor& constant : recording.constants) {
    const auto& sent = microbatch.constants;
    const bool overridden =
        std::any_of(sent.begin(), sent.end(), [&](const auto& other) { return other.value == constant.value; });
    const at::Tensor& known = program.constants.at(constant.value);
    const at::Tensor& own = constant.content;
    if (overridden || own.is_same(known) || runtime::same_content(own, known)) continue;
    microbatch.constants.push_back({constant.value, own});
  }
}

void check_same_returns(const std::vector<CapturedBody>& bodies) {
  const size_t count = bodies.front().recording->graph.returned.size();
  for (size_t m = 0; m < bodies.size(); ++m) {
    const size_t other = bodies[m].recording->graph.returned.size();
    TORCH_CHECK_VALUE(
        other == count, "step: expected the body to return the same number of tensors for every microbatch, got ", count,
        " for microbatch 0 and ", other, " for ", m, ". Return a tensor of zeros where there is nothing to return.");
  }
}

void check_dense_gradients(const runtime::Recording& recording,
                           const std::function<bool(const std::string& parameter)>& is_shared) {
  for (size_t n = 0; recording.graph.has_backward() && n < recording.graph.nodes.size(); ++n) {
    const Node& node = recording.graph.nodes[n];
    const c10::FunctionSchema& schema = recording.calls[n].op.schema();
    auto flag = schema.argumentIndexWithName("sparse");             // embedding, embedding_bag
    if (!flag) flag = schema.argumentIndexWithName("sparse_grad");  // gather
    if (!flag || !node.grad_enabled || !same_argument(node.arguments[static_cast<size_t>(*flag)], true)) continue;
    const Value& table = recording.graph.values[static_cast<size_t>(node_inputs(node).front())];
    TORCH_CHECK_NOT_IMPLEMENTED(
        !table.spec.requires_grad || !is_shared(table.name), "step: expected dense gradients, which ranks can add up, got ",
        node.op, " with a sparse one for '", table.name,
        "', which several ranks train. Make it without sparse=true (EmbeddingOptions::sparse(false)).");
  }
}

std::string hook_on_parts(const std::vector<std::shared_ptr<Program>>& programs, const runtime::Bindings& bindings) {
  for (const runtime::NamedTensor& named : bindings.tensors()) {
    if (named.kind != ValueKind::kParameter || !runtime::has_gradient_hooks(named.tensor)) continue;
    std::set<int> ranks;
    for (const auto& program : programs) {
      const auto found = program->trained_on.find(named.name);
      if (found != program->trained_on.end()) ranks.insert(found->second.begin(), found->second.end());
    }
    if (ranks.size() < 2) continue;
    return "step: expected no gradient hook on '" + named.name + "', got one, and " + std::to_string(ranks.size()) +
           " ranks that make parts of its gradient, which it would be given one by one. Set Config::exact_tied_weights to "
           "true, its default: one rank makes the whole gradient then.";
  }
  return {};
}

bool same_run(const CapturedBody& a, const CapturedBody& b) {
  const auto same_scalar = [](const auto& x, const auto& y) {
    return x.node == y.node && x.argument == y.argument && same_argument(x.value, y.value);
  };
  const auto same_constant = [](const auto& x, const auto& y) {
    return x.value == y.value && runtime::same_content(x.tensor, y.tensor);
  };
  return a.recording == b.recording &&
         std::equal(a.scalars.begin(), a.scalars.end(), b.scalars.begin(), b.scalars.end(), same_scalar) &&
         std::equal(a.constants.begin(), a.constants.end(), b.constants.begin(), b.constants.end(), same_constant);
}

bool has_random(const runtime::Recording& recording) {
  for (size_t n = 0; n < recording.calls.size(); ++n) {
    if (runtime::draws(*recording.calls[n].info, recording.graph.nodes[n])) return true;
  }
  return false;
}

CapturedBody so_far(const ValueRead& read, CapturedBody assumed) {
  std::erase_if(assumed.scalars, [&](const auto& scalar) { return scalar.node >= read.num_nodes; });
  std::erase_if(assumed.constants, [&](const auto& constant) {
    return std::none_of(read.constants.begin(), read.constants.end(),
                        [&](const auto& used) { return used.value == constant.value; });
  });
  return assumed;
}

}  // namespace smp::engine
