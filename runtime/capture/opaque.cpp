// Registration of the operator and its one kernel, which runs the function; on meta tensors, on zeros of their geometry.
#include "runtime/capture/opaque.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "runtime/capture/ghosts.h"
#include "runtime/device/device.h"
#include "runtime/device/random.h"

namespace smp::runtime {
namespace {

struct Entry {
  std::string name;
  /// Null: two under one number. Nobody copies a function: that of an interpreter may not be without it.
  std::shared_ptr<const OpaqueFunction> function;
};

struct Table {
  std::mutex mutex;
  std::map<int64_t, Entry> entries;
  std::function<std::shared_ptr<void>()> hold_interpreter;
};

Table& table() {
  static auto& own = *new Table;  // never destroyed: an interpreter may end before, and its functions could not go then
  return own;
}

// FNV-1a, without the sign.
int64_t number_of(const std::string& name) {
  uint64_t hash = 14695981039346656037U;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return static_cast<int64_t>(hash >> 1);
}

std::shared_ptr<const OpaqueFunction> find(int64_t number) {
  Table& own = table();
  const std::lock_guard lock(own.mutex);
  const auto found = own.entries.find(number);
  TORCH_CHECK(found != own.entries.end(), "opaque: expected the same program on all ranks, got a function that this one ",
              "does not have (number ", number, "). Start the same executable everywhere.");
  const auto& [name, function] = found->second;
  TORCH_CHECK(function != nullptr, "opaque: expected one function of a type name in the program, got two (", name,
              "): lambdas in unnamed namespaces of two files. Give one of them a named function object.");
  return function;
}

std::shared_ptr<void> hold_interpreter() {
  Table& own = table();
  std::unique_lock lock(own.mutex);
  TORCH_CHECK(own.hold_interpreter != nullptr,
              "opaque: expected an interpreter for a function that needs one, got none. Call ",
              "set_interpreter before steps run.");
  const auto hold = own.hold_interpreter;
  lock.unlock();  // who holds the interpreter may wait for the table
  return hold();
}

// Results share no memory with inputs or with each other, on ghosts as on the stages. A custom autograd function that
// returns its input does, whatever it is for; a copy has its bits and passes its gradient on.
void separate(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> others = inputs;
  for (at::Tensor& output : outputs) {
    TORCH_CHECK(output.defined(), "opaque: expected a function that returns defined tensors, got an undefined one.");
    const auto shares_memory = [&](const at::Tensor& other) { return output.is_alias_of(other); };
    if (std::any_of(others.begin(), others.end(), shares_memory)) output = output.clone();
    others.push_back(output);
  }
}

at::Tensor gradient_of_leaf(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_leaf() ? tensor.grad() : at::Tensor();
}

std::vector<at::Tensor> run_checked(const OpaqueFunction& function, const std::vector<at::Tensor>& inputs,
                                    const std::string& details) {
  const std::shared_ptr<void> interpreter = function.needs_interpreter ? hold_interpreter() : nullptr;
  std::vector<int64_t> versions;
  std::vector<at::Tensor> gradients;  // of leaves
  for (const at::Tensor& input : inputs) {
    versions.push_back(input._version());
    gradients.push_back(gradient_of_leaf(input));
    versions.push_back(gradients.back().defined() ? gradients.back()._version() : 0);
  }
  std::vector<at::Tensor> outputs = function.run(inputs, details);
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(inputs[i]._version() == versions[2 * i], "opaque: expected a function that leaves its inputs as they are, ",
                "got one that writes to input ", i, ". Let it clone() the input first.");
    const at::Tensor gradient = gradient_of_leaf(inputs[i]);
    const bool is_as_before =
        gradient.is_same(gradients[i]) && (!gradient.defined() || gradient._version() == versions[2 * i + 1]);
    TORCH_CHECK(is_as_before,
                "opaque: expected a function that leaves the gradients of its inputs as they are, got one that "
                "adds to that of input ",
                i,
                " (backward()), a parameter or a tensor of the body. Let it ask for the gradients "
                "that it computes with: torch::autograd::grad, or backward() with `inputs`.");
  }
  separate(outputs, inputs);
  return outputs;
}

const c10::OperatorHandle& opaque_operator() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("smp::opaque", "");
  return op;
}

thread_local const std::vector<const Device*>* devices_by_input = nullptr;
thread_local const std::vector<at::Tensor>* seen_by_input = nullptr;
thread_local const KnownValue* known_value = nullptr;
thread_local const char* stand_ins = nullptr;

at::Tensor zeros_like_meta(const at::Tensor& meta, const Device& device) {
  at::Tensor zeros = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device.type)).zero_();
  return zeros.set_requires_grad(meta.requires_grad());
}

at::Tensor meta_like(const at::Tensor& output) {
  at::Tensor meta = at::empty_strided(output.sizes(), output.strides(), output.options().device(at::kMeta));
  if (output.requires_grad())
    torch::autograd::impl::set_gradient_edge(meta, torch::autograd::Edge(make_refuse_backward(), 0));
  return meta;
}

// Puts the values that are known in the places of zeros; false where there are none.
bool put_values(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& zeros) {
  if (known_value == nullptr || seen_by_input == nullptr) return false;
  bool any = false;
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    const at::Tensor& seen = seen_by_input->at(next++);
    const at::Tensor value = inputs[i].is_meta() ? (*known_value)(seen) : at::Tensor();
    if (!value.defined()) continue;
    any = true;
    zeros[i] = value.detach().to(zeros[i].device()).set_requires_grad(zeros[i].requires_grad());
  }
  return any;
}

