// Which operators run here, and what the body gets of them.
#include "runtime/capture/host_values.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "runtime/capture/arguments.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/interceptor.h"
#include "runtime/capture/places.h"
#include "runtime/device/device.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {

// tensor.cpu() names all that the tensor is, and LibTorch prints through doubles on the CPU; other calls of to(), as
// x.to(weight.device()), leave the tensor where it is.
at::Tensor asked_for_on_host(const OperatorInfo& info, const torch::jit::Stack& stack) {
  if (!info.may_copy_to_host) return {};
  const auto* arguments = &stack.end()[-info.num_arguments];
  const auto says = [](const c10::IValue& argument, int64_t wanted) {
    return argument.isInt() && argument.toInt() == wanted;
  };
  const auto is_host = [](const c10::IValue& device) {
    return device.isDevice() && device.toDevice().type() == host().type;
  };
  const at::Tensor& tensor = arguments[0].toTensor();
  const bool is_asked = info.overload == "device"
                            ? is_host(arguments[1]) && says(arguments[2], static_cast<int64_t>(at::kDouble))
                            : says(arguments[1], static_cast<int64_t>(tensor.scalar_type())) &&
                                  says(arguments[2], static_cast<int64_t>(tensor.layout())) && is_host(arguments[3]);
  return is_asked ? tensor : at::Tensor();
}

namespace {

// The arguments on the stack that the operator writes to and the stages hold.
std::vector<at::Tensor> written_on_stages(const OperatorInfo& info, const torch::jit::Stack& stack,
                                          const Bindings& bindings) {
  std::vector<at::Tensor> written;
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  for (size_t i = first; i < stack.size(); ++i) {
    if (!info.argument_written[i - first]) continue;
    for_each_tensor(stack[i], [&](int, const at::Tensor& tensor) {
      if (as_ghost(tensor) != nullptr || bindings.find_storage(tensor) != nullptr) written.push_back(tensor);
    });
  }
  return written;
}

// Whether an operator that mostly gives another name to memory, as to() does, has made a copy of it.
bool copies(const c10::OperatorHandle& op, const torch::jit::Stack& results, const std::vector<at::Tensor>& arguments) {
  if (op.schema().returns().empty() || op.schema().returns()[0].alias_info() == nullptr || !results[0].isTensor())
    return false;
  const at::Tensor& made = results[0].toTensor();
  return std::none_of(arguments.begin(), arguments.end(), [&](const at::Tensor& own) { return made.is_alias_of(own); });
}

}  // namespace

void HostValues::clear() noexcept {
  hosts_.clear();
  written_.clear();
  memory_.clear();
}

at::Tensor HostValues::ghost_of(const at::Tensor& tensor) const {
  if (!tensor.defined()) return tensor;  // as what the body has dropped is
  for (const HostTensor& host : hosts_) {
    if (lock(host.real).is_same(tensor)) return host.ghost;
  }
  return tensor;
}

void HostValues::add(const at::Tensor& real, const at::Tensor& ghost) {
  std::erase_if(hosts_, [](const HostTensor& host) { return !lock(host.real).defined(); });
  real.unsafeGetTensorImpl()->set_autograd_meta(nullptr);  // a view says that it requires a gradient when its base does
  hosts_.push_back({weak(real), ghost});
  note_memory(real, /*is_written=*/false);
}

at::Tensor HostValues::ghost_leaving(const at::Tensor& tensor) const {
  at::Tensor ghost = ghost_of(tensor);
  if (ghost.is_same(tensor)) return ghost;
  check_history(tensor);
  check_memory(tensor, "the body's result or loss");
  return ghost;
}

void HostValues::check_history(const at::Tensor& real) const {
  if (!is_as_handed_out(real)) refuse_history(real, describe_place("capture", run_.current_module()));
}

void HostValues::check_histories() const {
  for (const HostTensor& host : hosts_) {
    const at::Tensor real = lock(host.real);
    if (real.defined()) check_history(real);
  }
}

