// The archive form of a StateDict.
#include "smp/state_dict.h"

#include <c10/util/Exception.h>
#include <torch/serialize/output-archive.h>

#include <map>

namespace smp {
namespace {

// The module tree, by the last component of names.
struct Tree {
  std::string name;
  std::vector<const StateDict::Entry*> own;
  std::vector<Tree> children;

  Tree& child(const std::string& child_name) {
    for (Tree& known : children) {
      if (known.name == child_name) return known;
    }
    children.emplace_back().name = child_name;
    return children.back();
  }
  Tree& descend(const std::string& path) {
    Tree* tree = this;
    for (size_t at = 0; at < path.size();) {
      const size_t dot = std::min(path.find('.', at), path.size());
      tree = &tree->child(path.substr(at, dot - at));
      at = dot + 1;
    }
    return *tree;
  }
};

std::string last_component(const std::string& name) { return name.substr(name.rfind('.') + 1); }

// The layout of torch::nn::Module::save: own tensors, then one nested archive per submodule.
void write(torch::serialize::OutputArchive& archive, const Tree& tree) {
  for (const StateDict::Entry* entry : tree.own) {
    archive.write(last_component(entry->name), entry->tensor, entry->is_buffer);
  }
  for (const Tree& child : tree.children) {
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    write(nested, child);
    archive.write(child.name, nested);
  }
}

}  // namespace

const at::Tensor& StateDict::at(const std::string& name) const {
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry.tensor;
  }
  TORCH_CHECK_INDEX(false, "StateDict: expected the name of a parameter or buffer, got '", name, "'.");
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const StateDict& state) {
  Tree root;
  for (const std::string& module : state.modules) root.descend(module);
  for (const StateDict::Entry& entry : state.entries) {
    const size_t dot = entry.name.rfind('.');
    root.descend(dot == std::string::npos ? "" : entry.name.substr(0, dot)).own.push_back(&entry);
  }
  write(archive, root);
  return archive;
}

}  // namespace smp
