// A stage on its way from autograd to its tape.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <map>
#include <optional>

#include "runtime/device/device.h"
#include "runtime/libtorch/arithmetic.h"
#include "runtime/libtorch/deterministic.h"
#include "runtime/stage/autograd_stage.h"
#include "runtime/stage/gradient_sum.h"
#include "runtime/stage/slot_pool.h"
#include "runtime/stage/tape.h"
#include "runtime/stage/tape_comparison.h"
#include "runtime/stage/tape_graphs.h"
#include "runtime/stage/tape_recorder.h"
#include "runtime/stage/told_reasons.h"

namespace smp::runtime {
namespace {

using namespace partitioner;

class TapeStage : public Stage {
 public:
  TapeStage(const Graph& graph, const Plan& plan, int stage, StageOptions options)
      : graph_(graph),
        nodes_(plan.stages[static_cast<size_t>(stage)].nodes),
        recomputation_(plan.recomputation),
        options_(std::move(options)),
        reference_(graph, plan, stage, options_),
        own_values_(reference_.own_values()) {
    std::sort(nodes_.begin(), nodes_.end());
  }

  const StageValues& values() const override { return reference_.values(); }

  StageReport report() const override {
    StageReport report{.num_taped = num_taped_,
                       .num_replayed = graphs_ ? graphs_->num_replayed() : 0,
                       .stays_off_graphs = graphs_ ? graphs_->reason() : "",
                       .stays_on_autograd = told_.all()};
    if (phase_ == Phase::kRefused) report.num_on_autograd = nodes_.size();
    if (tape_ && values().has_backward) {
      const TapeBackward& last = tape_->lists().backwards.back();
      report.num_weight_calls = last.end - last.results_end;
    }
    return report;
  }

  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup& tensors) override {
    follow_switches();
    if (phase_ == Phase::kRefused || !may_be_taped(context)) return reference_.forward(context, std::move(inputs), tensors);
    own_.clear();
    for (const ValueId id : own_values_) own_.push_back(tensors(id));
    if (phase_ == Phase::kTaped || phase_ == Phase::kRecorded) {
      const Fit fit = fit_of(inputs);
      if (fit == Fit::kOtherTensors) forget();
      if (fit == Fit::kOtherGeometry) return reference_.forward(context, std::move(inputs), tensors);
    }
    switch (phase_) {
      case Phase::kUnrecorded:
        if (!comes_again_) {  // a signature that comes once is not worth its recording
          comes_again_ = context.is_last || ++num_waited_ == kMostWaited;
          if (comes_again_) num_waited_ = 0;
          return reference_.forward(context, std::move(inputs), tensors);
        }
        return record_forward(context, std::move(inputs), tensors);
      case Phase::kRecorded:
        // A comparison keeps what enters its microbatch to the end; beside the last one the fewest others are in flight.
        if (!context.is_last && ++num_waited_ < kMostWaited) return reference_.forward(context, std::move(inputs), tensors);
        return compare_forward(context, std::move(inputs));
      case Phase::kTaped:
        return run_forward(context, std::move(inputs));
      default:
        return reference_.forward(context, std::move(inputs), tensors);
    }
  }

  std::vector<at::Tensor> backward(int microbatch, size_t index, std::vector<at::Tensor> gradients) override {
    if (!values().has_backward) return std::vector<at::Tensor>(values().backwards[index].results.size());
    if (const auto flight = in_flight_.find(microbatch); flight != in_flight_.end()) {
      return run_backward(flight, index, std::move(gradients));
    }
    run_what_waits(nullptr);
    if (watched_ != microbatch) return reference_.backward(microbatch, index, std::move(gradients));
    return phase_ == Phase::kRecording ? record_backward(index, std::move(gradients))
                                       : compare_backward(index, std::move(gradients));
  }

  void weight_gradients(int microbatch) override {
    const auto flight = in_flight_.find(microbatch);
    if (flight == in_flight_.end()) return;  // nothing was left, or it was needed before
    Flight& own = flight->second;
    if (!own.is_replayed || !own.graphs->weight_gradients(*own.lane, own.random)) {
      go_on_without_graphs(own);
      own.tape->weight_gradients(own.slots, run_context(own.random, microbatch), sink_of(*own.tape));
    }
    land(flight);
  }

