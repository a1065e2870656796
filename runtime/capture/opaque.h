// The operator smp::opaque: functions of the program that capture does not look into, in a table by number.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device/device.h"

namespace smp::runtime {

struct OpaqueFunction {
  /// details: what the caller of call_opaque gave, on whatever rank it runs.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs, const std::string& details)> run;
  bool needs_interpreter = false;  // is called with the interpreter of its language held
};

/// Takes a function into the table of this process and returns its number, which follows from `name`: the same in every
/// process. Two functions under one name make calls of them an error. Thread-safe.
int64_t add_opaque(const std::string& name, OpaqueFunction function);

/// `hold` holds the interpreter for this thread as long as what it returns lives. For functions that need it, from now on.
void set_interpreter(std::function<std::shared_ptr<void>()> hold);

/// The interpreter, held, if `op` is smp::opaque and the function that `stack` has for it needs one. For a caller that takes
/// locks around the call, which those who hold the interpreter may wait for.
std::shared_ptr<void> interpreter_for(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Calls the operator, so that a body in progress records it. `details` is text that belongs to the call, as numbers belong
/// to other operators: a call with another text is another call.
std::vector<at::Tensor> call_opaque(int64_t number, const std::vector<at::Tensor>& inputs, const std::string& details = "");

/// While this lives on a thread, smp::opaque takes its stand-ins for tensors on these devices, and gives its function zeros
/// there. By input, without undefined ones.
class OpaqueInputsOn {
 public:
  explicit OpaqueInputsOn(const std::vector<const Device*>& by_input);
  ~OpaqueInputsOn();
  OpaqueInputsOn(const OpaqueInputsOn&) = delete;
  OpaqueInputsOn& operator=(const OpaqueInputsOn&) = delete;

 private:
  const std::vector<const Device*>* previous_;
};

}  // namespace smp::runtime
