// Performs a schedule's column.
#include "runtime/executor/executor.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/exchange/tags.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

constexpr int kFollowingData = 1;  // added to a channel's tag: second messages overtake posted receives of first ones

// The values that move along an edge of stages in one direction, in the order of their messages.
std::vector<Carried> values_on_edge(const Plan& plan, int source, int target, bool activations) {
  std::vector<Carried> values;
  for (const Transfer& transfer : activations ? plan.activations : plan.gradients) {
    if (transfer.source == source && transfer.target == target) values.push_back({transfer.value, transfer.backward});
  }
  std::sort(values.begin(), values.end());
  return values;
}

// "aten::addmm of 'encoder.2.linear1'"
std::string describe_value(const Graph& graph, ValueId id) {
  const Value& value = graph.values[id];
  if (value.producer == kNoNode) return "'" + value.name + "'";
  const Node& node = graph.nodes[value.producer];
  return node.op + (node.module.empty() ? "" : " of '" + node.module + "'");
}

}  // namespace

// Messages of one channel keep their order. The same numbers for every plan, because the programs of one step may have
// different numbers of stages.
int channel_of(int source_stage, int target_stage, bool activation) {
  TORCH_INTERNAL_ASSERT(source_stage <= kMaxStages && target_stage <= kMaxStages, "check_number_of_stages lets none pass");
  return ((source_stage + 1) * (kMaxStages + 2) + target_stage + 1) * 4 + (activation ? 0 : 2) + kFirstStageTag;
}

void check_number_of_stages(const Plan& plan) {
  TORCH_CHECK_VALUE(plan.stages.size() <= static_cast<size_t>(kMaxStages), "step: expected a plan of at most ", kMaxStages,
                    " stages, got ", plan.stages.size(),
                    ". Take fewer pipeline ranks (pipeline_parallel_degree) or fewer visits of each (virtual_stages, "
                    "modules placed by hand).");
}

RankResults Executor::run(const Schedule& schedule, std::span<MicrobatchRun> microbatches, const RunOptions& options) {
  options_ = options;
  schedule_ = &schedule;
  if (options_.loss_divisor == 0) options_.loss_divisor = static_cast<int>(microbatches.size());
  const auto& column = schedule.columns[static_cast<size_t>(pipeline_.rank())];
  results_.assign(microbatches.size(), {});
  ahead_ = {};
  microbatches_ = microbatches;
  const auto at_no_action = c10::make_scope_exit([this] { action_ = nullptr; });
  try {
    for (const Action& action : column) {
      ahead_.post(column, [&](const Action& receive) {
        expected_.push_back(post(receive, microbatches[static_cast<size_t>(receive.microbatch)]));
      });
      action_ = &action;
      {
        const RecordedSpan span(options_.recorder, action);
        const int64_t start_ns = host().now_ns();
        perform(action, microbatches);
        if (action.is_compute()) computing_ns_ += host().now_ns() - start_ns;
      }
      if (holds(action.row().makes, Item::kWeightGradients) && options_.observer != nullptr) {
        const RecordedSpan span(options_.recorder, Activity::kCollective);
        options_.observer->after_weight_gradients(action);
      }
      reap_sent();
    }
    action_ = nullptr;
    const RecordedSpan span(sent_.empty() ? nullptr : options_.recorder, Activity::kLastSends);
    for (Sent& sent : sent_) sent.request.wait("end of step");
    sent_.clear();
  } catch (...) {
    drop_everything(microbatches);
    throw;
  }
  TORCH_INTERNAL_ASSERT(activations_.empty() && gradients_.empty(), "values were received and never used");
  return std::move(results_);
}

std::string Executor::describe() const {
  if (action_ == nullptr) return "";
  std::string text = std::string(action_->row().name) + " of microbatch " + std::to_string(action_->microbatch) +
                     " on stage " + std::to_string(action_->stage);
  if (action_->is_compute()) return text;
  const bool is_from_peer = action_->is_receive();
  const RankProgram& program = *microbatches_[static_cast<size_t>(action_->microbatch)].program;
  const auto [source, target] =
      is_from_peer ? std::pair(action_->peer, action_->stage) : std::pair(action_->stage, action_->peer);
  const char* separator = action_->is_forward() ? ", with " : ", with the gradient of ";
  for (const Carried& carried : values_on_edge(*program.plan, source, target, action_->is_forward())) {
    text += std::exchange(separator, " and ") + describe_value(*program.graph, carried.value);
  }
  return text;
}

void Executor::drop_everything(std::span<MicrobatchRun> microbatches) {
  for (MicrobatchRun& run : microbatches) {
    for (auto& [index, stage] : run.program->stages) stage->reset();
  }
  for (Sent& sent : sent_) abandon(std::move(sent.buffer));
  for (Expected& expected : expected_) {
    for (auto& buffer : expected.buffers) abandon(std::move(buffer));
  }
  sent_.clear();
  expected_.clear();
  activations_.clear();
  gradients_.clear();
  results_.clear();
}

