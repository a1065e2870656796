// Exchange of returned values.
#include "smp/engine/step/results.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>

#include "runtime/device/device.h"
#include "runtime/exchange/boundary.h"
#include "runtime/exchange/tags.h"
#include "runtime/libtorch/sole_owner.h"
#include "runtime/stage/stage_values.h"
#include "runtime/transport/abandoned.h"

namespace smp::engine {

using namespace partitioner;

namespace {

struct Slot {
  size_t microbatch;
  size_t position;  // among the returned tensors
  ValueId value;
  int owner;  // pipeline rank
  const TensorSpec* spec;
};

std::vector<Slot> result_slots(const std::vector<runtime::MicrobatchRun>& runs) {
  std::vector<Slot> slots;
  const size_t count = runs.front().program->graph->returned.size();
  for (size_t m = 0; m < runs.size(); ++m) {
    const Graph& graph = *runs[m].program->graph;
    TORCH_INTERNAL_ASSERT(graph.returned.size() == count, "the leader lets only equal numbers of tensors pass");
    for (size_t i = 0; i < count; ++i) {
      const ValueId id = graph.returned[i];
      slots.push_back({m, i, id, runtime::rank_of_value(graph, *runs[m].program->plan, id), &graph.values[id].spec});
    }
  }
  return slots;
}

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

// Contiguous on every rank, so that what the user computes from it has the same bits there.
at::Tensor copy(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return tensor.resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous);
  // Past the dispatcher, which would cost more than all else that is done for a loss.
  const runtime::Device& device = runtime::device_holding(tensor);
  at::Tensor own = device.empty(tensor.sizes(), tensor.scalar_type());
  device.copy(runtime::memory_of(own).data, runtime::data_of(tensor), static_cast<int64_t>(own.nbytes()));
  return own;
}

// The user owns what a step returns: nothing of the model may share its memory.
at::Tensor own_copy(const runtime::MicrobatchRun& run, std::map<ValueId, at::Tensor>& made, ValueId id) {
  const auto found = made.find(id);
  if (found != made.end()) {
    return runtime::owns_all_of_its_memory(found->second) && is_plain(found->second) ? found->second : copy(found->second);
  }
  const auto& inputs = run.program->graph->inputs;
  const auto input = std::find(inputs.begin(), inputs.end(), id);
  if (input != inputs.end()) return copy(run.inputs[static_cast<size_t>(input - inputs.begin())]);
  return copy(run.tensors(id).detach());
}

// Receivers read the bytes by the spec.
void check_geometry(const at::Tensor& tensor, const TensorSpec& spec) {
  TORCH_CHECK(tensor.sizes().equals(spec.sizes) && tensor.scalar_type() == spec.dtype,
              "step: expected to return a tensor of sizes ", at::IntArrayRef(spec.sizes), " and type ", spec.dtype,
              " as recorded, got ", tensor.sizes(), " and ", tensor.scalar_type(),
              ". An operator's shape was predicted wrongly: please report it with the operators of the body.");
}

using Messages = std::vector<std::unique_ptr<runtime::MessageBuffer>>;

// One exchange: every rank sends what it made to every other, as one message, in the order of the slots.
class Exchange {
 public:
  Exchange(const std::vector<runtime::MicrobatchRun>& runs, runtime::Transport& pipeline)
      : runs_(runs),
        pipeline_(pipeline),
        slots_(result_slots(runs)),
        bytes_(static_cast<size_t>(pipeline.size()), 0),
        messages_(std::make_shared<Messages>(bytes_.size())),
        returned_(runs.front().program->graph->returned.size(), std::vector<at::Tensor>(runs.size())) {
    for (const Slot& slot : slots_) bytes_[slot.owner] += slot.spec->num_bytes();
  }

  std::vector<std::vector<at::Tensor>> run(runtime::RankResults& results) {
    try {
      post_receives();
      take_own(results);
      send_own();
      for (auto& request : sent_) request.wait("step results");
      for (auto& [request, bytes] : received_) {
        const int64_t got = request.wait("step results");
        TORCH_CHECK(got == bytes, "step: expected ", bytes, " bytes of results, got ", got, ".");
      }
    } catch (...) {
      runtime::abandon(messages_);
      throw;
    }
    read_others();
    return std::move(returned_);
  }

 private:
  void post_receives() {
    for (int r = 0; r < pipeline_.size(); ++r) {
      if (r == pipeline_.rank() || bytes_[r] == 0) continue;
      auto& message = (*messages_)[r] = std::make_unique<runtime::MessageBuffer>(bytes_[r]);
      received_.emplace_back(pipeline_.irecv(r, runtime::kResultTag, message->memory(bytes_[r])), bytes_[r]);
    }
  }

  void take_own(runtime::RankResults& results) {
    auto& message = (*messages_)[pipeline_.rank()];
    if (pipeline_.size() > 1) message = std::make_unique<runtime::MessageBuffer>(bytes_[pipeline_.rank()]);
    size_t written = 0;
    for (const Slot& slot : slots_) {
      if (slot.owner != pipeline_.rank()) continue;
      at::Tensor tensor = own_copy(runs_[slot.microbatch], results[slot.microbatch], slot.value);
      tensor = tensor.to(runtime::this_ranks_device().current());  // also what the body has brought to the host
      check_geometry(tensor, *slot.spec);
      if (message) {
        message->device().copy(message->data() + written, runtime::data_of(tensor), static_cast<int64_t>(tensor.nbytes()));
        written += tensor.nbytes();
      }
      returned_[slot.position][slot.microbatch] = std::move(tensor);
    }
  }

  void send_own() {
    const int me = pipeline_.rank();
    for (int r = 0; r < pipeline_.size() && bytes_[me] > 0; ++r) {
      if (r == me) continue;
      sent_.push_back(pipeline_.isend(r, runtime::kResultTag, (*messages_)[me]->memory(bytes_[me])));
    }
  }

  void read_others() {
    std::vector<size_t> read(bytes_.size(), 0);
    for (const Slot& slot : slots_) {
      if (slot.owner == pipeline_.rank()) continue;
      const runtime::Device& device = runtime::this_ranks_device();
      at::Tensor tensor = device.empty(slot.spec->sizes, slot.spec->dtype);
      if (const auto bytes = static_cast<int64_t>(tensor.nbytes()); bytes > 0) {  // else there may be no message
        device.copy(runtime::memory_of(tensor).data, (*messages_)[slot.owner]->data() + read[slot.owner], bytes);
      }
      read[slot.owner] += tensor.nbytes();
      returned_[slot.position][slot.microbatch] = std::move(tensor);
    }
  }

  const std::vector<runtime::MicrobatchRun>& runs_;
  runtime::Transport& pipeline_;
  std::vector<Slot> slots_;
  std::vector<int64_t> bytes_;          // by pipeline rank
  std::shared_ptr<Messages> messages_;  // by pipeline rank
  std::vector<runtime::Request> sent_;
  std::vector<std::pair<runtime::Request, int64_t>> received_;  // and their bytes
  std::vector<std::vector<at::Tensor>> returned_;               // by position, by microbatch
};

}  // namespace

std::vector<StepOutput> exchange_results(const std::vector<runtime::MicrobatchRun>& runs, runtime::RankResults results,
                                         runtime::Transport& pipeline) {
  std::vector<StepOutput> outputs;
  for (auto& tensors : Exchange(runs, pipeline).run(results)) outputs.emplace_back(std::move(tensors));
  return outputs;
}

}  // namespace smp::engine
