// What the recorder checks and notes of autograd's part in the tensors that the body holds.
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/capture/recorder.h"

namespace smp::runtime {

using namespace partitioner;

void Recorder::check_made_here(const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.grad_fn() == nullptr, where(),
              ": expected operators of the step body only, got a tensor computed with gradients outside of it or on "
              "another thread. Its gradient would be lost: compute it inside the body, on the body's thread, or "
              "detach() it outside of the step.");
}

void Recorder::check_history(const at::Tensor& tensor, const Identity& known) const {
  if (history_of(tensor) != known.history) refuse_custom_function(tensor, where());
  const Value& first = recording_->graph.values[recording_->same_impl[known.value]];  // before it was written to
  if (is_trained(tensor) && !is_named(first)) refuse_trained(tensor, where());
}

// A custom function that writes in place changes tensors that no operator may see afterwards, only views of them.
void Recorder::check_histories() const {
  for (const auto& [impl, known] : identities_) {
    if (auto alive = known.impl.lock()) check_history(at::Tensor(std::move(alive)), known);
  }
}

void Recorder::note_histories(const Node& node) {
  const auto& written = node.written_storages;
  for (auto& [impl, known] : identities_) {
    if (written.empty()) return;
    const int32_t storage = recording_->graph.values[known.value].storage;
    if (std::find(written.begin(), written.end(), storage) == written.end()) continue;
    auto alive = known.impl.lock();
    if (!alive) continue;
    const at::Tensor tensor(std::move(alive));
    renew_history(tensor);
    known.history = history_of(tensor);
  }
}

}  // namespace smp::runtime
