// Timed microbatches of one stage.
#include "runtime/stage/measure_stage.h"

#include <ATen/ops/zeros.h>
#include <sched.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/device/random.h"
#include "runtime/stage/autograd_stage.h"

namespace smp::runtime {
namespace {

using namespace partitioner;

constexpr int kWarmUps = 4;  // of a tape: under autograd, recorded, compared, and once from the tape
constexpr int kLeastTurns = 16;
constexpr double kShortTurnUs = 1e4;

int64_t now_ns() { return this_ranks_device().now_ns(); }

double us_between(int64_t begin_ns, int64_t end_ns) { return static_cast<double>(end_ns - begin_ns) * 1e-3; }

// Numbers of moderate size, none of them denormal, so that no operator takes longer than with real ones. Indices are all 0,
// which every table has.
at::Tensor made_up(const TensorSpec& spec) {
  int64_t num_elements = spec.storage_offset + 1;
  for (size_t d = 0; d < spec.sizes.size(); ++d) num_elements += std::max<int64_t>(0, spec.sizes[d] - 1) * spec.strides[d];
  at::Tensor memory = at::zeros({num_elements}, at::TensorOptions(spec.dtype).device(this_ranks_device().type));
  if (memory.is_floating_point()) memory.uniform_(0.01, 0.1);
  return memory.as_strided(spec.sizes, spec.strides, spec.storage_offset);
}

// The same geometry in memory of its own.
at::Tensor copy_of(const at::Tensor& tensor) {
  const auto num_elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
  const at::Tensor memory = tensor.detach().as_strided({num_elements}, {1}, 0).clone();
  return memory.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

/// One microbatch, by NodeId.
struct Sample {
  std::vector<double> forward_us, backward_us;
  double whole_backward_us = 0;

  explicit Sample(size_t num_nodes) : forward_us(num_nodes), backward_us(num_nodes) {}

  double total_us() const { return std::accumulate(forward_us.begin(), forward_us.end(), whole_backward_us); }
};

/// Of one microbatch, on the device's own clock: what waits for the device with each operator would count the waiting.
class Stopwatch {
 public:
  /// What the device was given so far is no operator's; what comes is part of a backward, or not.
  void begin(bool is_in_backward) {
    is_in_backward_ = is_in_backward;
    mark({kNoNode, false, false});
  }
  /// What the device was given since the last call.
  void add(NodeId node, bool is_backward) { mark({node, is_backward, is_in_backward_}); }

  Sample read(size_t num_nodes) {
    Sample sample(num_nodes);
    const std::vector<double> us = clock_->take_us();
    for (size_t i = 0; i < us.size(); ++i) {
      const Stretch& stretch = stretches_[i + 1];
      if (stretch.is_in_backward) sample.whole_backward_us += us[i];
      if (stretch.node == kNoNode) continue;
      (stretch.is_backward ? sample.backward_us : sample.forward_us)[static_cast<size_t>(stretch.node)] += us[i];
    }
    stretches_.clear();
    return sample;
  }

 private:
  struct Stretch {
    NodeId node;
    bool is_backward, is_in_backward;
  };
  void mark(Stretch before) {
    clock_->mark();
    stretches_.push_back(before);
  }

  const std::unique_ptr<DeviceClock> clock_ = this_ranks_device().new_clock();
  std::vector<Stretch> stretches_;  // each ends with a mark
  bool is_in_backward_ = false;
};

/// Under autograd only forwards can be timed operator by operator.
class ForwardTimer : public StageWatcher {
 public:
  explicit ForwardTimer(OperatorTimer timer) : timer_(std::move(timer)) {}
  void call_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack, NodeId node, int32_t) override {
    op.callBoxed(stack);
    timer_(node, /*is_backward=*/false);
  }
  bool gradient_made(ValueId, const at::Tensor&) override { return true; }

 private:
  OperatorTimer timer_;
};

/// The mean over the middle half of the samples, by duration: some microbatches are interrupted by other work.
Sample mean_of(std::vector<Sample> samples) {
  std::sort(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) { return a.total_us() < b.total_us(); });
  const size_t first = samples.size() / 4, end = samples.size() - first;
  Sample mean = samples[first];
  const double share = 1.0 / static_cast<double>(end - first);
  const auto average = [&](auto&& number_of) {
    double sum = 0;
    for (size_t s = first; s < end; ++s) sum += number_of(samples[s]);
    number_of(mean) = sum * share;
  };
  for (size_t n = 0; n < mean.forward_us.size(); ++n) {
    average([n](Sample& sample) -> double& { return sample.forward_us[n]; });
    average([n](Sample& sample) -> double& { return sample.backward_us[n]; });
  }
  average([](Sample& sample) -> double& { return sample.whole_backward_us; });
  return mean;
}

}  // namespace