  bool recomputes(int microbatch) const override { return options_.recomputes && in_flight_.contains(microbatch); }

  void drop(int microbatch) override {
    reference_.drop(microbatch);
    in_flight_.erase(microbatch);
    if (watched_ == microbatch) stop_watching();
  }

  void reset() override {
    reference_.reset();
    in_flight_.clear();
    if (watched_) stop_watching();
  }

 private:
  static constexpr int kMostWaited = 64;  // microbatches, where the last ones of steps are of other programs
  enum class Phase : uint8_t { kUnrecorded, kRecording, kRecorded, kComparing, kTaped, kRefused };
  enum class Fit : uint8_t { kFits, kOtherGeometry, kOtherTensors };
  struct Flight {
    std::shared_ptr<Tape> tape;
    Slots slots;
    RandomState random;
    std::vector<int64_t> versions;
    std::shared_ptr<TapeGraphs> graphs{};
    std::shared_ptr<TapeGraphs::Lane> lane{};
    bool is_replayed = false;  // so far; then the slots are empty
    bool waits = false;        // for its weight gradients
  };
  using Flights = std::map<int, Flight>;

  // The recording is dropped: its microbatch went, or its tensors.
  void stop_watching() {
    phase_ = phase_ == Phase::kRecording ? Phase::kUnrecorded : Phase::kRecorded;
    watched_.reset();
    recorder_.reset();
    comparison_.reset();
  }

  void forget() {
    tape_.reset();
    graphs_.reset();
    phase_ = Phase::kUnrecorded;
    num_waited_ = 0;
  }

  // A tape holds the operators, its graphs the kernels, that LibTorch chose under them. They change between steps, when no
  // microbatch is watched.
  void follow_switches() {
    if (watched_) return;
    ArithmeticSwitches now = arithmetic_switches();
    if (now == switches_) return;
    switches_ = std::move(now);
    if (tape_) forget();
  }

  void refuse(const std::string& reason) {
    phase_ = Phase::kRefused;
    tape_.reset();
    graphs_.reset();
    told_.replace_by(reason);
  }

  // A recording holds the numbers of its microbatch.
  bool may_be_taped(const MicrobatchContext& context) {
    if (torch::autograd::AnomalyMode::is_enabled()) {
      told_.add("anomaly mode");
      return false;
    }
    const bool has_scalars = std::any_of(context.scalars.begin(), context.scalars.end(), [this](const auto& scalar) {
      return std::binary_search(nodes_.begin(), nodes_.end(), scalar.node);
    });
    if (has_scalars) told_.add("numbers that change from step to step");
    return !has_scalars;
  }

  Fit fit_of(const std::vector<at::Tensor>& inputs) {
    const TapeLists& lists = tape_->lists();
    for (size_t i = 0; i < own_.size(); ++i) {
      const TapeOwn& known = lists.own[i];
      const at::Tensor& now = own_[i];
      const bool is_same = !known.is_fixed || (now.is_same(known.tensor) && now.storage().is_alias_of(fixed_memory_[i]));
      if (!is_same || now.requires_grad() != requires_grad_[i]) return Fit::kOtherTensors;
      if (known.is_folded && !now.is_same(known.tensor)) {  // it changes: the next tape reads it in each microbatch
        folds_host_tensors_ = false;
        return Fit::kOtherTensors;
      }
      if (!fits(now, known.geometry)) return known.is_fixed ? Fit::kOtherTensors : other_geometry();
      if (now.requires_grad() && has_gradient_hooks(now)) {
        told_.add("hooks on parameters");
        return Fit::kOtherGeometry;
      }
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!fits(inputs[i], lists.inputs[i].geometry)) return other_geometry();
    }
    return Fit::kFits;
  }

  Fit other_geometry() {
    told_.add("tensors laid out in memory otherwise than those that were recorded");
    return Fit::kOtherGeometry;
  }

