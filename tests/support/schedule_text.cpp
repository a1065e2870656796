// Prints a schedule as the table of the documentation.
#include "tests/support/schedule_text.h"

#include <algorithm>
#include <optional>
#include <set>

namespace smp::support {
namespace {

using namespace partitioner;

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
    text += to_string(action).substr(action.stage == stage ? std::to_string(action.stage).size() : 0);
  }
  return text;
}

}  // namespace

std::string to_table(const Schedule& schedule, TableContent content) {
  std::vector<std::optional<int>> stages;
  for (const auto& column : schedule.columns) stages.push_back(only_stage(column));
  const bool one_stage_each = std::all_of(stages.begin(), stages.end(), [](const auto& stage) { return stage.has_value(); });
  std::vector<std::string> labels;
  size_t width = 0;
  for (size_t rank = 0; rank < schedule.columns.size(); ++rank) {
    labels.push_back(std::to_string(one_stage_each ? *stages[rank] : static_cast<int>(rank)));
    width = std::max(width, labels.back().size());
  }
  std::string table;
  for (size_t rank = 0; rank < schedule.columns.size(); ++rank) {
    table += one_stage_each ? "stage " : "rank ";
    table += std::string(width - labels[rank].size(), ' ') + labels[rank] + " |";
    table += row(schedule.columns[rank], one_stage_each ? stages[rank] : std::nullopt, content) + "\n";
  }
  return table;
}

}  // namespace smp::support
