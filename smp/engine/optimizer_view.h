// An optimizer as the engine sees it, whatever language it is written in: what it updates, and its state by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
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
using OptimizerEntries = std::map<std::string, StateFields>;

struct OptimizerGroup {
  std::vector<at::Tensor> parameters;
  OptionValues options;  // none where they are not known
};

struct StateField {
  std::string name;
  bool is_count = false;   // an int64 scalar; else shape and type of the parameter
  bool is_needed = false;  // by a step
};

/// What a load checks.
struct StateRules {
  std::vector<StateField> fields;  // all that a parameter may have
  bool is_made_by_steps = true;    // where a parameter has none
};

/// What an optimizer keeps for its parameters, by name.
class StateView {
 public:
  virtual ~StateView() = default;

  /// "AdamW"
  virtual std::string kind() const = 0;
  /// `values` has the keys that groups() gives.
  virtual void set_options(size_t group, const OptionValues& values) = 0;
  /// With these options of a group. None where names are those of what is there, which is not loaded by them.
  virtual std::optional<StateRules> rules(const OptionValues& options) const = 0;
  /// Shares memory with the optimizer's own; counts are copies. None: the parameter was never updated.
  virtual std::optional<StateFields> of(const at::Tensor& parameter) const = 0;
  /// Takes over these fields and their memory, in place of what was there.
  virtual void set(const at::Tensor& parameter, const StateFields& fields) = 0;
};

/// An optimizer that updates each parameter by itself, so that each rank updates what lives there.
class OptimizerView {
 public:
  virtual ~OptimizerView() = default;

  /// Whether it is known to update each element by itself. Else its first updates on several ranks are watched.
  virtual bool is_elementwise() const = 0;
  /// As its options are now; of several groups the largest counts.
  virtual OptimizerMemory memory() const = 0;
  virtual std::vector<OptimizerGroup> groups() const = 0;
  /// Whatever it keeps for this parameter, known by name or not.
  virtual void erase_state(const at::Tensor& parameter) = 0;
  /// Tensors that it keeps for this parameter, as far as they are known.
  virtual std::vector<at::Tensor> tensors_kept_for(const at::Tensor& parameter) const = 0;
  /// What it returns puts state and options back as they are now, but for the contents of tensors.
  virtual std::function<void()> snapshot() = 0;
  /// Null where its state is not known by name.
  virtual StateView* state() = 0;
  /// What a caller is told who wants the state where it is not known: "expected ..., got ...".
  virtual std::string refusal() const = 0;
};

}  // namespace smp::engine