std::vector<at::Tensor> record(const OpaqueFunction& function, const std::vector<at::Tensor>& inputs,
                               std::vector<at::Tensor>& zeros, const std::string& details) {
  const auto end = c10::make_scope_exit([] { stand_ins = nullptr; });
  try {
    stand_ins = "zeros";
    return run_checked(function, zeros, details);
  } catch (const std::exception&) {
    stand_ins = nullptr;
    if (!put_values(inputs, zeros)) throw;
  }
  stand_ins = "the values that arguments of the step alone decide, and zeros for the others";
  return run_checked(function, zeros, details);
}

// Those of an interpreter have texts of their own.
std::vector<at::Tensor> record_with_text(const OpaqueFunction& function, const std::vector<at::Tensor>& inputs,
                                         std::vector<at::Tensor>& zeros, const std::string& details) {
  static const std::string text =
      "smp::opaque calls its function on zeros to learn the sizes of its results; where it throws, once more, on the values "
      "of "
      "those inputs that arguments of the step alone decide. Make it safe for zeros (lengths.clamp_min(1)), or compute what "
      "may "
      "not be zero from arguments of the step alone";
  try {
    return record(function, inputs, zeros, details);
  } catch (c10::Error& error) {
    if (!function.needs_interpreter) error.add_context(text);
    throw;
  } catch (const std::exception& error) {
    if (function.needs_interpreter) throw;
    TORCH_CHECK(false, "opaque: got an exception: ", error.what(), ". ", text, ".");
  }
}

std::vector<at::Tensor> opaque_kernel(int64_t number, const std::vector<at::Tensor>& inputs, const std::string& details) {
  const std::shared_ptr<const OpaqueFunction> found = find(number);  // until it has returned
  const OpaqueFunction& function = *found;
  const bool on_meta = std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& t) { return t.is_meta(); });
  if (!on_meta) return run_checked(function, inputs, details);
  const UserRandomStateScope user_state;  // the function may draw
  std::vector<at::Tensor> zeros;
  size_t next = 0;
  for (const at::Tensor& input : inputs) {
    const bool is_known = devices_by_input != nullptr && input.defined();
    const Device& device = is_known ? *devices_by_input->at(next++) : this_ranks_device();
    zeros.push_back(input.is_meta() ? zeros_like_meta(input, device) : input);
  }
  std::vector<at::Tensor> outputs = record_with_text(function, inputs, zeros, details);
  for (at::Tensor& output : outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(is_on_this_ranks_device(output),
                                "opaque: expected a function whose results are on the rank's device, got one on ",
                                output.device(), ". Move it there within the function.");
    output = meta_like(output);
  }
  return outputs;
}

}  // namespace

const char* opaque_stand_ins() { return stand_ins; }

OpaqueInputsOn::OpaqueInputsOn(const std::vector<const Device*>& by_input, const std::vector<at::Tensor>& seen)
    : previous_(std::exchange(devices_by_input, &by_input)), previous_seen_(std::exchange(seen_by_input, &seen)) {}

OpaqueInputsOn::~OpaqueInputsOn() {
  devices_by_input = previous_;
  seen_by_input = previous_seen_;
}

OpaqueValues::OpaqueValues(KnownValue known) : known_(std::move(known)), previous_(std::exchange(known_value, &known_)) {}

OpaqueValues::~OpaqueValues() { known_value = previous_; }

int64_t add_opaque(const std::string& name, OpaqueFunction function) {
  Table& own = table();
  const std::lock_guard lock(own.mutex);
  const int64_t number = number_of(name);
  const auto [known, is_new] =
      own.entries.emplace(number, Entry{name, std::make_shared<OpaqueFunction>(std::move(function))});
  if (!is_new) known->second.function = nullptr;
  return number;
}

void set_interpreter(std::function<std::shared_ptr<void>()> hold) {
  Table& own = table();
  const std::lock_guard lock(own.mutex);
  own.hold_interpreter = std::move(hold);
}

std::shared_ptr<void> interpreter_for(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!(op == opaque_operator())) return nullptr;
  const int64_t number = stack[stack.size() - op.schema().arguments().size()].toInt();
  return find(number)->needs_interpreter ? hold_interpreter() : nullptr;
}

std::vector<at::Tensor> call_opaque(int64_t number, const std::vector<at::Tensor>& inputs, const std::string& details) {
  TORCH_CHECK_VALUE(!inputs.empty(), "opaque: expected at least one tensor as input, got none. Compute it outside of the ",
                    "body, or with operators.");
  torch::jit::Stack stack{number, inputs, details};
  opaque_operator().callBoxed(stack);
  return stack.back().toTensorVector();
}

// Seeded like a random operator, whether it draws numbers or not.
TORCH_LIBRARY(smp, library) {
  library.def("opaque(int function, Tensor[] inputs, str details) -> Tensor[]", {at::Tag::nondeterministic_seeded});
  library.impl("opaque", c10::DispatchKey::CompositeImplicitAutograd,
               [](int64_t function, at::TensorList inputs, std::string_view details) {
                 return opaque_kernel(function, inputs.vec(), std::string(details));
               });
}

}  // namespace smp::runtime
