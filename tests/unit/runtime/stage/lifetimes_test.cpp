// From when to when slots hold tensors, and what tapes free by that.
#include "runtime/stage/lifetimes.h"

#include <gtest/gtest.h>

#include "runtime/stage/tape.h"
#include "tests/support/bits.h"
#include "tests/unit/runtime/stage/hand_made_tape.h"

namespace smp::runtime {
namespace {

using ListOfSlots = std::vector<int32_t>;
using ListsOfSlots = std::vector<ListOfSlots>;

class SlotLifetimes : public stage_graphs::HandMadeTape {
 protected:
  Lifetimes lifetimes() const { return {lists_.num_slots, lists_.calls}; }

  const int32_t x_ = slot(), a_ = slot(), y_ = slot();
};

TEST_F(SlotLifetimes, BeginWithWhatMakesTheSlotAndEndWithItsLastReader) {
  const int32_t unread = slot(), unused = slot();
  call("aten::mul", "Tensor", {x_, x_}, {a_});
  call("aten::cat", "", {}, {y_, -1, unread}).lists = {{.position = 0, .slots = {a_, -1, x_}}};
  call("aten::neg", "", {y_}, {-1});
  EXPECT_EQ(lifetimes().before, ListOfSlots{x_});
  EXPECT_EQ(lifetimes().begins, (ListsOfSlots{{a_}, {y_, unread}, {}}));
  EXPECT_EQ(lifetimes().ends, (ListsOfSlots{{}, {x_, a_, unread}, {y_}}));
  EXPECT_EQ(lifetimes().last.at(static_cast<size_t>(unused)), -1);
}

TEST_F(SlotLifetimes, AreAsManyAsTheSlotIsMadeAnew) {
  call("aten::mul", "Tensor", {x_, x_}, {a_});
  call("aten::neg", "", {a_}, {y_});
  call("aten::neg", "", {y_}, {-1});
  call("aten::mul", "Tensor", {x_, x_}, {a_});
  call("aten::neg", "", {x_}, {a_});
  EXPECT_EQ(lifetimes().begins, (ListsOfSlots{{a_}, {y_}, {}, {a_}, {a_}}));
  EXPECT_EQ(lifetimes().ends, (ListsOfSlots{{}, {a_}, {y_}, {a_}, {x_, a_}}));
}

TEST_F(SlotLifetimes, GoOnWhereACallWritesToWhatItReads) {
  call("aten::mul", "Tensor", {x_, x_}, {a_});
  call("aten::add_", "Tensor", {a_, x_}, {a_}).has_effect = true;
  call("aten::neg", "", {a_}, {y_});
  EXPECT_EQ(lifetimes().begins, (ListsOfSlots{{a_}, {}, {y_}}));
  EXPECT_EQ(lifetimes().ends, (ListsOfSlots{{}, {x_}, {a_, y_}}));
}

TEST_F(SlotLifetimes, MemoriesAreAsLargeAsTheirWidestSlot) {
  const int32_t row = slot(at::ones({2, 6})[1]);
  lists_.slot_memories[static_cast<size_t>(row)] = a_;
  EXPECT_EQ(memory_bytes(lists_), (std::vector<int64_t>{16, 48, 16}));
}

/// y = -(x * x), of which the backward computes the product once more: result = root * (x * x).
class RemadeProduct : public SlotLifetimes {
 protected:
  RemadeProduct() {
    call("aten::mul", "Tensor", {x_, x_}, {a_});
    call("aten::neg", "", {a_}, {y_});
    lists_.forward_end = 2;
    call("aten::mul", "Tensor", {x_, x_}, {a_});
    call("aten::mul", "Tensor", {root_, a_}, {result_});
    lists_.inputs = {{.value = 0, .slot = x_, .geometry = geometry_of(at::ones({4}))}};
    lists_.outputs = {y_};
    lists_.backwards = {{.end = 4,
                         .roots = {root_},
                         .root_geometries = {geometry_of(at::ones({4}))},
                         .has_root = {true},
                         .results = {result_},
                         .freed = {}}};
  }
  const int32_t root_ = slot(), result_ = slot();
  const partitioner::Graph graph_{};
};

TEST_F(RemadeProduct, IsFreedBetweenForwardAndBackward) {
  const Tape tape(lists_, graph_);
  const TapeLists& lists = tape.lists();
  ASSERT_EQ(lists.calls.size(), 4U);
  std::vector<ListOfSlots> freed;
  for (const TapeCall& call : lists.calls) freed.push_back(call.freed);
  EXPECT_EQ(freed, (ListsOfSlots{{}, {a_}, {x_}, {a_, root_}}));
  EXPECT_EQ(lists.freed, ListOfSlots{y_});
  EXPECT_EQ(lists.backwards[0].freed, ListOfSlots{result_});
}

TEST_F(RemadeProduct, GivesTheSameNumbersAndLeavesNothing) {
  Tape tape(lists_, graph_);
  const std::function<void()> progress;
  const OperatorTimer timer;
  const Tape::RunContext context{.random = {}, .microbatch = 0, .progress = progress, .timer = timer};
  Slots slots;
  const at::Tensor x = at::ones({4}).mul(3);
  support::expect_bit_equal(tape.forward(slots, {x}, {}, context).at(0), x.mul(x).neg(), "forward");
  EXPECT_FALSE(slots[static_cast<size_t>(a_)].defined()) << "kept for the backward, which makes it anew";
  const auto none = [](size_t, const at::Tensor&) {};
  support::expect_bit_equal(tape.backward(slots, 0, {at::ones({4})}, context, none).at(0), x.mul(x), "backward");
  for (size_t slot = 0; slot < slots.size(); ++slot) EXPECT_FALSE(slots[slot].defined()) << "slot " << slot;
}

}  // namespace
}  // namespace smp::runtime