void Executor::perform(const Action& action, std::span<MicrobatchRun> microbatches) {
  MicrobatchRun& run = microbatches[static_cast<size_t>(action.microbatch)];
  switch (action.kind) {
    case ActionKind::kForward:
      return forward(action, run);
    case ActionKind::kBackward:
      return backward(action, run);
    case ActionKind::kWeightGradient:
      return run.program->stages.at(action.stage)->weight_gradients(run.context.microbatch);
    case ActionKind::kSendActivation:
    case ActionKind::kSendGradient:
      return send(action, run);
    case ActionKind::kReceiveActivation:
    case ActionKind::kReceiveGradient:
      return receive(action, microbatches);
  }
}

at::Tensor Executor::take_activation(int microbatch, ValueId value, int stage, const MicrobatchRun& run) {
  if (auto node = activations_.extract({microbatch, {value}, stage})) return std::move(node.mapped());
  // A step input on the leader.
  const auto& inputs = run.program->graph->inputs;
  const auto at = std::find(inputs.begin(), inputs.end(), value);
  TORCH_INTERNAL_ASSERT(at != inputs.end() && !run.inputs.empty(), "stage ", stage, " misses value ", value);
  return run.inputs[static_cast<size_t>(at - inputs.begin())];
}

int Executor::place_for(const Plan& plan, int target) const {
  return plan.rank_of(target) == pipeline_.rank() ? target : -2 - target;
}

void Executor::forward(const Action& action, MicrobatchRun& run) {
  if (run.before_forward) run.before_forward(action.stage);
  Stage& stage = *run.program->stages.at(action.stage);
  const Plan& plan = *run.program->plan;
  std::vector<at::Tensor> inputs;
  for (ValueId id : stage.values().inputs) inputs.push_back(take_activation(action.microbatch, id, action.stage, run));
  const auto outputs = stage.forward(run.context, std::move(inputs), run.tensors);
  const auto& ids = stage.values().outputs;
  for (size_t i = 0; i < ids.size(); ++i) {
    for (const Transfer& transfer : plan.activations) {
      if (transfer.value != ids[i] || transfer.source != action.stage) continue;
      activations_[{action.microbatch, {ids[i]}, place_for(plan, transfer.target)}] = outputs[i];
    }
    const auto is_among = [&](const std::vector<ValueId>& some) {
      return std::find(some.begin(), some.end(), ids[i]) != some.end();
    };
    const Graph& graph = *run.program->graph;
    if (is_among(graph.returned) || is_among(graph.read) || is_among(graph.backward_roots)) {
      results_[static_cast<size_t>(action.microbatch)][ids[i]] = outputs[i].variable_data();
    }
  }
}

void Executor::backward(const Action& action, MicrobatchRun& run) {
  if (options_.observer != nullptr) options_.observer->before_backward(action);
  const size_t count = run.program->stages.at(action.stage)->values().backwards.size();
  for (size_t k = 0; k < count; ++k) backward(action, run, k);
}

void Executor::backward(const Action& action, MicrobatchRun& run, size_t index) {
  Stage& stage = *run.program->stages.at(action.stage);
  const Plan& plan = *run.program->plan;
  const BackwardValues& values = stage.values().backwards[index];
  const auto number = static_cast<int>(index);
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < values.roots.size(); ++i) {
    if (i == 0 && values.has_loss) {
      // Of loss in (loss / M).backward(). A new one each time: views of it can end as a parameter's .grad.
      const TensorSpec& loss = run.program->graph->values[values.roots[0]].spec;
      const auto options = at::TensorOptions(loss.dtype).device(this_ranks_device().type);
      gradients.push_back(at::full(loss.sizes, 1.0 / options_.loss_divisor, options));
      continue;
    }
    auto node = gradients_.extract({action.microbatch, {values.roots[i], number}, action.stage});
    TORCH_INTERNAL_ASSERT(node, "stage ", action.stage, " misses the gradient of value ", values.roots[i]);
    gradients.push_back(std::move(node.mapped()));
  }
  const auto results = stage.backward(run.context.microbatch, index, std::move(gradients));
  for (size_t i = 0; i < values.results.size(); ++i) {
    for (const Transfer& transfer : plan.gradients) {
      if (transfer.backward != number || transfer.value != values.results[i] || transfer.source != action.stage) continue;
      gradients_[{action.microbatch, {transfer.value, number}, place_for(plan, transfer.target)}] = results[i];
    }
  }
}

