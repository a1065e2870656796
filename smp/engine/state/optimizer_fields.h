// The options and the per-parameter state of LibTorch's elementwise optimizers by name. Knows no
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
class OptimizerParamState;
}  // namespace torch::optim

namespace smp::engine {

using OptionValues = std::map<std::string, double>;
using StateFields = std::map<std::string, at::Tensor>;

/// One kind of optimizer, read off torch/csrc/api/src/optim.
class OptimizerFields {
 public:
  virtual ~OptimizerFields() = default;
  virtual std::string kind() const = 0;
  virtual OptionValues options(const torch::optim::OptimizerOptions& options) const = 0;
  /// `values` has the keys that options() gives.
  virtual void set_options(torch::optim::OptimizerOptions& options,
                           const OptionValues& values) const = 0;
  /// Defined tensors share memory with `state`; numbers become int64 scalars.
  virtual StateFields fields(torch::optim::OptimizerParamState& state) const = 0;
  /// A state of these fields, sharing their memory.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state(
      const StateFields& fields) const = 0;
  /// Every name that fields() may give, and those that a step with these options needs.
  virtual std::vector<std::string> known() const = 0;
  virtual std::vector<std::string> needed(const OptionValues& options) const = 0;
  /// Whether a step makes the state of a parameter that has none.
  virtual bool makes_state() const { return true; }
};

/// Null for an optimizer that is none of LibTorch's five.
const OptimizerFields* find_fields(const torch::optim::Optimizer& optimizer);
/// As find_fields, but throws c10::ValueError naming `caller`.
const OptimizerFields& fields_of(const torch::optim::Optimizer& optimizer,
                                 const std::string& caller);

/// The shortest text that reads back as the same number.
std::string exact_text(double value);

}  // namespace smp::engine