// What is here requires a gradient where its ghost does, so that custom functions and hooks do with it what they would do
// with the ghost, and are seen.
void HostValues::follow_gradients() {
  for (const auto& [held, ghost] : hosts_) {
    const at::Tensor real = lock(held);
    if (!real.defined() || real.requires_grad() == ghost.requires_grad()) continue;
    check_history(real);
    set_gradient(real, ghost.requires_grad(), run_.ghost_run());
  }
}

at::Tensor HostValues::host_of(const at::Tensor& ghost, const at::Tensor& source) {
  if (as_ghost(ghost) == nullptr) return ghost;
  const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  const bool is_of_body = as_ghost(source) != nullptr || bindings_.find_storage(source) != nullptr;
  const at::Tensor content = run_.read({is_of_body ? source : ghost}).front();
  at::Tensor real = content.to(host().type, ghost.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  add(real, ghost);
  follow_gradients();
  return real;
}

void HostValues::note_memory(const at::Tensor& real, bool is_written) {
  auto known = std::find_if(memory_.begin(), memory_.end(),
                            [&](const HostMemory& memory) { return memory.storage.is_alias_of(real.storage()); });
  if (known != memory_.end() && !is_written) return;
  if (known == memory_.end()) known = memory_.insert(known, {real.storage(), {}});
  known->bytes = tensor_of_bytes(bytes_of(known->storage));
}

// A write through a pointer leaves no trace but this.
void HostValues::check_memory(const at::Tensor& real, const std::string& reader) const {
  const auto known = std::find_if(memory_.begin(), memory_.end(),
                                  [&](const HostMemory& memory) { return memory.storage.is_alias_of(real.storage()); });
  if (known == memory_.end() || real.numel() == 0) return;
  int64_t num_elements = 1;
  for (int64_t d = 0; d < real.dim(); ++d) num_elements += (real.size(d) - 1) * real.stride(d);
  const auto begin = static_cast<size_t>(real.storage_offset()) * real.itemsize();
  const auto num_bytes = static_cast<size_t>(num_elements) * real.itemsize();
  const std::string_view now = bytes_of(known->storage);
  TORCH_CHECK_NOT_IMPLEMENTED(
      now.substr(begin, num_bytes) == bytes_of(known->bytes).substr(begin, num_bytes),
      describe_place(reader, run_.current_module()),
      ": expected tensors that the body has brought to the CPU to be written by operators only, got one of sizes ",
      real.sizes(),
      " that was written through a pointer. The step computes with what operators made. Write with operators (masked_fill_, "
      "copy_, where), or fill a tensor made outside of the step, before its first use in the body.");
}

// Replaces host tensors among the arguments by their ghosts.
HostValues::HostCall HostValues::take_ghosts(const OperatorInfo& info, torch::jit::Stack& stack) const {
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  HostCall call{.real = torch::jit::Stack(stack.begin() + static_cast<ptrdiff_t>(first), stack.end())};
  for (size_t i = first; i < stack.size(); ++i) {
    map_tensors(stack[i], [&](const at::Tensor& tensor) {
      at::Tensor ghost = ghost_of(tensor);
      if (!ghost.is_same(tensor)) {
        check_history(tensor);
        call.hosts.push_back(tensor);
        call.requires_grad = call.requires_grad || ghost.requires_grad();
        if (info.argument_written[i - first]) call.written.push_back(tensor);
      } else if (as_ghost(tensor) != nullptr || bindings_.find_storage(tensor) != nullptr) {
        call.is_real = false;
      }
      return ghost;
    });
  }
  return call;
}

void HostValues::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  const size_t first = stack.size() - static_cast<size_t>(info.num_arguments);
  HostCall call = take_ghosts(info, stack);
  const std::vector<at::Tensor> written = written_on_stages(info, stack, bindings_);
  if (call.hosts.empty()) {
    run_.record_or_match(op, stack);
    return update_aliases(written, call);
  }
  const OperatorClass kind = class_of_call(info, call.real);
  const bool is_recorded = kind == OperatorClass::kRecorded;
  if (is_recorded && !info.reads_only_geometry) {
    for (const at::Tensor& host : call.hosts) check_memory(host, info.name);
  }
  const bool is_question = kind == OperatorClass::kReadsValue || kind == OperatorClass::kDataDependentShape ||
                           kind == OperatorClass::kAnsweredByIdentity || kind == OperatorClass::kGeometryQuery;
  if (kind == OperatorClass::kDataDependentShape && call.requires_grad && at::GradMode::is_enabled()) {
    refuse_data_dependent_shape(info.name, run_.current_module());
  }
  // Random numbers are those of the step, not the user's.
  const bool runs_here = call.is_real && (is_question || (is_recorded && !info.is_random));
  if (runs_here) {
    const at::NoGradGuard no_grad;
    op.callBoxed(call.real);
    if (is_recorded && info.reads_only_geometry && copies(op, call.real, call.hosts)) {
      for (const at::Tensor& host : call.hosts) check_memory(host, info.name);
    }
    if (is_question) {  // about values that are here
      stack.resize(first);
      stack.insert(stack.end(), call.real.begin(), call.real.end());
      return;
    }
  }
  run_.record_or_match(op, stack);
  written_.insert(written_.end(), call.written.begin(), call.written.end());
  runs_here ? finish_host_call(call, first, stack) : update_hosts(call, first, stack);
  update_aliases(written, call);
  follow_gradients();
}

