// One entry of a schedule: what a rank does next, and the table of all kinds of it. Plain data; knows no tensors and no
// transport.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace smp::partitioner {

/// The rows of kActionRows, in their order.
enum class ActionKind : uint8_t {
  kForward,
  kBackward,
  kWeightGradient,
  kSendActivation,
  kReceiveActivation,
  kSendGradient,
  kReceiveGradient,
};

/// What a stage has of one microbatch between two actions.
enum class Item : uint8_t {
  kNone,
  kInputs,           // values of other stages, or of the step
  kOutputs,          // values for other stages
  kSaved,            // what its backward wants
  kOutputGradients,  // from other stages
  kInputGradients,   // for other stages
  kRest,             // what is left of a backward behind the gradients that leave
  kWeightGradients,  // of the stage's parameters, for replicas and optimizers
};

constexpr bool holds(const std::array<Item, 2>& items, Item item) {
  return item != Item::kNone && (items[0] == item || items[1] == item);
}

/// One kind of action. A new kind is a row here, and a case of each switch over ActionKind, which the compiler asks for.
struct ActionRow {
  enum class Role : uint8_t { kCompute, kSend, kReceive };
  ActionKind kind;
  std::string_view name;
  char letter;  // of the computation, or of the one whose results travel
  Role role;
  bool is_forward;            // of the forward direction: the others belong to a backward
  std::array<Item, 2> reads;  // each must be there: dependencies.h
  std::array<Item, 2> makes;
  Item frees;  // held until then, as what is left of a backward may want all of it: what limits in flight count
};

constexpr std::array<ActionRow, 7> action_rows() {
  using enum ActionKind;
  using enum ActionRow::Role;
  using enum Item;
  // clang-format off
  return {{
      {kForward, "forward", 'F', kCompute, true, {kInputs}, {kOutputs, kSaved}, kNone},
      {kBackward, "backward", 'B', kCompute, false, {kSaved, kOutputGradients}, {kInputGradients, kRest}, kNone},
      {kWeightGradient, "weight gradient", 'W', kCompute, false, {kRest}, {kWeightGradients}, kSaved},
      {kSendActivation, "send F", 'F', kSend, true, {kOutputs}, {}, kNone},
      {kReceiveActivation, "receive F", 'F', kReceive, true, {}, {kInputs}, kNone},
      {kSendGradient, "send B", 'B', kSend, false, {kInputGradients}, {}, kNone},
      {kReceiveGradient, "receive B", 'B', kReceive, false, {}, {kOutputGradients}, kNone},
  }};
  // clang-format on
}
inline constexpr std::array<ActionRow, 7> kActionRows = action_rows();
inline constexpr size_t kNumComputations = 3;  // the first rows

constexpr const ActionRow& row_of(ActionKind kind) { return kActionRows[static_cast<size_t>(kind)]; }

inline constexpr int kInputStage = -1;

/// One action of one rank, for one microbatch.
///
/// A transfer moves, in one go, every value that the plan lists between its two stages for that
/// microbatch. The step's inputs are sent by pipeline rank 0 under `stage == kInputStage` (-1).
struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;  // the stage that performs it
  int microbatch = 0;
  int peer = -1;  // transfers: the stage at the other end; -1 (kInputStage): the leader's step inputs

  constexpr const ActionRow& row() const { return row_of(kind); }
  bool is_compute() const { return row().role == ActionRow::Role::kCompute; }
  bool is_send() const { return row().role == ActionRow::Role::kSend; }
  bool is_receive() const { return row().role == ActionRow::Role::kReceive; }
  bool is_forward() const { return row().is_forward; }
  bool operator==(const Action&) const = default;
};

struct ActionHash {
  size_t operator()(const Action& action) const;
};

/// "2F0": stage 2, forward of microbatch 0. Sends "2F0>3" (to stage 3), receives "3<2F0" (from
/// stage 2), gradients with B; the step inputs are stage "in": "inF0>3", "3<inF0".
std::string to_string(const Action& action);

}  // namespace smp::partitioner