void Executor::send(const Action& action, const MicrobatchRun& run) {
  const Plan& plan = *run.program->plan;
  const bool activation = action.is_forward();
  const int channel = channel_of(action.stage, action.peer, activation);
  const std::vector<Carried> values = values_on_edge(plan, action.stage, action.peer, activation);
  if (schedule_->limits_sends) wait_for_room(action, channel, values.size());
  for (const Carried& carried : values) {
    const ValueId id = carried.value;
    at::Tensor tensor;
    if (action.stage == kInputStage) {
      tensor = take_activation(action.microbatch, id, kInputStage, run);
    } else {
      auto& waiting = activation ? activations_ : gradients_;
      auto node = waiting.extract({action.microbatch, carried, place_for(plan, action.peer)});
      TORCH_INTERNAL_ASSERT(node, to_string(action), " misses value ", id);
      tensor = std::move(node.mapped());
    }
    const int64_t max_bytes = max_message_bytes(run.program->graph->values[id].spec);
    PackedTensor packed = pack(tensor, max_bytes, buffers_, channel);
    const int dest = plan.rank_of(action.peer);
    sent_.push_back(
        {pipeline_.isend(dest, channel, packed.buffer->memory(packed.num_bytes)), packed.buffer, channel, false});
    if (packed.following) {
      const DeviceMemory data = packed.following->memory(packed.following_bytes, packed.following_begin);
      sent_.push_back({pipeline_.isend(dest, channel + kFollowingData, data), packed.following, channel, true});
    }
  }
}

// Makes room for one more microbatch of the channel within its limit, by waiting for the oldest ones: they have left when
// the receiver comes to them, at the latest. The table has been proved to end even so.
void Executor::wait_for_room(const Action& action, int channel, size_t num_values) {
  size_t room = static_cast<size_t>(schedule_->send_limit(action) - 1) * num_values;
  for (size_t i = sent_.size(); i-- > 0;) {
    Sent& sent = sent_[i];
    if (sent.channel != channel || !sent.buffer) continue;
    if (room == 0) {
      sent.request.wait(to_string(action));
      sent.buffer.reset();
    } else if (!sent.is_second) {
      --room;
    }
  }
}

Executor::Expected Executor::post(const Action& action, const MicrobatchRun& run) {
  const Plan& plan = *run.program->plan;
  const bool activation = action.is_forward();
  Expected expected;
  expected.action = action;
  expected.values = values_on_edge(plan, action.peer, action.stage, activation);
  const int source = plan.rank_of(action.peer);
  const int channel = channel_of(action.peer, action.stage, activation);
  for (const Carried& carried : expected.values) {
    const TensorSpec& spec = run.program->graph->values[carried.value].spec;
    auto buffer = first_message(spec, buffers_, channel);
    const int64_t bytes = std::min(buffer->capacity_bytes(), max_message_bytes(spec));
    expected.requests.push_back(pipeline_.irecv(source, channel, buffer->memory(bytes)));
    expected.buffers.push_back(std::move(buffer));
  }
  return expected;
}

void Executor::receive(const Action& action, std::span<MicrobatchRun> microbatches) {
  TORCH_INTERNAL_ASSERT(!expected_.empty() && expected_.front().action == action, "receives out of order");
  Expected& expected = expected_.front();  // stays there, with its buffers, until all has arrived
  const Graph& graph = *microbatches[static_cast<size_t>(action.microbatch)].program->graph;
  const bool activation = action.is_forward();
  for (size_t i = 0; i < expected.values.size(); ++i) {
    const int64_t num_bytes = expected.requests[i].wait(to_string(action));
    const Carried& carried = expected.values[i];
    const TensorSpec& spec = graph.values[carried.value].spec;
    std::shared_ptr<MessageBuffer> following;
    if (const int64_t bytes = announced_bytes(*expected.buffers[i], num_bytes); bytes > 0) {
      const int tag = channel_of(action.peer, action.stage, activation) + kFollowingData;
      following = expected.buffers.emplace_back(buffers_.take(following_capacity(bytes, spec), tag));
      const Plan& plan = *microbatches[static_cast<size_t>(action.microbatch)].program->plan;
      Request data = pipeline_.irecv(plan.rank_of(action.peer), tag, following->memory(bytes));
      const int64_t got = data.wait(to_string(action));
      TORCH_CHECK(got == bytes, "boundary: expected ", bytes, " bytes of data, as announced, got ", got,
                  ". Ranks run different versions of smp.");
    }
    at::Tensor tensor = unpack(expected.buffers[i], num_bytes, spec, following);
    (activation ? activations_ : gradients_)[{action.microbatch, carried, action.stage}] = std::move(tensor);
  }
  expected_.pop_front();
  ahead_.take(action);
}

void Executor::reap_sent() {
  while (!sent_.empty() && sent_.front().request.test()) sent_.pop_front();
}

}  // namespace smp::runtime