class StageMeasurement::Impl {
 public:
  Impl(const Graph& graph, const Plan& plan, int stage, MeasureOptions options)
      : graph_(graph), plan_(plan), stage_(stage), options_(std::move(options)) {
    const UserRandomStateScope user_state;
    const OperatorTimer timer = [this](NodeId node, bool is_backward) { stopwatch_.add(node, is_backward); };
    if (options_.tape) {
      StageOptions taped;
      taped.timer = timer;
      tape_ = make_tape_stage(graph_, plan_, stage_, taped);
      for (int k = 0; k < kWarmUps; ++k) run(*tape_, nullptr);
      if (tape_->report().num_taped > 0) return;
      tape_.reset();
    }
    reference_.emplace(graph_, plan_, stage_, StageOptions{});
    watcher_.emplace(timer);
    for (int k = 0; k < kWarmUps; ++k) run(*reference_, &*watcher_);
  }

  void take_turn() {
    const UserRandomStateScope user_state;
    tape_ ? take_turn_of(*tape_, nullptr) : take_turn_of(*reference_, &*watcher_);
  }

  StageTimes times() const {
    const Sample mean = mean_of(samples_);
    return {mean.forward_us, tape_ ? mean.backward_us : by_expectation(mean)};
  }

 private:
  std::vector<double> by_expectation(const Sample& autograd) const {
    std::vector<double> backward_us(graph_.nodes.size(), 0);
    const std::vector<NodeId>& nodes = plan_.stages[static_cast<size_t>(stage_)].nodes;
    const auto expected = [this](NodeId n) {
      return options_.expected_backward_us.empty() ? 1.0 : options_.expected_backward_us.at(static_cast<size_t>(n));
    };
    double all = 0;
    for (const NodeId n : nodes) all += expected(n);
    for (const NodeId n : nodes) {
      if (all > 0) backward_us[static_cast<size_t>(n)] = autograd.whole_backward_us * expected(n) / all;
    }
    return backward_us;
  }

  // Short ones run again and again, the first time to have everything in the caches.
  template <class AnyStage>
  void take_turn_of(AnyStage& stage, StageWatcher* watcher) {
    const int64_t begin = now_ns();
    Sample first = run(stage, watcher);
    if (us_between(begin, now_ns()) > kShortTurnUs) return samples_.push_back(std::move(first));
    do samples_.push_back(run(stage, watcher));
    while (us_between(begin, now_ns()) < kShortTurnUs);
  }

  template <class AnyStage>
  Sample run(AnyStage& stage, StageWatcher* watcher) {
    run_microbatch(stage, watcher);
    return stopwatch_.read(graph_.nodes.size());
  }

