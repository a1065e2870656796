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

/// What stands for the inputs of the function that this thread records, for texts; null while it records none.
const char* opaque_stand_ins();

/// While this lives on a thread, smp::opaque takes its stand-ins for tensors on these devices, and gives its function zeros
/// there. By input, without undefined ones. `seen`: what the body has given for them.
class OpaqueInputsOn {
 public:
  OpaqueInputsOn(const std::vector<const Device*>& by_input, const std::vector<at::Tensor>& seen);
  ~OpaqueInputsOn();
  OpaqueInputsOn(const OpaqueInputsOn&) = delete;
  OpaqueInputsOn& operator=(const OpaqueInputsOn&) = delete;

 private:
  const std::vector<const Device*>* previous_;
  const std::vector<at::Tensor>* previous_seen_;
};

/// The value of what a body has given, now; undefined where only the pipeline could tell.
using KnownValue = std::function<at::Tensor(const at::Tensor& seen)>;

/// While this lives on a thread, a function that throws on zeros is called once more, on the values that are known.
class OpaqueValues {
 public:
  explicit OpaqueValues(KnownValue known);
  ~OpaqueValues();
  OpaqueValues(const OpaqueValues&) = delete;
  OpaqueValues& operator=(const OpaqueValues&) = delete;

 private:
  KnownValue known_;
  const KnownValue* previous_;
};

}  // namespace smp::runtime
