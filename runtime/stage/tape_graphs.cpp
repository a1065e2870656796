// Recording, replaying, and when not to.
#include "runtime/stage/tape_graphs.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/libtorch/memory_tensor.h"
#include "runtime/libtorch/sole_owner.h"
#include "runtime/stage/gradient_sum.h"

namespace smp::runtime {

using partitioner::TensorSpec;

namespace {

constexpr int64_t kSameTensor = -1;  // in the place of a number of bytes

}  // namespace

/// What was recorded of one stretch of the lists.
struct TapeGraphs::Part {
  std::unique_ptr<DeviceGraph> graph;
  std::vector<at::Tensor> made;  // what goes out
  Slots left;                    // behind it
};

class TapeGraphs::Lane {
 public:
  bool is_free = false;
  std::vector<Place> inputs, own, roots;
  std::unique_ptr<Part> forward;
  std::map<Turn, std::unique_ptr<Part>> backward;
  std::map<std::pair<const Part*, Turn>, std::unique_ptr<Part>> weights;  // behind which backward
  const DeviceGraph* last_recorded = nullptr;
  const Part* last = nullptr;  // that ran
};

namespace {

const std::function<void()> kNoProgress;
const OperatorTimer kNoTimer;

Tape::RunContext recording_in(DeviceGraph& graph) {
  static const RandomState none;
  return {.random = none, .microbatch = 0, .progress = kNoProgress, .timer = kNoTimer, .graph = &graph};
}

at::Tensor with_storage_of(int64_t num_bytes, const TensorSpec& geometry) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(geometry.dtype));
  const auto options = at::TensorOptions(geometry.dtype).device(this_ranks_device().type);
  at::Tensor tensor = at::empty({(num_bytes + element_bytes - 1) / element_bytes}, options);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.storage_offset);
  return tensor;
}

// A copy of memory, so that strides, and what lies between the elements, are those of the original.
at::Tensor taken_out(const at::Tensor& tensor) {
  if (!tensor.defined() || is_on_host(tensor)) return tensor;  // the host's work is no part of a graph: always this one
  const TensorSpec geometry = geometry_of(tensor);
  const int64_t num_bytes = extent_bytes(geometry);
  at::Tensor copy = with_storage_of(num_bytes, geometry);
  this_ranks_device().start_copy(const_cast<void*>(data_of(copy.storage())), data_of(tensor.storage()), num_bytes);
  if (tensor.is_conj()) copy._set_conj(true);
  if (tensor.is_neg()) copy._set_neg(true);
  return copy;
}

std::vector<at::Tensor> taken_out(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(taken_out(tensor));
  return copies;
}

}  // namespace

TapeGraphs::TapeGraphs(std::shared_ptr<Tape> tape) : tape_(std::move(tape)), memory_bytes_(memory_bytes(tape_->lists())) {
  const TapeLists& lists = tape_->lists();
  if (lists.backwards.size() > 1) refusal_ = "several backwards in one body";
  for (const TapeCall& call : lists.calls) {
    // Its seed is on the device within a graph, and on the host outside of one.
    if (call.random_ordinal >= 0 && call.draws == Draws::kByElement) refusal_ = "an attention with dropout";
  }
  if (lists.remakes_random) refusal_ = "random numbers that are drawn again";  // in another order than the operators'
  for (const TapeOwn& own : lists.own) {
    if (own.is_written && is_on_host(own.tensor)) refusal_ = "writes to a tensor of the host";
  }
  if (lists.backwards.size() != 1) return;
  for (size_t n = lists.forward_end; n < lists.calls.size(); ++n) {
    if (lists.calls[n].kind != TapeCall::Kind::kGradient) continue;
    auto& parameters = n < lists.backwards[0].results_end ? of_backward_ : of_weights_;
    parameters.push_back(static_cast<size_t>(lists.calls[n].parameter));
  }
}

TapeGraphs::~TapeGraphs() = default;