  template <class AnyStage>
  void run_microbatch(AnyStage& stage, [[maybe_unused]] StageWatcher* watcher) {
    const StageValues& values = stage.values();
    std::vector<at::Tensor> inputs;
    for (const ValueId id : values.inputs) inputs.push_back(copy_of(tensor_of(id)));
    const MicrobatchContext context{.microbatch = 0, .is_last = true, .random = {.microbatch = num_runs_++}, .scalars = {}};
    const TensorLookup lookup = [this](ValueId id) { return own_tensor(id); };
    stopwatch_.begin(/*is_in_backward=*/false);
    if constexpr (std::is_same_v<AnyStage, AutogradStage>) {
      stage.forward(context, std::move(inputs), lookup, watcher);
    } else {
      stage.forward(context, std::move(inputs), lookup);
    }
    if (!values.has_backward) return;
    for (size_t b = 0; b < values.backwards.size(); ++b) {
      std::vector<at::Tensor> gradients;
      for (const ValueId id : values.backwards[b].roots) {
        at::Tensor& gradient = gradients_[id];
        if (!gradient.defined()) gradient = made_up(spec_of(id));
        gradients.push_back(gradient);
      }
      stopwatch_.begin(/*is_in_backward=*/true);
      stage.backward(0, b, std::move(gradients));
      if (b + 1 == values.backwards.size()) stage.weight_gradients(0);
      stopwatch_.add(kNoNode, /*is_backward=*/true);
    }
  }

  const TensorSpec& spec_of(ValueId id) const { return graph_.values[static_cast<size_t>(id)].spec; }

  at::Tensor tensor_of(ValueId id) {
    at::Tensor& made = made_[id];
    if (!made.defined() && options_.tensors) made = options_.tensors(id);
    if (!made.defined()) made = made_up(spec_of(id));
    return made;
  }

  // With memory of its own where an operator writes to it, and a gradient of its own.
  at::Tensor own_tensor(ValueId id) {
    const Value& value = graph_.values[static_cast<size_t>(id)];
    const bool is_written = std::any_of(graph_.nodes.begin(), graph_.nodes.end(), [&](const Node& node) {
      return std::find(node.written_storages.begin(), node.written_storages.end(), value.storage) !=
             node.written_storages.end();
    });
    // What another measurement only reads may be the training's.
    at::Tensor& own = is_named(value) ? (*options_.own)[{value.name, is_written}] : constants_[id];
    if (own.defined()) return own;
    own = is_written ? copy_of(tensor_of(id)) : tensor_of(id).detach();
    own.set_requires_grad(value.kind == ValueKind::kParameter && value.spec.requires_grad);
    if (value.is_wrapped_number) own.unsafeGetTensorImpl()->set_wrapped_number(true);
    return own;
  }

  const Graph& graph_;
  const Plan& plan_;
  const int stage_;
  const MeasureOptions options_;
  std::unique_ptr<Stage> tape_;             // null: the stage is measured under autograd
  std::optional<AutogradStage> reference_;  // which is there in the place of a tape
  std::optional<ForwardTimer> watcher_;
  std::vector<Sample> samples_;
  Stopwatch stopwatch_;
  uint64_t num_runs_ = 0;
  std::unordered_map<ValueId, at::Tensor> made_, constants_, gradients_;
};

StageMeasurement::StageMeasurement(const Graph& graph, const Plan& plan, int stage, MeasureOptions options)
    : impl_(std::make_unique<Impl>(graph, plan, stage, std::move(options))) {}
StageMeasurement::~StageMeasurement() = default;
StageMeasurement::StageMeasurement(StageMeasurement&&) noexcept = default;
StageMeasurement& StageMeasurement::operator=(StageMeasurement&&) noexcept = default;

void StageMeasurement::take_turn() { impl_->take_turn(); }

StageTimes StageMeasurement::times() const { return impl_->times(); }

std::vector<std::exception_ptr> measure_in_turns(std::vector<StageMeasurement>& measurements, double seconds, double phase) {
  std::vector<std::exception_ptr> errors(measurements.size());
  const auto take_turns = [&] {
    for (size_t i = 0; i < measurements.size(); ++i) {
      try {
        if (!errors[i]) measurements[i].take_turn();
      } catch (...) {
        errors[i] = std::current_exception();
      }
    }
  };
  const double most_us = seconds * 1e6 * static_cast<double>(measurements.size());
  int64_t begin = now_ns();
  take_turns();
  const double turns_us = us_between(begin, now_ns());
  for (const int64_t now = now_ns(); us_between(now, now_ns()) < phase * turns_us;) sched_yield();
  begin = now_ns();
  for (int turn = 1; turn < kLeastTurns || us_between(begin, now_ns()) < most_us; ++turn) take_turns();
  return errors;
}

}  // namespace smp::runtime