// A tensor of the host and its cpu() are one, so what is written to the one is fetched for the other.
void HostValues::update_aliases(const std::vector<at::Tensor>& written, const HostCall& call) {
  for (size_t h = 0; h < hosts_.size() && !written.empty(); ++h) {
    const at::Tensor real = lock(hosts_[h].real), ghost = hosts_[h].ghost;
    if (!real.defined()) continue;
    const auto is_behind = [&, memory = run_.memory_of(ghost)](const at::Tensor& other) {
      return memory >= 0 && run_.memory_of(other) == memory;
    };
    if (std::none_of(written.begin(), written.end(), is_behind)) continue;
    const auto is_on_it = [own = storage_of(real)](const at::Tensor& other) { return storage_of(other) == own; };
    if (std::any_of(call.written.begin(), call.written.end(), is_on_it)) continue;
    const bool is_held_by_body = real.use_count() > 1;  // besides here
    if (!is_held_by_body || real.sizes() != ghost.sizes()) continue;
    const at::Tensor content = run_.read({ghost}).front();  // in the body's grad mode
    const at::NoGradGuard no_grad;
    real.copy_(content);
    note_memory(real, /*is_written=*/true);
  }
}

// Gives the body the results that were computed here, in place of their ghosts.
void HostValues::finish_host_call(const HostCall& call, size_t first, torch::jit::Stack& stack) {
  std::vector<at::Tensor> ghosts;
  for (size_t i = first; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](int, const at::Tensor& made) {
      ghosts.push_back(ghost_of(made));  // cpu() of what is here has brought it here once more
    });
  }
  for (const at::Tensor& host : call.written) note_memory(host, /*is_written=*/true);
  size_t next = 0;
  for (size_t i = first; i < stack.size(); ++i) {
    stack[i] = call.real[i - first];
    map_tensors(stack[i], [&](const at::Tensor& tensor) {
      const at::Tensor& ghost = ghosts.at(next++);
      if (!is_on_host(tensor)) return ghost;
      if (ghost_of(tensor).is_same(tensor)) add(tensor, ghost);
      return tensor;
    });
  }
}

// After an operator that could not run here: what it wrote to tensors that are here is fetched, and so is what it made
// from such tensors alone.
void HostValues::update_hosts(const HostCall& call, size_t first, torch::jit::Stack& stack) {
  for (const at::Tensor& host : call.written) {
    const at::Tensor content = run_.read({ghost_of(host)}).front();  // in the body's grad mode
    const at::NoGradGuard no_grad;
    host.copy_(content);
    note_memory(host, /*is_written=*/true);
  }
  for (size_t i = first; i < stack.size(); ++i) {
    map_tensors(stack[i], [&](const at::Tensor& ghost) {
      const auto host =
          std::find_if(hosts_.begin(), hosts_.end(), [&](const auto& other) { return other.ghost.is_same(ghost); });
      if (host != hosts_.end()) return lock(host->real);
      return call.is_real ? host_of(ghost, ghost) : ghost;
    });
  }
}

}  // namespace smp::runtime
