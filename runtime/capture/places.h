// Refusals of capture, in one voice, and the thread's modes that an operator call depends on.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::runtime {

/// "aten::item, in or after module 'encoder.0'". `module` as by module_in_texts.
std::string describe_place(const std::string& op, const std::string& module);

inline const std::string kRootModule = ".";
/// `module`, that of the parameter or buffer used last, or kRootModule where it is "" and yet one of the first `num_values`
/// is a parameter or buffer: one of the root module.
const std::string& module_in_texts(const partitioner::Graph& graph, partitioner::ValueId num_values,
                                   const std::string& module);

[[noreturn]] void refuse_value_read(const std::string& op, const std::string& module);
[[noreturn]] void refuse_data_dependent_shape(const std::string& op, const std::string& module);
[[noreturn]] void refuse_replaced_data(const std::string& op, const std::string& module);
[[noreturn]] void refuse_stale_ghost(const std::string& place, const std::string& module);
/// `changed`: since the body began.
[[noreturn]] void refuse_nested(const std::string& op, const std::string& module);
[[noreturn]] void refuse_forward_mode(const std::string& module);
[[noreturn]] void refuse_other_arithmetic(const std::string& changed, const std::string& place);

/// Autocast of the thread, for the rank's device.
partitioner::Autocast current_autocast();
/// Whether it casts those of the last `num_arguments` on the stack: it is on, this is not within an operator whose arguments
/// it has cast, and they are not all on the host beside a rank's device that is another.
bool autocast_casts(const torch::jit::Stack& stack, size_t num_arguments,
                    const std::function<bool(const at::Tensor&)>& is_on_host);

/// What the thread has around operators that stages, which run them later, would run without; null where there is nothing.
const char* unseen_around_operators();

/// Every tensor of these results in order, lists flattened; undefined ones kept.
std::vector<at::Tensor> flatten_outputs(std::span<const c10::IValue> results);

/// Restores grad mode and autocast at the end.
class AmbientModes {
 public:
  AmbientModes();
  ~AmbientModes();
  AmbientModes(const AmbientModes&) = delete;
  AmbientModes& operator=(const AmbientModes&) = delete;

 private:
  bool grad_enabled_;
  partitioner::Autocast autocast_;
};

/// Autocast keeps casts of parameters until the end of its outermost region, which a replay never sees: it would go on
/// with the weights of an earlier step. Every use is cast anew inside.
class UncachedCasts {
 public:
  UncachedCasts();
  ~UncachedCasts();
  UncachedCasts(const UncachedCasts&) = delete;
  UncachedCasts& operator=(const UncachedCasts&) = delete;

 private:
  bool was_enabled_;
};

/// Sets grad mode; and autocast, where it differs from the thread's.
void set_modes(bool grad_enabled, const partitioner::Autocast& autocast);

}  // namespace smp::runtime
