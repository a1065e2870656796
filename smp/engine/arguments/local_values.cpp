// A replay outside of the pipeline.
#include "smp/engine/arguments/local_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "runtime/stage/replay.h"

namespace smp::engine {

using namespace partitioner;

namespace {

/// Real tensors of the values that no operator makes.
class Sources {
 public:
  Sources(const runtime::ValueRead& read, const std::vector<at::Tensor>& inputs, const runtime::Bindings& bindings)
      : read_(read), inputs_(inputs), bindings_(bindings) {}

  at::Tensor operator()(ValueId id) const {
    const Value& value = read_.graph.values[id];
    if (is_named(value)) return bindings_.find_named(value.name)->tensor;
    const auto input = std::find(read_.graph.inputs.begin(), read_.graph.inputs.end(), id);
    if (input != read_.graph.inputs.end()) return inputs_[static_cast<size_t>(input - read_.graph.inputs.begin())];
    const auto constant =
        std::find_if(read_.constants.begin(), read_.constants.end(), [id](const auto& other) { return other.value == id; });
    TORCH_INTERNAL_ASSERT(constant != read_.constants.end(), "value ", id, " comes from nowhere");
    return constant->tensor;
  }

 private:
  const runtime::ValueRead& read_;
  const std::vector<at::Tensor>& inputs_;
  const runtime::Bindings& bindings_;
};

/// Copies that may be written to. What shares memory goes on to share it.
class Copies {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    const auto [known, is_new] = storages_.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (is_new) {
      const at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage());
      known->second = bytes.clone().storage();
    }
    at::Tensor copy(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                          /*allow_tensor_metadata_change=*/true));
    copy.unsafeGetTensorImpl()->set_storage_keep_dtype(known->second);
    return copy;
  }

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

}  // namespace

std::vector<at::Tensor> compute_locally(const runtime::ValueRead& read, const std::vector<NodeId>& nodes,
                                        const std::vector<at::Tensor>& inputs, const runtime::Bindings& bindings,
                                        const runtime::RandomState& random) {
  const at::NoGradGuard no_grad;
  const Sources source(read, inputs, bindings);
  runtime::Replay replay(read.graph, nodes, read.values);
  std::unordered_set<int32_t> written;
  for (NodeId n : nodes) {
    const auto& storages = read.graph.nodes[n].written_storages;
    written.insert(storages.begin(), storages.end());
  }
  runtime::Slots slots(replay.num_slots());
  Copies copy;
  const auto fill = [&](ValueId id) {
    const at::Tensor original = source(id);
    const at::Tensor tensor = original.detach();
    at::Tensor& slot = slots[replay.slot_of(id)];
    slot = written.contains(read.graph.values[id].storage) ? copy(tensor) : tensor;
    slot.set_requires_grad(original.requires_grad());  // aten::matmul chooses its kernel by it, and so its last digits
  };
  for (ValueId id : replay.external()) fill(id);
  for (ValueId id : read.values) {
    if (read.graph.values[id].kind != ValueKind::kResult && !slots[replay.slot_of(id)].defined()) fill(id);
  }
  const runtime::MicrobatchContext context{.microbatch = 0, .random = random, .scalars = read.scalars};
  const runtime::UserRandomStateScope user_state;
  replay.run(slots, context, {});
  std::vector<at::Tensor> values;
  for (ValueId id : read.values) values.push_back(slots[replay.slot_of(id)].detach().clone());
  return values;
}

}  // namespace smp::engine
