// All parameters and buffers of a model, gathered from its stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace torch::serialize {
class OutputArchive;
}

namespace smp {

/// Copies of a model's parameters and buffers by qualified name, in the module's own order.
///
///   smp::StateDict state = model.state_dict();
///   if (smp::rank() == 0) torch::save(state, "model.pt");   // torch::load(plain_net, "model.pt") reads it
struct StateDict {
  struct Entry {
    std::string name;
    at::Tensor tensor;
    bool is_buffer = false;
  };
  std::vector<Entry> entries;
  std::vector<std::string> modules;  // qualified names of all submodules, those without tensors too

  /// Throws c10::IndexError for an unknown name.
  const at::Tensor& at(const std::string& name) const;
};

/// Writes the form that torch::load of a module expects.
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const StateDict& state);

}  // namespace smp
