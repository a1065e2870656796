// What varies is found first, by memory; the rest runs once.
#include "runtime/stage/constant_calls.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "runtime/capture/operator_info.h"
#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

class ConstantFolding {
 public:
  ConstantFolding(TapeLists& lists, Slots& fixed, bool takes_host_tensors)
      : lists_(lists), fixed_(fixed), takes_host_tensors_(takes_host_tensors && this_ranks_device().type != host().type) {
    for (const TapeBinding& input : lists.inputs) mark(input.slot);
    for (const TapeOwn& own : lists.own) {
      if (!is_number(own)) mark(own.slot);
    }
    for (const TapeBackward& backward : lists.backwards) {
      for (const int32_t slot : backward.roots) mark(slot);
    }
    for (const TapeCall& call : lists.calls) mark_written(call);
    while (marks_more()) {
    }
  }

  void run() {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowAutograd without_autograd;
    Slots slots(lists_.num_slots);
    for (const TapeOwn& own : lists_.own) {
      if (is_number(own)) slots[static_cast<size_t>(own.slot)] = own.tensor;
    }
    std::vector<TapeCall> kept;
    size_t num_folded = 0;
    for (size_t n = 0; n < lists_.calls.size(); ++n) {
      TapeCall& call = lists_.calls[n];
      if (!is_constant(n)) {
        kept.push_back(std::move(call));
        continue;
      }
      ++num_folded;
      any_argument(call, [this](int32_t slot) { return note_read(slot); });
      run(call, slots);
    }
    for (const TapeOwn& own : lists_.own) {
      if (is_number(own)) slots[static_cast<size_t>(own.slot)].reset();  // who else reads it finds it as before
    }
    const auto keep = [&](int32_t slot) {
      if (slot >= 0 && slots[static_cast<size_t>(slot)].defined())
        fixed_[static_cast<size_t>(slot)] = slots[static_cast<size_t>(slot)];
      return false;
    };
    for (const TapeCall& call : kept) any_argument(call, keep);
    std::for_each(lists_.outputs.begin(), lists_.outputs.end(), keep);
    for (const TapeBackward& backward : lists_.backwards)
      std::for_each(backward.results.begin(), backward.results.end(), keep);
    lists_.forward_end -= num_folded;
    for (TapeBackward& backward : lists_.backwards) backward.end -= num_folded;
    lists_.calls = std::move(kept);
  }

 private:
  bool is_number(const TapeOwn& own) const {
    return takes_host_tensors_ && own.slot >= 0 && !own.is_fixed && !own.is_written && is_on_host(own.tensor);
  }

  bool note_read(int32_t slot) {
    for (TapeOwn& own : lists_.own) own.is_folded = own.is_folded || (slot == own.slot && is_number(own));
    return false;
  }

  bool varies(int32_t slot) const {
    return slot >= 0 && varies_[static_cast<size_t>(lists_.slot_memories[static_cast<size_t>(slot)])];
  }

  // True where that is new.
  bool mark(int32_t slot) {
    if (slot < 0 || varies(slot)) return false;
    return varies_[static_cast<size_t>(lists_.slot_memories[static_cast<size_t>(slot)])] = true;
  }

  template <class Visit>
  static bool any_argument(const TapeCall& call, const Visit& visit) {
    bool any = false;
    for (const auto& tensor : call.tensors) any = visit(tensor.slot) || any;
    for (const auto& list : call.lists) {
      for (const int32_t slot : list.slots) any = visit(slot) || any;
    }
    return any;
  }

  // A call that writes, draws or gives nothing stays, and so does what makes or reads memory that is written to: folding
  // keeps no order.
  bool is_constant(size_t n) const {
    const TapeCall& call = lists_.calls[n];
    const auto varying = [this](int32_t slot) { return varies(slot); };
    return n < lists_.forward_end && call.kind != TapeCall::Kind::kGradient && !call.has_effect && !is_within_random_[n] &&
           !call.outputs.empty() && !any_argument(call, varying) &&
           std::none_of(call.outputs.begin(), call.outputs.end(), varying);
  }

  bool marks_more() {
    bool is_new = false;
    for (size_t n = 0; n < lists_.calls.size(); ++n) {
      if (is_constant(n)) continue;
      for (const int32_t slot : lists_.calls[n].outputs) is_new = mark(slot) || is_new;
    }
    return is_new;
  }

  void mark_written(const TapeCall& call) {
    if (call.kind != TapeCall::Kind::kOperator || !call.has_effect) return;
    const std::vector<bool>& is_written = operator_info(call.op).argument_written;
    for (const auto& tensor : call.tensors) {
      if (is_written[tensor.position]) mark(tensor.slot);
    }
    for (const auto& list : call.lists) {
      if (is_written[list.position])
        std::for_each(list.slots.begin(), list.slots.end(), [this](int32_t slot) { mark(slot); });
    }
  }

  static void run(const TapeCall& call, Slots& slots) {
    if (call.kind == TapeCall::Kind::kView) {
      const auto base = static_cast<size_t>(call.tensors.front().slot);
      slots[static_cast<size_t>(call.outputs.front())] = view_of(slots[base], call.geometry);
      return;
    }
    torch::jit::Stack stack;
    call.push(stack, slots);
    call.op.callBoxed(stack);
    call.store(stack, slots);
  }

  // Several operators may draw under one seed, one after the other.
  std::vector<bool> within_random() const {
    std::vector<bool> within(lists_.calls.size(), false);
    bool is_within = false;
    for (size_t n = 0; n < lists_.calls.size(); ++n) {
      is_within = is_within || lists_.calls[n].random_ordinal >= 0;
      within[n] = is_within;
      if (lists_.calls[n].ends_random) is_within = false;
    }
    return within;
  }

  TapeLists& lists_;
  Slots& fixed_;
  const bool takes_host_tensors_;
  std::vector<bool> varies_ = std::vector<bool>(lists_.num_slots, false);  // by memory; there are no more than slots
  std::vector<bool> is_within_random_ = within_random();
};

}  // namespace

void fold_constants(TapeLists& lists, Slots& fixed, bool takes_host_tensors) {
  ConstantFolding(lists, fixed, takes_host_tensors).run();
}

}  // namespace smp::runtime