TapeGraphs::Place TapeGraphs::place_for(int32_t slot, const TensorSpec& geometry) const {
  if (slot < 0) return {};
  const int64_t num_bytes = memory_bytes_[tape_->lists().memory_of(slot)];
  return {.tensor = with_storage_of(num_bytes, geometry), .num_bytes = num_bytes};
}

// Kernels take other ways through data that are not aligned, with other bits.
bool TapeGraphs::can_take(const Place& place, const at::Tensor& tensor) {
  constexpr uintptr_t kWidestAccess = 16;
  if (!place.tensor.defined()) return place.data == nullptr || data_of(tensor) == place.data;
  if (place.num_bytes == kSameTensor) return tensor.is_same(place.tensor);
  return tensor.defined() && is_on_host(tensor) == is_on_host(place.tensor) &&
         tensor.storage_offset() == place.tensor.storage_offset() && tensor.is_conj() == false && tensor.is_neg() == false &&
         static_cast<int64_t>(tensor.storage().nbytes()) >= place.num_bytes &&
         reinterpret_cast<uintptr_t>(data_of(tensor.storage())) % kWidestAccess == 0;
}

void TapeGraphs::take(const Place& place, const at::Tensor& tensor) {
  if (!place.tensor.defined() || place.num_bytes == kSameTensor) return;
  void* const to = const_cast<void*>(data_of(place.tensor.storage()));
  this_ranks_device().start_copy(to, data_of(tensor.storage()), place.num_bytes);
}

TapeGraphs::Lane& TapeGraphs::free_lane() {
  for (auto& lane : lanes_) {
    if (lane->is_free) return *lane;
  }
  const TapeLists& lists = tape_->lists();
  auto lane = std::make_unique<Lane>();
  for (const TapeBinding& input : lists.inputs) lane->inputs.push_back(place_for(input.slot, input.geometry));
  for (const TapeOwn& own : lists.own) {
    const bool is_of_host = is_on_host(own.tensor);  // what kernels read of it is part of the graph
    lane->own.push_back(own.slot < 0   ? Place()
                        : own.is_fixed ? Place{.data = data_of(own.tensor)}
                        : is_of_host   ? Place{.tensor = own.tensor, .num_bytes = kSameTensor}
                                       : place_for(own.slot, own.geometry));
  }
  for (size_t i = 0; !lists.backwards.empty() && i < lists.backwards[0].roots.size(); ++i) {
    lane->roots.push_back(place_for(lists.backwards[0].roots[i], lists.backwards[0].root_geometries[i]));
  }
  lane->is_free = true;
  return *lanes_.emplace_back(std::move(lane));
}

TapeGraphs::Recorded TapeGraphs::record(Lane& lane, Part& part, const DeviceGraph* before,
                                        const std::function<void(DeviceGraph&)>& work) {
  part.graph = this_ranks_device().new_graph(before);
  try {
    const GeneratorHold hold;  // a recording draws from the default generator, in its own way
    part.graph->record([&] { work(*part.graph); });
  } catch (const std::exception& error) {  // also of the program's own operators
    const auto* const of_libtorch = dynamic_cast<const c10::Error*>(&error);
    // What runs without graphs has left memory that LibTorch's allocator keeps, and gives nobody while it records.
    const bool finds_no_memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
    if (finds_no_memory && !std::exchange(has_made_room_, true)) {
      part.graph.reset();
      this_ranks_device().release_free_memory();
      return Recorded::kNotYet;
    }
    refusal_ = of_libtorch != nullptr ? of_libtorch->what_without_backtrace() : error.what();
    part.graph.reset();
    sums_.clear();  // some may have been begun in it, and not been made
    return Recorded::kNo;
  }
  lane.last_recorded = part.graph.get();
  has_made_room_ = false;
  return Recorded::kYes;
}