  std::vector<at::Tensor> record_forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                         const TensorLookup& tensors) {
    if (std::any_of(own_.begin(), own_.end(),
                    [](const at::Tensor& own) { return own.requires_grad() && has_gradient_hooks(own); })) {
      told_.add("hooks on parameters");
      return reference_.forward(context, std::move(inputs), tensors);
    }
    std::vector<TapeOwn> own;
    requires_grad_.clear();
    fixed_memory_.clear();
    for (size_t i = 0; i < own_.size(); ++i) {
      TapeOwn& one = own.emplace_back();
      one.value = own_values_[i];
      one.tensor = own_[i];
      one.is_fixed = is_named(graph_.values[static_cast<size_t>(own_values_[i])]);
      requires_grad_.push_back(own_[i].requires_grad());
      fixed_memory_.push_back(one.is_fixed ? own_[i].storage() : c10::Storage());
    }
    recorder_ = std::make_unique<TapeRecorder>(std::move(own));
    phase_ = Phase::kRecording;
    watched_ = context.microbatch;
    auto outputs = reference_.forward(context, std::move(inputs), tensors, recorder_.get());
    recorder_->end_forward(outputs);
    if (!values().has_backward) end_recording();
    return outputs;
  }

  std::vector<at::Tensor> record_backward(size_t index, std::vector<at::Tensor> gradients) {
    recorder_->begin_backward(gradients);
    auto results = reference_.backward(*watched_, index, std::move(gradients));
    recorder_->end_backward(results);
    if (index + 1 == values().backwards.size()) end_recording();
    return results;
  }

  void end_recording() {
    watched_.reset();
    if (recorder_->refusal().empty()) {
      tape_ = std::make_shared<Tape>(recorder_->take(), graph_, folds_host_tensors_,
                                     options_.recomputes ? &recomputation_ : nullptr);
      phase_ = Phase::kRecorded;
    } else {
      refuse(recorder_->refusal());
    }
    recorder_.reset();
  }

  std::vector<at::Tensor> compare_forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs) {
    const auto deterministic = comparison_mode();
    comparison_.emplace(reference_, *tape_, context, inputs, own_);
    phase_ = Phase::kComparing;
    watched_ = context.microbatch;
    auto outputs = comparison_->forward(std::move(inputs));
    if (!values().has_backward) end_comparison({});
    return outputs;
  }

  std::vector<at::Tensor> compare_backward(size_t index, std::vector<at::Tensor> gradients) {
    const auto deterministic = comparison_mode();
    auto results = comparison_->backward(index, std::move(gradients));
    return index + 1 == values().backwards.size() ? end_comparison(std::move(results)) : results;
  }

  std::unique_ptr<DeterministicScope> comparison_mode() const {
    return compares_deterministic_ ? std::make_unique<DeterministicScope>() : nullptr;
  }

  std::vector<at::Tensor> end_comparison(std::vector<at::Tensor> results) {
    results.clear();
    const std::string difference = comparison_->finish(options_.progress, results);
    watched_.reset();
    comparison_.reset();
    if (!difference.empty() && this_ranks_device().type != host().type && !std::exchange(compares_deterministic_, true)) {
      phase_ = Phase::kRecorded;  // kernels that give other bits in each run have others that do not
      return results;
    }
    phase_ = Phase::kTaped;
    if (has_graphs_) graphs_ = std::make_shared<TapeGraphs>(tape_);
    if (!difference.empty()) refuse("with the tape " + difference + " has other bits");
    return results;
  }

  Tape::RunContext run_context(const RandomState& random, int microbatch) const {
    return {.random = random, .microbatch = microbatch, .progress = options_.progress, .timer = options_.timer};
  }

  std::vector<at::Tensor> run_forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs) {
    ++num_taped_;
    std::vector<at::Tensor> outputs;
    Flight flight{.tape = tape_, .slots = {}, .random = context.random, .versions = {}, .graphs = graphs_};
    if (graphs_) flight.lane = graphs_->forward(inputs, own_, context.random, outputs);
    flight.is_replayed = flight.lane != nullptr;
    if (!flight.is_replayed) {
      flight.slots = slot_pool_.take();
      const Tape::RunContext run = run_context(context.random, context.microbatch);
      outputs = tape_->forward(flight.slots, std::move(inputs), own_, run);
    }
    flight.versions = tape_->versions();
    say_why_without_graphs();
    if (values().has_backward) {
      const bool is_new = in_flight_.emplace(context.microbatch, std::move(flight)).second;
      TORCH_INTERNAL_ASSERT(is_new, "microbatch ", context.microbatch, " is still in flight");
    } else {
      end(flight);
    }
    return outputs;
  }

  static void go_on_without_graphs(Flight& flight) {
    if (std::exchange(flight.is_replayed, false)) flight.slots = TapeGraphs::slots_of(*flight.lane);
  }

  void say_why_without_graphs() {
    if (!options_.stays_off_graphs || !graphs_ || graphs_->reason().empty()) return;
    std::exchange(options_.stays_off_graphs, {})(graphs_->reason());  // once
  }

  std::vector<at::Tensor> run_backward(Flights::iterator flight, size_t index, std::vector<at::Tensor> gradients) {
    const bool is_last = index + 1 == values().backwards.size();
    const Tape::RunContext context = run_context(flight->second.random, flight->first);
    Tape& tape = *flight->second.tape;
    tape.check_versions(flight->second.versions);
    run_what_waits(&tape);
    Flight& own = flight->second;
    std::vector<at::Tensor> results;
    if (!own.is_replayed || !own.graphs->backward(*own.lane, gradients, own.random, results)) {
      go_on_without_graphs(own);
      results = tape.backward(own.slots, index, std::move(gradients), context, sink_of(tape));
    }
    if (is_last) tape.leaves_weights() ? void(flight->second.waits = true) : land(flight);
    return results;
  }

  /// Before a backward from `next`: what earlier microbatches have still to add to parameters, where it would come too late.
  /// One tape makes the gradient of a parameter either in all its backwards or behind all of them, unless it has several.
  void run_what_waits(const Tape* next) {
    for (auto flight = in_flight_.begin(); flight != in_flight_.end();) {
      const auto now = flight++;
      const bool is_in_order = now->second.tape.get() == next && values().backwards.size() == 1;
      if (now->second.waits && !is_in_order) weight_gradients(now->first);
    }
  }

  static GradientSink sink_of(const Tape& tape) {
    return [&tape](size_t own, at::Tensor gradient) { add_to_grad(tape.lists().own[own].tensor, std::move(gradient)); };
  }

  void land(Flights::iterator flight) {
    end(flight->second);
    in_flight_.erase(flight);
  }

  void end(Flight& flight) {
    flight.is_replayed ? flight.graphs->count_replayed() : slot_pool_.give_back(std::move(flight.slots));
  }

  const Graph& graph_;
  std::vector<NodeId> nodes_;
  const Recomputation recomputation_;
  StageOptions options_;
  AutogradStage reference_;
  std::vector<ValueId> own_values_;
  std::vector<at::Tensor> own_;  // of the forward under way
  ArithmeticSwitches switches_ = arithmetic_switches();
  Phase phase_ = Phase::kUnrecorded;
  std::optional<int> watched_;  // the microbatch that is recorded, or compared
  std::unique_ptr<TapeRecorder> recorder_;
  std::optional<TapeComparison> comparison_;
  std::shared_ptr<Tape> tape_;
  const bool has_graphs_ = options_.uses_graphs && !options_.timer && this_ranks_device().new_graph(nullptr) != nullptr;
  std::shared_ptr<TapeGraphs> graphs_;  // null: none are used
  std::vector<bool> requires_grad_;     // by own tensor, as recorded
  std::vector<c10::Storage> fixed_memory_;
  Flights in_flight_;
  SlotPool slot_pool_;
  ToldReasons told_{options_.stays_on_autograd};
  int64_t num_taped_ = 0;
  int num_waited_ = 0;
  bool comes_again_ = false;  // a whole step has run
  bool compares_deterministic_ = false, folds_host_tensors_ = true;
};

}  // namespace

std::unique_ptr<Stage> make_tape_stage(const Graph& graph, const Plan& plan, int stage, StageOptions options) {
  return std::make_unique<TapeStage>(graph, plan, stage, std::move(options));
}

}  // namespace smp::runtime
