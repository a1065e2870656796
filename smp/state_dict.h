// Parameters and buffers of a model by name: all of them, or those of one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
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
  /// Steps that the model has run. The random numbers of dropout depend on them, so a run that goes on needs them too.
  struct Steps {
    uint64_t training = 0;
    uint64_t evaluation = 0;
    bool operator==(const Steps&) const = default;
  };
  std::vector<Entry> entries;
  std::vector<std::string> modules;  // qualified names of all submodules, those without tensors too
  bool is_partial = false;           // of local_state_dict(): what lives on one rank
  std::optional<Steps> steps;        // without them, load_state_dict() leaves the counts as they are

  /// Throws c10::IndexError for an unknown name.
  const at::Tensor& at(const std::string& name) const;
};

/// Writes the form that torch::load of a module expects.
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const StateDict& state);

}  // namespace smp