std::shared_ptr<TapeGraphs::Lane> TapeGraphs::forward(const std::vector<at::Tensor>& inputs,
                                                      const std::vector<at::Tensor>& own, const RandomState& random,
                                                      std::vector<at::Tensor>& outputs) {
  const auto is_of_host = [](const at::Tensor& input) { return input.defined() && is_on_host(input); };
  if (std::any_of(inputs.begin(), inputs.end(), is_of_host)) refusal_ = "a tensor of the host that comes in";
  if (!refusal_.empty()) return nullptr;
  Lane& lane = free_lane();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!can_take(lane.inputs[i], inputs[i])) return nullptr;
  }
  for (size_t i = 0; i < own.size(); ++i) {
    if (!can_take(lane.own[i], own[i])) return nullptr;
  }
  for (size_t i = 0; i < inputs.size(); ++i) take(lane.inputs[i], inputs[i]);
  for (size_t i = 0; i < own.size(); ++i) take(lane.own[i], own[i]);
  while (!lane.forward) {
    auto part = std::make_unique<Part>();
    std::vector<at::Tensor> places, own_places;
    for (const Place& place : lane.inputs) places.push_back(place.tensor);
    for (size_t i = 0; i < own.size(); ++i) own_places.push_back(lane.own[i].tensor.defined() ? lane.own[i].tensor : own[i]);
    const Recorded recorded = record(lane, *part, lane.last_recorded, [&](DeviceGraph& graph) {
      part->made = tape_->forward(part->left, places, own_places, recording_in(graph));
    });
    if (recorded == Recorded::kNo) return nullptr;
    if (recorded == Recorded::kYes) lane.forward = std::move(part);
  }
  lane.forward->graph->replay(random_stream(random));
  lane.last = lane.forward.get();
  lane.is_free = false;
  outputs = taken_out(lane.forward->made);
  return {&lane, [self = shared_from_this()](Lane* done) { done->is_free = true; }};
}

Slots TapeGraphs::slots_of(const Lane& lane) { return lane.last->left; }

// The first that is recorded becomes the sum, in the layout that AccumulateGrad gives it; all others are copied to its
// place.
void TapeGraphs::begin_sum(size_t own, at::Tensor gradient) {
  Sum& sum = sums_[own];
  const at::Tensor& parameter = tape_->lists().own[own].tensor;
  if (sum.tensor.defined()) {
    sum.tensor.copy_(gradient);
    return;
  }
  const bool can_be_it = is_sole_owner(gradient) && torch::autograd::utils::obeys_layout_contract(gradient, parameter);
  sum.tensor = can_be_it ? std::move(gradient) : torch::autograd::utils::clone_obey_contract(gradient, parameter);
  sum.data = data_of(sum.tensor);
  sum.geometry = geometry_of(sum.tensor);
}

// The program may give a tensor that it has as .grad other memory; graphs go on to write where it was.
bool TapeGraphs::are_sums_in_place(const std::vector<size_t>& parameters) {
  for (const size_t own : parameters) {
    const auto sum = sums_.find(own);
    if (sum == sums_.end()) continue;
    const at::Tensor& tensor = sum->second.tensor;
    if (data_of(tensor) == sum->second.data && fits(tensor, sum->second.geometry)) continue;
    refusal_ = "a gradient whose tensor has been given other memory, or another shape in place";
    return false;
  }
  return true;
}

TapeGraphs::Turn TapeGraphs::turn_of(const std::vector<size_t>& parameters) const {
  size_t num_without = 0;
  for (const size_t own : parameters) {
    const at::Tensor& gradient = tape_->lists().own[own].tensor.grad();
    const auto sum = sums_.find(own);
    if (!gradient.defined()) {
      const bool is_kept_elsewhere = sum != sums_.end() && !is_sole_owner(sum->second.tensor);
      if (is_kept_elsewhere) return Turn::kNeither;
      ++num_without;
    } else if (sum == sums_.end() || !gradient.is_same(sum->second.tensor)) {
      return Turn::kNeither;
    }
  }
  if (num_without == 0) return Turn::kAdds;
  return num_without == parameters.size() ? Turn::kFirst : Turn::kNeither;
}

