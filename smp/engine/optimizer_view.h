// An optimizer as the engine sees it, whatever language it is written in: what it updates, and its state by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp::engine {

/// What an optimizer holds beside parameters and gradients.
struct OptimizerMemory {
  double state = 0;      // for good, in units of the parameters
  double workspace = 0;  // while it updates a parameter, in units of that parameter
};

using OptionValues = std::map<std::string, double>;     // "lr", "beta1"; flags are 0 or 1
using StateFields = std::map<std::string, at::Tensor>;  // of one parameter: "exp_avg", "step"

struct OptimizerGroup {
  std::vector<at::Tensor> parameters;
  OptionValues options;  // none where they are not known
};

struct StateField {
  std::string name;
  bool is_count = false;  // an int64 scalar; else shape and type of the parameter
};

/// An elementwise optimizer: each element is updated by itself, so that each rank updates what lives there.
class OptimizerView {
 public:
  virtual ~OptimizerView() = default;

  /// As its options are now; of several groups the largest counts.
  virtual OptimizerMemory memory() const = 0;
  virtual std::vector<OptimizerGroup> groups() const = 0;

  /// "AdamW". Empty: options and state are not known, and nothing below is asked but refusal(), state() and
  /// erase_state().
  virtual std::string kind() const = 0;
  /// What a caller is told who wants the state where it is not known: "expected ..., got ...".
  virtual std::string refusal() const = 0;
  /// `values` has the keys that groups() gives.
  virtual void set_options(size_t group, const OptionValues& values) = 0;
  /// Every field that a parameter's state may have, and the names of those that a step with these options needs.
  virtual std::vector<StateField> fields() const = 0;
  virtual std::vector<std::string> needed_fields(const OptionValues& options) const = 0;
  /// Whether a step makes the state of a parameter that has none.
  virtual bool makes_state() const = 0;
  /// Shares memory with the optimizer's own; counts are copies. None: the parameter was never updated.
  virtual std::optional<StateFields> state(const at::Tensor& parameter) const = 0;
  /// Takes over these fields and their memory, in place of what was there.
  virtual void set_state(const at::Tensor& parameter, const StateFields& fields) = 0;
  virtual void erase_state(const at::Tensor& parameter) = 0;
};

}  // namespace smp::engine
