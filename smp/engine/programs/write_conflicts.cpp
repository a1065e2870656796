// Pairs of programs, by the names of what they write and use.
#include "smp/engine/programs/write_conflicts.h"

#include <algorithm>
#include <map>

#include "runtime/stage/replay.h"

namespace smp::engine {

using namespace partitioner;

namespace {

using Users = std::map<std::string, const Node*>;  // by the name of the memory: Program::memory_names

Users writers(const Program& program) {
  const auto& names = program.memory_names;
  Users found;
  for (const Node& node : program.graph.nodes) {
    for (const int32_t storage : node.written_storages) {
      const auto name = names.find(storage);
      if (name != names.end()) found.emplace(name->second, &node);
    }
  }
  return found;
}

/// Operators that may save what the program does not write to itself.
Users savers(const Program& program, const Users& written) {
  const Graph& graph = program.graph;
  const auto& names = program.memory_names;
  Users found;
  for (const Node& node : graph.nodes) {
    const bool has_backward = node.grad_enabled && std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId id) {
                                return id != kNoValue && graph.values[static_cast<size_t>(id)].spec.requires_grad;
                              });
    if (!has_backward) continue;
    for (const ValueId id : node_inputs(node)) {
      const auto name = names.find(graph.values[static_cast<size_t>(id)].storage);
      if (name != names.end() && !written.contains(name->second)) found.emplace(name->second, &node);
    }
  }
  return found;
}

std::string text_of(const Node& node, size_t microbatch) {
  return runtime::describe_operator(node.op, node.module) + " in microbatch " + std::to_string(microbatch);
}

}  // namespace

std::string write_conflict(const std::vector<Program*>& microbatches) {
  const auto writes = [](const Program* program) { return !program->written_tensors.empty(); };
  if (std::none_of(microbatches.begin(), microbatches.end(), writes)) return {};
  struct Uses {
    Users writers, savers;
  };
  std::map<const Program*, Uses> uses;
  std::map<std::string, std::pair<const Node*, size_t>> saved;  // by name: by whom, and in which microbatch
  for (size_t m = 0; m < microbatches.size(); ++m) {
    const Program& program = *microbatches[m];
    const auto [known, is_new] = uses.try_emplace(microbatches[m]);
    if (is_new) {
      known->second.writers = writers(program);
      if (program.graph.has_backward()) known->second.savers = savers(program, known->second.writers);
    }
    for (const auto& [name, writer] : known->second.writers) {
      const auto saver = saved.find(name);
      if (saver == saved.end()) continue;
      return "'" + name + "', which " + text_of(*saver->second.first, saver->second.second) + " uses and " +
             text_of(*writer, m) + " writes to";
    }
    for (const auto& [name, saver] : known->second.savers) saved.emplace(name, std::pair(saver, m));
  }
  return {};
}

}  // namespace smp::engine
