// Exchange of returned values.
#include "smp/detail/results.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "runtime/stage/stage_values.h"

namespace smp::detail {

using namespace partitioner;

namespace {

constexpr int kResultTag = 2;

struct Slot {
  size_t microbatch;
  size_t position;  // among the returned tensors
  ValueId value;
  int owner;        // pipeline rank
  const TensorSpec* spec;
};

std::vector<Slot> result_slots(const std::vector<runtime::MicrobatchRun>& runs) {
  std::vector<Slot> slots;
  const size_t count = runs.front().program->graph->returned.size();
  for (size_t m = 0; m < runs.size(); ++m) {
    const Graph& graph = *runs[m].program->graph;
    TORCH_CHECK_VALUE(graph.returned.size() == count, "step: expected the body to return the same number of tensors for ",
                      "every microbatch, got ", count, " for microbatch 0 and ", graph.returned.size(), " for ", m, ".");
    for (size_t i = 0; i < count; ++i) {
      const ValueId id = graph.returned[i];
      slots.push_back({m, i, id, runtime::rank_of_value(graph, *runs[m].program->plan, id), &graph.values[id].spec});
    }
  }
  return slots;
}

// A result that nothing else refers to any more, and that keeps no larger tensor's memory alive.
bool is_sole_owner(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 && tensor.storage().nbytes() == tensor.nbytes();
}

// A clone past the dispatcher, which would cost more than all else that is done for a loss.
at::Tensor copy(const at::Tensor& tensor) {
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) return tensor.clone();
  at::Tensor own = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  if (tensor.nbytes() > 0) std::memcpy(own.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return own;
}

// The user owns what a step returns: nothing of the model may share its memory.
at::Tensor own_copy(const runtime::MicrobatchRun& run, std::map<ValueId, at::Tensor>& made, ValueId id) {
  const auto found = made.find(id);
  if (found != made.end()) return is_sole_owner(found->second) ? found->second : copy(found->second);
  const auto& inputs = run.program->graph->inputs;
  const auto input = std::find(inputs.begin(), inputs.end(), id);
  if (input != inputs.end()) return run.inputs[static_cast<size_t>(input - inputs.begin())].clone();
  return run.tensors(id).detach().clone();
}

}  // namespace

std::vector<StepOutput> exchange_results(const std::vector<runtime::MicrobatchRun>& runs, runtime::RankResults results,
                                         runtime::Transport& pipeline) {
  const std::vector<Slot> slots = result_slots(runs);
  const int me = pipeline.rank();
  std::vector<int64_t> bytes(static_cast<size_t>(pipeline.size()), 0);
  for (const Slot& slot : slots) bytes[slot.owner] += slot.spec->num_bytes();
  std::vector<std::string> messages(bytes.size());
  std::vector<runtime::Request> requests;
  for (int r = 0; r < pipeline.size(); ++r) {
    if (r == me || bytes[r] == 0) continue;
    messages[r].resize(static_cast<size_t>(bytes[r]));
    requests.push_back(pipeline.irecv(r, kResultTag, messages[r].data(), bytes[r]));
  }
  std::vector<std::vector<at::Tensor>> returned(runs.front().program->graph->returned.size(),
                                                std::vector<at::Tensor>(runs.size()));
  for (const Slot& slot : slots) {
    if (slot.owner != me) continue;
    at::Tensor tensor = own_copy(runs[slot.microbatch], results[slot.microbatch], slot.value);
    if (pipeline.size() > 1) {
      const at::Tensor dense = tensor.contiguous();
      messages[me].append(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
    }
    returned[slot.position][slot.microbatch] = std::move(tensor);
  }
  for (int r = 0; r < pipeline.size() && bytes[me] > 0; ++r) {
    if (r != me) requests.push_back(pipeline.isend(r, kResultTag, messages[me].data(), bytes[me]));
  }
  for (auto& request : requests) request.wait("step results");
  std::vector<size_t> read(bytes.size(), 0);
  for (const Slot& slot : slots) {
    if (slot.owner == me) continue;
    at::Tensor tensor = at::empty(slot.spec->sizes, at::TensorOptions().dtype(slot.spec->dtype));
    if (tensor.nbytes() > 0) std::memcpy(tensor.mutable_data_ptr(), messages[slot.owner].data() + read[slot.owner], tensor.nbytes());
    read[slot.owner] += tensor.nbytes();
    returned[slot.position][slot.microbatch] = std::move(tensor);
  }
  std::vector<StepOutput> outputs;
  for (auto& tensors : returned) outputs.emplace_back(std::move(tensors));
  return outputs;
}

}  // namespace smp::detail
