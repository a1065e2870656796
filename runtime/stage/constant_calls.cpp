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
    std::vector<bool> stays(lists_.calls.size());
    for (size_t n = 0; n < lists_.calls.size(); ++n) {
      stays[n] = !is_constant(n);
      if (stays[n]) continue;
      for_each_read(lists_.calls[n], [this](int32_t slot) { note_read(slot); });
      run(lists_.calls[n], slots);
    }
    keep_calls(lists_, stays);
    for (const TapeOwn& own : lists_.own) {
      if (is_number(own)) slots[static_cast<size_t>(own.slot)].reset();  // who else reads it finds it as before
    }
    const auto keep = [&](int32_t slot) {
      const at::Tensor& made = slots[static_cast<size_t>(slot)];
      if (made.defined()) fixed_[static_cast<size_t>(slot)] = made;
    };
    for (const TapeCall& call : lists_.calls) for_each_read(call, keep);
    for_each_leaving(lists_, keep);
  }

 private:
  bool is_number(const TapeOwn& own) const {
    return takes_host_tensors_ && own.slot >= 0 && !own.is_fixed && !own.is_written && is_on_host(own.tensor);
  }

  void note_read(int32_t slot) {
    for (TapeOwn& own : lists_.own) own.is_folded = own.is_folded || (slot == own.slot && is_number(own));
  }

  void mark(int32_t slot) {
    if (slot >= 0) varies_[lists_.memory_of(slot)] = true;
  }

  // A call that writes, draws or gives nothing stays, and so does what makes or reads memory that is written to: folding
  // keeps no order.
  bool is_constant(size_t n) const {
    const TapeCall& call = lists_.calls[n];
    bool any_varies = false;
    const auto look = [&](int32_t slot) { any_varies = any_varies || varies_[lists_.memory_of(slot)]; };
    for_each_read(call, look);
    for_each_made(call, look);
    return n < lists_.forward_end && call.kind != TapeCall::Kind::kGradient && !call.has_effect && !is_within_random_[n] &&
           !call.outputs.empty() && !any_varies;
  }

  bool marks_more() {
    const std::vector<bool> before = varies_;
    for (size_t n = 0; n < lists_.calls.size(); ++n) {
      if (!is_constant(n)) for_each_made(lists_.calls[n], [this](int32_t slot) { mark(slot); });
    }
    return varies_ != before;
  }

  void mark_written(const TapeCall& call) {
    if (call.kind != TapeCall::Kind::kOperator || !call.has_effect) return;
    const std::vector<bool>& is_written = operator_info(call.op).argument_written;
    for (const auto& tensor : call.tensors) {
      if (is_written[tensor.position]) mark(tensor.slot);
    }
    for (const auto& list : call.lists) {
      if (is_written[list.position]) for_each_slot(list.slots, [this](int32_t slot) { mark(slot); });
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