GradientSink TapeGraphs::sink_for(Turn turn, std::vector<char>& is_begun) {
  is_begun.assign(tape_->lists().own.size(), static_cast<char>(turn == Turn::kAdds));
  return [this, &is_begun](size_t own, at::Tensor gradient) {
    TORCH_CHECK(gradient.layout() == at::kStrided, "a sparse gradient");
    if (!std::exchange(is_begun[own], char{1})) return begin_sum(own, std::move(gradient));
    sums_.at(own).tensor.add_(gradient);
  };
}

TapeGraphs::Part* TapeGraphs::run_part(Lane& lane, std::unique_ptr<Part>& part, Turn turn,
                                       const std::vector<size_t>& parameters, const RandomState& random,
                                       const std::function<void(Part&, const GradientSink&, DeviceGraph&)>& work) {
  const at::NoGradGuard no_grad;
  while (!part) {
    auto fresh = std::make_unique<Part>();
    fresh->left = lane.last->left;
    const std::map<size_t, Sum> sums = sums_;
    std::vector<char> is_begun;
    const GradientSink sink = sink_for(turn, is_begun);
    // Sums outlive the microbatch: in memory that an earlier graph has freed, that graph would write over them when it runs
    // again.
    const DeviceGraph* before = turn == Turn::kFirst ? nullptr : lane.last_recorded;
    const Recorded recorded = record(lane, *fresh, before, [&](DeviceGraph& graph) { work(*fresh, sink, graph); });
    if (recorded == Recorded::kNo) return nullptr;
    if (recorded == Recorded::kYes) {
      part = std::move(fresh);
    } else {
      sums_ = sums;
    }
  }
  part->graph->replay(random_stream(random));
  lane.last = part.get();
  for (const size_t own : parameters) {
    const at::Tensor& parameter = tape_->lists().own[own].tensor;
    if (!parameter.grad().defined()) parameter.mutable_grad() = sums_.at(own).tensor;
    tell_accumulated(parameter, {});
  }
  return part.get();
}

bool TapeGraphs::leave() {
  left_ =
      "gradients of other tensors are there before the first backward (zero_grad(set_to_none=true) clears them), or kept";
  return false;
}

bool TapeGraphs::backward(Lane& lane, const std::vector<at::Tensor>& gradients, const RandomState& random,
                          std::vector<at::Tensor>& results) {
  if (!refusal_.empty()) return false;
  const TapeBackward& backward = tape_->lists().backwards[0];
  for (size_t i = 0; i < gradients.size(); ++i) {
    const bool is_alike = gradients[i].defined() == backward.has_root[i];
    const bool fits_in = backward.roots[i] < 0 || fits(gradients[i], backward.root_geometries[i]);
    if (!is_alike || !fits_in || !can_take(lane.roots[i], gradients[i])) return false;
  }
  if (!are_sums_in_place(of_backward_)) return false;
  const Turn turn = turn_of(of_backward_);
  if (turn == Turn::kNeither) return leave();
  for (size_t i = 0; i < gradients.size(); ++i) take(lane.roots[i], gradients[i]);
  const auto work = [&](Part& part, const GradientSink& sink, DeviceGraph& graph) {
    std::vector<at::Tensor> roots;
    for (size_t i = 0; i < gradients.size(); ++i) {
      roots.push_back(lane.roots[i].tensor.defined() ? lane.roots[i].tensor : gradients[i]);
    }
    part.made = tape_->backward(part.left, 0, std::move(roots), recording_in(graph), sink);
  };
  const Part* part = run_part(lane, lane.backward[turn], turn, of_backward_, random, work);
  if (part == nullptr) return false;
  results = taken_out(part->made);
  return true;
}

bool TapeGraphs::weight_gradients(Lane& lane, const RandomState& random) {
  if (!refusal_.empty() || !are_sums_in_place(of_weights_)) return false;
  const Turn turn = turn_of(of_weights_);
  if (turn == Turn::kNeither) return leave();
  const auto work = [&](Part& part, const GradientSink& sink, DeviceGraph& graph) {
    tape_->weight_gradients(part.left, recording_in(graph), sink);
  };
  return run_part(lane, lane.weights[{lane.last, turn}], turn, of_weights_, random, work) != nullptr;
}

}  // namespace smp::runtime
