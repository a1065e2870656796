// Prints a schedule as the table of the documentation.
#include "partitioner/schedule/schedule.h"

#include <algorithm>
#include <optional>
#include <set>

namespace smp::partitioner {
namespace {

/// The one stage that the column computes, if it is one.
std::optional<int> only_stage(const std::vector<Action>& column) {
  std::set<int> stages;
  for (const Action& action : column) {
    if (action.is_compute()) stages.insert(action.stage);
  }
  if (stages.size() != 1) return std::nullopt;
  return *stages.begin();
}

std::string row(const std::vector<Action>& column, std::optional<int> stage, TableContent content) {
  std::string text;
  const Action* before = nullptr;
  for (const Action& action : column) {
    if (content == TableContent::kCompute) {
      if (!action.is_compute()) continue;
      const bool is_shown = action.kind != ActionKind::kWeightGradient || before == nullptr ||
                            *before != Action{ActionKind::kBackward, action.stage, action.microbatch};
      before = &action;
      if (!is_shown) continue;
    }
    text += ' ';
    text += action.stage == stage ? to_string_within_stage(action) : to_string(action);
  }
  return text;
}

}  // namespace

int Schedule::send_limit(const Action& send) const {
  // The stage that runs its backward when all that it sent has come back.
  const int holder = send.is_activation() ? std::max(send.stage, 0) : send.peer;
  return in_flight_limits[static_cast<size_t>(holder)] + 1;
}

std::string Schedule::to_table(TableContent content) const {
  std::vector<std::optional<int>> stages;
  for (const auto& column : columns) stages.push_back(only_stage(column));
  const bool one_stage_each = std::all_of(stages.begin(), stages.end(), [](const auto& stage) { return stage.has_value(); });
  std::vector<std::string> labels;
  size_t width = 0;
  for (size_t rank = 0; rank < columns.size(); ++rank) {
    labels.push_back(std::to_string(one_stage_each ? *stages[rank] : static_cast<int>(rank)));
    width = std::max(width, labels.back().size());
  }
  std::string table;
  for (size_t rank = 0; rank < columns.size(); ++rank) {
    table += one_stage_each ? "stage " : "rank ";
    table += std::string(width - labels[rank].size(), ' ') + labels[rank] + " |";
    table += row(columns[rank], one_stage_each ? stages[rank] : std::nullopt, content) + "\n";
  }
  return table;
}

}  // namespace smp::partitioner
