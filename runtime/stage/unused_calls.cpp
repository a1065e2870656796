// What need not run.
#include "runtime/stage/unused_calls.h"

#include <algorithm>
#include <numeric>

#include "partitioner/graph/operator_traits.h"

namespace smp::runtime {
namespace {

// All that might throw run although nobody uses their results: a check of singular
// matrices has none, and an index may be out of range.
bool may_be_dropped(const TapeLists& lists, const TapeCall& call) {
  if (call.kind == TapeCall::Kind::kView) return true;
  if (call.has_effect || call.kind == TapeCall::Kind::kGradient ||
      !has(partitioner::Trait::kNeverThrows, call.op.operator_name().name))
    return false;
  return std::all_of(call.outputs.begin(), call.outputs.end(), [&](int32_t slot) {  // integers divided by zero throw
    return slot < 0 || c10::isFloatingType(lists.slot_geometries[static_cast<size_t>(slot)].dtype);
  });
}

}  // namespace

// Backwards from what leaves the stage. What an operator that stays reads is needed too.
void drop_unused(TapeLists& lists) {
  std::vector<bool> needed(lists.num_slots, false), stays(lists.calls.size(), false);
  const auto need = [&needed](int32_t slot) {
    if (slot >= 0) needed[static_cast<size_t>(slot)] = true;
  };
  for (const int32_t slot : lists.outputs) need(slot);
  for (const TapeBackward& backward : lists.backwards) {
    for (const int32_t slot : backward.results) need(slot);
  }
  for (size_t n = lists.calls.size(); n-- > 0;) {
    const TapeCall& call = lists.calls[n];
    const bool is_used = std::any_of(call.outputs.begin(), call.outputs.end(),
                                     [&](int32_t slot) { return slot >= 0 && needed[static_cast<size_t>(slot)]; });
    stays[n] = is_used || !may_be_dropped(lists, call);
    if (!stays[n]) continue;
    for (const auto& tensor : call.tensors) need(tensor.slot);
    for (const auto& list : call.lists) std::for_each(list.slots.begin(), list.slots.end(), need);
  }
  std::vector<TapeCall> kept;
  std::vector<size_t> position(lists.calls.size() + 1);
  for (size_t n = 0; n < lists.calls.size(); ++n) {
    position[n] = kept.size();
    if (stays[n]) kept.push_back(std::move(lists.calls[n]));
  }
  position.back() = kept.size();
  lists.forward_end = position[lists.forward_end];
  for (TapeBackward& backward : lists.backwards) backward.end = position[backward.end];
  lists.calls = std::move(kept);
}

namespace {

// A view of a view is one of its base; a view with the geometry of its base is its base; a view of a fixed tensor is made
// once. What is left of them does nothing and is dropped afterwards.
class ViewFolding {
 public:
  ViewFolding(TapeLists& lists, Slots& fixed) : lists_(lists), fixed_(fixed), same_as_(lists.num_slots) {
    std::iota(same_as_.begin(), same_as_.end(), 0);
    base_of_ = same_as_;
    for (const TapeOwn& own : lists.own) {
      if (own.is_fixed && own.slot >= 0) fixed_[static_cast<size_t>(own.slot)] = own.tensor.detach();
    }
  }

  void run() {
    for (TapeCall& call : lists_.calls) {
      for (auto& tensor : call.tensors) rename(tensor.slot);
      for (auto& list : call.lists)
        std::for_each(list.slots.begin(), list.slots.end(), [this](int32_t& slot) { rename(slot); });
      if (call.kind == TapeCall::Kind::kView) fold(call);
      if (call.kind == TapeCall::Kind::kOperator) bake(call);
    }
    for (int32_t& slot : lists_.outputs) rename(slot);
    for (TapeBackward& backward : lists_.backwards) {
      for (int32_t& slot : backward.results) rename(slot);
    }
  }

 private:
  void rename(int32_t& slot) const {
    if (slot >= 0) slot = same_as_[static_cast<size_t>(slot)];
  }

  void fold(TapeCall& call) {
    int32_t& base = call.tensors.front().slot;
    const int32_t view = call.outputs.front();
    base = base_of_[static_cast<size_t>(base)];
    const bool is_same = call.geometry == lists_.slot_geometries[static_cast<size_t>(base)];
    if (is_same && !lists_.changes_geometry_in_place) {
      same_as_[static_cast<size_t>(view)] = base;
    } else if (const at::Tensor& of = fixed_[static_cast<size_t>(base)]; of.defined()) {
      fixed_[static_cast<size_t>(view)] = view_of(of, call.geometry);
    } else {
      base_of_[static_cast<size_t>(view)] = base;
      return;
    }
    call.outputs.clear();
  }

  void bake(TapeCall& call) const {
    std::erase_if(call.tensors, [&](const FlatCall::TensorArgument& tensor) {
      const at::Tensor& of = fixed_[static_cast<size_t>(tensor.slot)];
      if (of.defined()) call.arguments[tensor.position] = of;
      return of.defined();
    });
    // What an operator on a fixed tensor returns in place is that tensor.
    for (int32_t& slot : call.outputs) {
      if (slot >= 0 && fixed_[static_cast<size_t>(slot)].defined()) slot = -1;
    }
  }

  TapeLists& lists_;
  Slots& fixed_;
  std::vector<int32_t> same_as_;  // by slot
  std::vector<int32_t> base_of_;  // by slot; itself, for what is no view
};

}  // namespace

void fold_views(TapeLists& lists, Slots& fixed) { ViewFolding(lists, fixed).run(); }

}  // namespace smp::runtime
