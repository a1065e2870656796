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
  const auto need = [&needed](int32_t slot) { needed[static_cast<size_t>(slot)] = true; };
  for_each_leaving(lists, need);
  for (size_t n = lists.calls.size(); n-- > 0;) {
    bool is_used = false;
    for_each_made(lists.calls[n], [&](int32_t slot) { is_used = is_used || needed[static_cast<size_t>(slot)]; });
    stays[n] = is_used || !may_be_dropped(lists, lists.calls[n]);
    if (stays[n]) for_each_read(lists.calls[n], need);
  }
  keep_calls(lists, stays);
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
    const auto rename = [this](int32_t& slot) { slot = same_as_[static_cast<size_t>(slot)]; };
    for (TapeCall& call : lists_.calls) {
      for_each_read(call, rename);
      if (call.kind == TapeCall::Kind::kView) fold(call);
      if (call.kind == TapeCall::Kind::kOperator) bake(call);
    }
    for_each_leaving(lists_, rename);
  }

 private:
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
    for_each_made(call, [this](int32_t& slot) {
      if (fixed_[static_cast<size_t>(slot)].defined()) slot = -1;
    });
  }

  TapeLists& lists_;
  Slots& fixed_;
  std::vector<int32_t> same_as_;  // by slot
  std::vector<int32_t> base_of_;  // by slot; itself, for what is no view
};

}  // namespace

void fold_views(TapeLists& lists, Slots& fixed) { ViewFolding(lists, fixed).run(); }

}  // namespace smp::runtime
