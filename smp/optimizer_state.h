// The state of an optimizer by the names of the parameters it updates.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace smp {

/// What an optimizer of LibTorch keeps between steps, and its options.
///
///   smp::OptimizerState state = optimizer.state_dict();
///   state.groups[0].options["lr"];                       // of the first group
///   state.entries.at("fc.weight").at("exp_avg");         // shape of the parameter
///   state.entries.at("fc.weight").at("step");            // a scalar, int64
struct OptimizerState {
  struct Group {
    std::map<std::string, double> options;  // "lr", "weight_decay", "beta1" ...; flags are 0 or 1
    std::vector<std::string> parameters;    // qualified names, in the optimizer's order
    bool operator==(const Group&) const = default;
  };
  std::string kind;  // SGD, Adam, AdamW, RMSprop or Adagrad
  std::vector<Group> groups;
  /// By parameter, by LibTorch's name of the field. A parameter that was never updated has none.
  std::map<std::string, std::map<std::string, at::Tensor>> entries;
  bool is_partial = false;  // of local_state_dict(): entries of one rank only
};

}  // namespace smp
