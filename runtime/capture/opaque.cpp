// Registration of the operator and its one kernel, which runs the function; on meta tensors, on zeros of their geometry.
#include "runtime/capture/opaque.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "runtime/capture/ghosts.h"
#include "runtime/device/random.h"

namespace smp::runtime {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, OpaqueFunction> functions;  // null: two under one name
};

Registry& registry() {
  static Registry own;
  return own;
}

OpaqueFunction find(const std::string& name) {
  Registry& own = registry();
  const std::lock_guard lock(own.mutex);
  const auto found = own.functions.find(name);
  TORCH_CHECK(found != own.functions.end(), "opaque: expected the same program on all ranks, got a function that this one ",
              "does not have (", name, "). Start the same executable everywhere.");
  TORCH_CHECK(found->second != nullptr, "opaque: expected one function of a type name in the program, got two (", name,
              "): lambdas in unnamed namespaces of two files. Give one of them a named function object.");
  return found->second;
}

// Results share no memory with inputs or with each other, on ghosts as on the stages. A custom autograd function that returns
// its input does, whatever it is for; a copy has its bits and passes its gradient on.
void separate(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> others = inputs;
  for (at::Tensor& output : outputs) {
    TORCH_CHECK(output.defined(), "opaque: expected a function that returns defined tensors, got an undefined one.");
    const auto shares_memory = [&](const at::Tensor& other) { return output.is_alias_of(other); };
    if (std::any_of(others.begin(), others.end(), shares_memory)) output = output.clone();
    others.push_back(output);
  }
}

std::vector<at::Tensor> run_checked(OpaqueFunction function, const std::vector<at::Tensor>& inputs) {
  std::vector<int64_t> versions;
  for (const at::Tensor& input : inputs) versions.push_back(input._version());
  std::vector<at::Tensor> outputs = function(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(inputs[i]._version() == versions[i], "opaque: expected a function that leaves its inputs as they are, got ",
                "one that writes to input ", i, ". Let it clone() the input first.");
  }
  separate(outputs, inputs);
  return outputs;
}

at::Tensor zeros_like_meta(const at::Tensor& meta) {
  at::Tensor zeros = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(at::kCPU)).zero_();
  return zeros.set_requires_grad(meta.requires_grad());
}

at::Tensor meta_like(const at::Tensor& output) {
  at::Tensor meta = at::empty_strided(output.sizes(), output.strides(), output.options().device(at::kMeta));
  if (output.requires_grad()) torch::autograd::impl::set_gradient_edge(meta, torch::autograd::Edge(make_refuse_backward(), 0));
  return meta;
}

std::vector<at::Tensor> opaque_kernel(const std::string& name, const std::vector<at::Tensor>& inputs) {
  const OpaqueFunction function = find(name);
  const bool on_meta = std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& t) { return t.is_meta(); });
  if (!on_meta) return run_checked(function, inputs);
  const UserRandomStateScope user_state;  // the function may draw
  std::vector<at::Tensor> zeros;
  for (const at::Tensor& input : inputs) zeros.push_back(input.is_meta() ? zeros_like_meta(input) : input);
  std::vector<at::Tensor> outputs = run_checked(function, zeros);
  for (at::Tensor& output : outputs) output = meta_like(output);
  return outputs;
}

}  // namespace

bool register_opaque(const std::string& name, OpaqueFunction function) {
  Registry& own = registry();
  const std::lock_guard lock(own.mutex);
  const auto [known, is_new] = own.functions.emplace(name, function);
  if (!is_new && known->second != function) known->second = nullptr;
  return true;
}

std::vector<at::Tensor> call_opaque(const std::string& name, const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(!inputs.empty(), "opaque: expected at least one tensor as input, got none. Compute it outside of the ",
                    "body, or with operators.");
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("smp::opaque", "");
  torch::jit::Stack stack{name, inputs};
  op.callBoxed(stack);
  return stack.back().toTensorVector();
}

// Seeded like a random operator, whether it draws numbers or not.
TORCH_LIBRARY(smp, library) {
  library.def("opaque(str name, Tensor[] inputs) -> Tensor[]", {at::Tag::nondeterministic_seeded});
  library.impl("opaque", c10::DispatchKey::CompositeImplicitAutograd,
               [](const std::string& name, at::TensorList inputs) { return opaque_kernel(name, inputs.vec()); });
}

}  // namespace smp::runtime
