// Plans as exact JSON.
#include "partitioner/plan/plan_io.h"

#include "partitioner/graph/graph_json_io.h"

namespace smp::partitioner {
namespace {

using namespace json_io;

constexpr size_t kMaxPlanDepth = 6;  // plan, stages, stage, nodes, number

template <typename Numbers>
json::array array_of(const Numbers& numbers) {
  json::array array;
  for (const auto& number : numbers) array.emplace_back(number);
  return array;
}

json::value write_cost(const StageCost& cost) {
  return {{"forward_us", bits_of(cost.forward_us)},  {"backward_us", bits_of(cost.backward_us)},
          {"weight_us", bits_of(cost.weight_us)},    {"send_us", bits_of(cost.send_us)},
          {"parameter_bytes", cost.parameter_bytes}, {"gradient_bytes", cost.gradient_bytes},
          {"optimizer_bytes", cost.optimizer_bytes}, {"activation_bytes", cost.activation_bytes},
          {"workspace_bytes", cost.workspace_bytes}, {"message_bytes", cost.message_bytes}};
}

StageCost read_cost(const json::value& value, const Where& where) {
  Fields fields(value, where);
  const auto microseconds = [&](std::string_view name) { return read_bits(fields[name], where.at(name)); };
  const auto bytes = [&](std::string_view name) { return read_integer(fields[name], where.at(name), 0); };
  StageCost cost;
  cost.forward_us = microseconds("forward_us");
  cost.backward_us = microseconds("backward_us");
  cost.weight_us = microseconds("weight_us");
  cost.send_us = microseconds("send_us");
  cost.parameter_bytes = bytes("parameter_bytes");
  cost.gradient_bytes = bytes("gradient_bytes");
  cost.optimizer_bytes = bytes("optimizer_bytes");
  cost.activation_bytes = bytes("activation_bytes");
  cost.workspace_bytes = bytes("workspace_bytes");
  cost.message_bytes = bytes("message_bytes");
  fields.expect_no_more();
  return cost;
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
  schedule.kind = static_cast<ScheduleKind>(integer("kind", 0, static_cast<int>(ScheduleKind::kInterleaved)));
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

std::vector<std::vector<Action>> read_table(const json::value& value, const Where& where) {
  std::vector<std::vector<Action>> table;
  for (const json::value& column : read_array(value, where)) {
    const Where actions = where.at(table.size());
    std::vector<Action>& read = table.emplace_back();
    for (const json::value& element : read_array(column, actions)) {
      const Where here = actions.at(read.size());
      const std::vector<int32_t> entry = read_ids(element, here, 0, kMaxInt32);
      if (entry.size() != 3 || entry[0] >= static_cast<int32_t>(kNumComputations)) {
        refuse(here, "[computation, stage, microbatch]", describe(element));
      }
      read.push_back({static_cast<ActionKind>(entry[0]), entry[1], entry[2]});
    }
  }
  return table;
}

json::value write_stage(const StagePlan& stage) {
  return {{"rank", stage.rank},
          {"nodes", array_of(stage.nodes)},
          {"parameters", array_of(stage.parameters)},
          {"modules", array_of(stage.modules)},
          {"cost", write_cost(stage.cost)}};
}

StagePlan read_stage(const json::value& value, const Where& where, int num_ranks) {
  Fields fields(value, where);
  StagePlan stage;
  stage.rank = static_cast<int>(read_integer(fields["rank"], where.at("rank"), 0, num_ranks - 1));
  stage.nodes = read_ids(fields["nodes"], where.at("nodes"), 0, kMaxInt32);
  stage.parameters = read_ids(fields["parameters"], where.at("parameters"), 0, kMaxInt32);
  const Where modules = where.at("modules");
  for (const json::value& module : read_array(fields["modules"], modules)) {
    stage.modules.push_back(read_string(module, modules.at(stage.modules.size())));
  }
  stage.cost = read_cost(fields["cost"], where.at("cost"));
  fields.expect_no_more();
  return stage;
}

/// Triples, and the backward beside them where it is not the first: a plan of a large model has thousands.
json::array write_transfers(const std::vector<Transfer>& transfers) {
  json::array array;
  for (const Transfer& transfer : transfers) {
    json::array entry{transfer.value, transfer.source, transfer.target};
    if (transfer.backward > 0) entry.push_back(transfer.backward);
    array.push_back(std::move(entry));
  }
  return array;
}

std::vector<Transfer> read_transfers(const json::value& value, const Where& where, int32_t num_stages) {
  std::vector<Transfer> transfers;
  for (const json::value& element : read_array(value, where)) {
    const Where here = where.at(transfers.size());
    const std::vector<int32_t> entry = read_ids(element, here, kInputStage, kMaxInt32);
    const bool is_transfer = (entry.size() == 3 || entry.size() == 4) && entry[0] >= 0 && entry[1] < num_stages &&
                             entry[2] >= 0 && entry[2] < num_stages && entry.back() >= 0;
    if (!is_transfer) {
      refuse(here, "[value, source stage, target stage] or the same with a backward after them", describe(element));
    }
    transfers.push_back({entry[0], entry[1], entry[2], entry.size() == 4 ? entry[3] : 0});
  }
  return transfers;
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
                                     {"activations", write_transfers(plan.activations)},
                                     {"gradients", write_transfers(plan.gradients)},
                                     {"predicted_step_us", bits_of(plan.predicted_step_us)},
                                     {"predicted_bubble", bits_of(plan.predicted_bubble)},
                                     {"lower_bound_us", bits_of(plan.lower_bound_us)},
                                     {"slowest_stage_us", bits_of(plan.slowest_stage_us)},
                                     {"predicted_peak_bytes", array_of(plan.predicted_peak_bytes)}});
}

Plan deserialise_plan(std::string_view text) {
  const Where where;
  json::parse_options parsing;
  parsing.max_depth = kMaxPlanDepth;
  parsing.allow_invalid_utf8 = true;  // names may be any bytes
  json::error_code error;
  const json::value value = json::parse({text.data(), text.size()}, error, {}, parsing);
  if (error) refuse(where, "JSON", error.message());

  Fields fields(value, where);
  read_integer(fields["version"], where.at("version"), kFormatVersion, kFormatVersion);
  Plan plan;
  plan.num_ranks = static_cast<int>(read_integer(fields["num_ranks"], where.at("num_ranks"), 1, kMaxInt32));
  plan.schedule = read_schedule(fields["schedule"], where.at("schedule"));
  plan.table = read_table(fields["table"], where.at("table"));
  plan.exact_ties = read_bool(fields["exact_ties"], where.at("exact_ties"));
  const Where stages = where.at("stages");
  for (const json::value& stage : read_array(fields["stages"], stages)) {
    plan.stages.push_back(read_stage(stage, stages.at(plan.stages.size()), plan.num_ranks));
  }
  const auto num_stages = static_cast<int32_t>(plan.stages.size());
  plan.stage_of_node = read_ids(fields["stage_of_node"], where.at("stage_of_node"), 0, num_stages - 1);
  plan.activations = read_transfers(fields["activations"], where.at("activations"), num_stages);
  plan.gradients = read_transfers(fields["gradients"], where.at("gradients"), num_stages);
  plan.predicted_step_us = read_bits(fields["predicted_step_us"], where.at("predicted_step_us"));
  plan.predicted_bubble = read_bits(fields["predicted_bubble"], where.at("predicted_bubble"));
  plan.lower_bound_us = read_bits(fields["lower_bound_us"], where.at("lower_bound_us"));
  plan.slowest_stage_us = read_bits(fields["slowest_stage_us"], where.at("slowest_stage_us"));
  plan.predicted_peak_bytes = read_integers(fields["predicted_peak_bytes"], where.at("predicted_peak_bytes"), 0);
  fields.expect_no_more();
  return plan;
}

}  // namespace smp::partitioner
