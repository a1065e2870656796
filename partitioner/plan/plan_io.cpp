// Plans as exact JSON.
#include "partitioner/plan/plan_io.h"

#include "partitioner/graph/graph_json_io.h"
#include "partitioner/plan/derive.h"

namespace smp::partitioner {
namespace {

using namespace json_io;

constexpr size_t kMaxPlanDepth = 6;  // plan, table, column, action, number

json::value write_stage(const StagePlan& stage) {
  json::object fields{{"rank", stage.rank}};
  for (const auto& [name, us] : kStageTimes) fields[name] = bits_of(stage.cost.*us);
  for (const auto& [name, bytes] : kStageBytes) fields[name] = stage.cost.*bytes;
  return fields;
}

StagePlan read_stage(const json::value& value, const Where& where, int num_ranks) {
  Fields fields(value, where);
  StagePlan stage;
  stage.rank = static_cast<int>(read_integer(fields["rank"], where.at("rank"), 0, num_ranks - 1));
  for (const auto& [name, us] : kStageTimes) stage.cost.*us = read_bits(fields[name], where.at(name));
  for (const auto& [name, bytes] : kStageBytes) stage.cost.*bytes = read_integer(fields[name], where.at(name), 0);
  fields.expect_no_more();
  return stage;
}

json::value write_schedule(const ScheduleOptions& schedule) {
  return {{"kind", static_cast<int>(schedule.kind)},
          {"active_microbatches", schedule.active_microbatches},
          {"virtual_stages", schedule.virtual_stages}};
}

ScheduleOptions read_schedule(const json::value& value, const Where& where) {
  Fields fields(value, where);
  const auto integer = [&](std::string_view name, int64_t least, int64_t most) {
    return static_cast<int>(read_integer(fields[name], where.at(name), least, most));
  };
  ScheduleOptions schedule;
  schedule.kind = static_cast<ScheduleKind>(integer("kind", 0, static_cast<int>(kLastScheduleKind)));
  schedule.active_microbatches = integer("active_microbatches", 0, kMaxInt32);
  schedule.virtual_stages = integer("virtual_stages", 1, kMaxInt32);
  fields.expect_no_more();
  return schedule;
}

/// An action is three numbers: kind, stage and microbatch.
json::array write_table(const std::vector<std::vector<Action>>& table) {
  json::array columns;
  for (const auto& column : table) {
    json::array& actions = columns.emplace_back(json::array()).as_array();
    for (const Action& action : column) {
      actions.push_back(json::array{static_cast<int>(action.kind), action.stage, action.microbatch});
    }
  }
  return columns;
}

std::vector<std::vector<Action>> read_table(const json::value& value, const Where& where, int num_ranks) {
  std::vector<std::vector<Action>> table;
  const json::array& columns = read_array(value, where);
  if (!columns.empty() && columns.size() != static_cast<size_t>(num_ranks)) {
    refuse(where, "a column for each of " + std::to_string(num_ranks) + " ranks, or none", std::to_string(columns.size()));
  }
  for (const json::value& column : columns) {
    const Where actions = where.at(table.size());
    std::vector<Action>& read = table.emplace_back();
    for (const json::value& element : read_array(column, actions)) {
      const Where here = actions.at(read.size());
      const std::vector<int32_t> entry = read_ids(element, here, 0, kMaxInt32 - 1);  // microbatches are counted
      if (entry.size() != 3 || entry[0] >= static_cast<int32_t>(kNumComputations)) {
        refuse(here, "[computation, stage, microbatch]", describe(element));
      }
      read.push_back({static_cast<ActionKind>(entry[0]), entry[1], entry[2]});
    }
  }
  return table;
}

std::vector<NodeId> kept_nodes(const Recomputation& recomputation) {
  std::vector<NodeId> nodes;
  for (size_t n = 0; n < recomputation.is_kept.size(); ++n) {
    if (recomputation.is_kept[n]) nodes.push_back(static_cast<NodeId>(n));
  }
  return nodes;
}

/// Regions that could not be recomputed by themselves would give other numbers.
Recomputation read_recomputation(Fields& fields, const Where& where, const Graph& graph) {
  const auto num_nodes = static_cast<int32_t>(graph.nodes.size());
  Recomputation read;
  const Where regions = where.at("recompute_region"), kept = where.at("kept_in_region");
  read.region = read_ids(fields["recompute_region"], regions, kNoRegion, kMaxInt32 - 1);
  const std::vector<NodeId> nodes = read_ids(fields["kept_in_region"], kept, 0, num_nodes - 1);
  if (!read.region.empty()) read.is_kept.resize(graph.nodes.size(), false);
  if (read.region.size() != read.is_kept.size() || (read.region.empty() && !nodes.empty())) {
    refuse(regions, "a region for each of " + std::to_string(num_nodes) + " operators, or none",
           std::to_string(read.region.size()));
  }
  for (const NodeId n : nodes) read.is_kept[static_cast<size_t>(n)] = true;
  Recomputation possible = read;
  if (!read.is_empty()) make_possible(graph, possible);
  if (!(possible == read)) refuse(regions, "regions that cut no operators apart which must stay together", "others");
  return read;
}

}  // namespace

std::string serialise(const Plan& plan) {
  json::array stages;
  for (const StagePlan& stage : plan.stages) stages.push_back(write_stage(stage));
  return json::serialize(json::value{{"version", kFormatVersion},
                                     {"num_ranks", plan.num_ranks},
                                     {"schedule", write_schedule(plan.schedule)},
                                     {"table", write_table(plan.table)},
                                     {"exact_ties", plan.exact_ties},
                                     {"stages", std::move(stages)},
                                     {"stage_of_node", array_of(plan.stage_of_node)},
                                     {"recompute_region", array_of(plan.recomputation.region)},
                                     {"kept_in_region", array_of(kept_nodes(plan.recomputation))},
                                     {"predicted_step_us", bits_of(plan.predicted_step_us)},
                                     {"predicted_bubble", bits_of(plan.predicted_bubble)},
                                     {"lower_bound_us", bits_of(plan.lower_bound_us)},
                                     {"slowest_stage_us", bits_of(plan.slowest_stage_us)},
                                     {"predicted_peak_bytes", array_of(plan.predicted_peak_bytes)}});
}

Plan deserialise_plan(std::string_view text, const Graph& graph) {
  const Where where{.field = "plan"};
  const json::value value = parse(text, where, kMaxPlanDepth);
  Fields fields(value, where);
  read_integer(fields["version"], where.at("version"), kFormatVersion, kFormatVersion);
  Plan plan;
  plan.num_ranks = static_cast<int>(read_integer(fields["num_ranks"], where.at("num_ranks"), 1, kMaxInt32));
  plan.schedule = read_schedule(fields["schedule"], where.at("schedule"));
  plan.table = read_table(fields["table"], where.at("table"), plan.num_ranks);
  plan.exact_ties = read_bool(fields["exact_ties"], where.at("exact_ties"));
  const Where stages = where.at("stages");
  for (const json::value& stage : read_array(fields["stages"], stages)) {
    plan.stages.push_back(read_stage(stage, stages.at(plan.stages.size()), plan.num_ranks));
  }
  const auto num_stages = static_cast<int32_t>(plan.stages.size());
  plan.stage_of_node = read_ids(fields["stage_of_node"], where.at("stage_of_node"), 0, num_stages - 1);
  plan.recomputation = read_recomputation(fields, where, graph);
  plan.predicted_step_us = read_bits(fields["predicted_step_us"], where.at("predicted_step_us"));
  plan.predicted_bubble = read_bits(fields["predicted_bubble"], where.at("predicted_bubble"));
  plan.lower_bound_us = read_bits(fields["lower_bound_us"], where.at("lower_bound_us"));
  plan.slowest_stage_us = read_bits(fields["slowest_stage_us"], where.at("slowest_stage_us"));
  const Where peaks = where.at("predicted_peak_bytes");
  plan.predicted_peak_bytes = read_integers(fields["predicted_peak_bytes"], peaks, 0);
  if (plan.predicted_peak_bytes.size() != static_cast<size_t>(plan.num_ranks)) {
    refuse(peaks, "a number for each of " + std::to_string(plan.num_ranks) + " ranks",
           std::to_string(plan.predicted_peak_bytes.size()));
  }
  fields.expect_no_more();
  derive(graph, plan);
  return plan;
}

}  // namespace smp::partitioner
