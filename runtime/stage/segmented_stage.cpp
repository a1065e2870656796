// Tensors and gradients on their way between the segments of a stage, as the plan's transfers say.
#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "runtime/stage/stage.h"

namespace smp::runtime {
namespace {

using namespace partitioner;

constexpr int kLoss = -1;  // in the place of the stage that the gradient of a loss goes to

/// Numbers for what crosses, in the order in which it is first asked for.
template <class Key>
class Numbers {
 public:
  int32_t operator[](const Key& key) { return numbers_.emplace(key, static_cast<int32_t>(numbers_.size())).first->second; }
  size_t size() const { return numbers_.size(); }

 private:
  std::map<Key, int32_t> numbers_;
};

using Gradient = std::pair<ValueId, int>;  // and the stage that it goes to

class SegmentedStage : public Stage {
 public:
  SegmentedStage(const Graph& graph, Segments segments, StageValues values, StageOptions options)
      : values_(std::move(values)), segments_(segments.is_taped.size()), reasons_(std::move(segments.reasons)) {
    const std::function<void(const std::string&)> tell = std::exchange(options.stays_on_autograd, {});
    const auto tell_all = [this, tell] {
      const std::string reasons = report().stays_on_autograd;
      if (tell && !reasons.empty()) tell(reasons);
    };
    options.stays_on_autograd = [tell_all](const std::string&) { tell_all(); };
    for (size_t i = 0; i < segments_.size(); ++i) {
      const int stage = segments.first + static_cast<int>(i);
      const size_t num_operators = segments.plan.stages[static_cast<size_t>(stage)].nodes.size();
      const auto make = segments.is_taped[i] ? make_tape_stage : make_autograd_stage;
      options.recomputes = segments.is_recomputed[i];
      segments_[i].stage = make(graph, segments.plan, stage, options);
      if (segments.is_recomputed[i]) segments_[i].stage = make_recomputing_stage(graph, std::move(segments_[i].stage));
      segments_[i].num_on_autograd = segments.is_taped[i] ? 0 : num_operators;
      num_operators_ += num_operators;
    }
    connect_forward();
    for (size_t k = 0; k < values_.backwards.size(); ++k) connect_backward(segments.plan, segments.first, k);
    while (ends_backward_ + 1 < segments_.size() && !segments_[ends_backward_].stage->values().has_backward)
      ++ends_backward_;
    tell_all();
  }

  const StageValues& values() const override { return values_; }

  StageReport report() const override {
    constexpr int64_t kNoneYet = std::numeric_limits<int64_t>::max();
    StageReport all{.num_taped = kNoneYet, .num_replayed = kNoneYet};
    std::vector<std::string> reasons = reasons_;
    for (const Segment& segment : segments_) {
      const StageReport one = segment.stage->report();
      all.num_on_autograd += segment.num_on_autograd + one.num_on_autograd;
      all.num_recomputed += one.num_recomputed;
      if (segment.num_on_autograd > 0) continue;
      all.num_taped = std::min(all.num_taped, one.num_taped);
      all.num_replayed = std::min(all.num_replayed, one.num_replayed);
      all.num_weight_calls += one.num_weight_calls;
      if (all.stays_off_graphs.empty()) all.stays_off_graphs = one.stays_off_graphs;
      const bool is_new = std::find(reasons.begin(), reasons.end(), one.stays_on_autograd) == reasons.end();
      if (is_new && !one.stays_on_autograd.empty()) reasons.push_back(one.stays_on_autograd);
    }
    if (all.num_replayed == kNoneYet) all.num_replayed = 0;
    std::string& text = all.stays_on_autograd;
    for (const std::string& reason : reasons) text += (text.empty() ? "" : "; ") + reason;
    if (!text.empty() && all.num_on_autograd < num_operators_) {
      text += " (" + std::to_string(all.num_on_autograd) + " of " + std::to_string(num_operators_) + " operators)";
    }
    return all;
  }

  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup& tensors) override {
    std::vector<at::Tensor> made(num_values_);
    for (size_t i = 0; i < inputs.size(); ++i) made[static_cast<size_t>(inputs_[i])] = std::move(inputs[i]);
    for (const Segment& segment : segments_) {
      std::vector<at::Tensor> taken;
      for (const Taken& one : segment.inputs) {
        at::Tensor& tensor = made[static_cast<size_t>(one.number)];
        taken.push_back(one.is_last ? std::move(tensor) : tensor);
      }
      std::vector<at::Tensor> results = segment.stage->forward(context, std::move(taken), tensors);
      for (size_t i = 0; i < results.size(); ++i) made[static_cast<size_t>(segment.outputs[i])] = std::move(results[i]);
    }
    return take(made, outputs_);
  }

  std::vector<at::Tensor> backward(int microbatch, size_t index, std::vector<at::Tensor> gradients) override {
    const Roads& roads = roads_[index];
    std::vector<at::Tensor> made(roads.num_gradients);
    for (size_t i = 0; i < gradients.size(); ++i) made[static_cast<size_t>(roads.roots[i])] = std::move(gradients[i]);
    const bool is_last = index + 1 == values_.backwards.size();
    for (size_t i = segments_.size(); i-- > 0;) {
      const SegmentRoads& of_segment = roads.segments[i];
      Stage& stage = *segments_[i].stage;
      std::vector<at::Tensor> results = stage.backward(microbatch, index, take(made, of_segment.roots));
      for (size_t r = 0; r < results.size(); ++r) made[static_cast<size_t>(of_segment.results[r])] = std::move(results[r]);
      // What has waited behind the gradients that leave holds memory, so only the last segment's goes on waiting.
      if (is_last && i != ends_backward_) stage.weight_gradients(microbatch);
    }
    return take(made, roads.results);
  }

  void weight_gradients(int microbatch) override { segments_[ends_backward_].stage->weight_gradients(microbatch); }

  void drop(int microbatch) override {
    for (const Segment& segment : segments_) segment.stage->drop(microbatch);
  }
  void reset() override {
    for (const Segment& segment : segments_) segment.stage->reset();
  }

 private:
  struct Taken {
    int32_t number;
    bool is_last = false;  // nobody reads the value behind this segment
  };
  struct Segment {
    std::unique_ptr<Stage> stage;
    size_t num_on_autograd = 0;  // its operators; 0: it is to be taped
    std::vector<Taken> inputs;
    std::vector<int32_t> outputs;
  };
  struct SegmentRoads {
    std::vector<int32_t> roots, results;
  };
  /// Of one backward: gradients by the numbers under which they are handed on.
  struct Roads : SegmentRoads {
    std::vector<SegmentRoads> segments;
    size_t num_gradients = 0;
  };

  static std::vector<at::Tensor> take(std::vector<at::Tensor>& made, const std::vector<int32_t>& numbers) {
    std::vector<at::Tensor> taken;
    taken.reserve(numbers.size());
    for (const int32_t number : numbers) taken.push_back(std::move(made[static_cast<size_t>(number)]));
    return taken;
  }

  void connect_forward() {
    Numbers<ValueId> numbers;
    for (const ValueId id : values_.inputs) inputs_.push_back(numbers[id]);
    for (Segment& segment : segments_) {
      for (const ValueId id : segment.stage->values().inputs) segment.inputs.push_back({numbers[id]});
      for (const ValueId id : segment.stage->values().outputs) segment.outputs.push_back(numbers[id]);
    }
    for (const ValueId id : values_.outputs) outputs_.push_back(numbers[id]);
    num_values_ = numbers.size();
    std::set<int32_t> read_later(outputs_.begin(), outputs_.end());
    for (size_t i = segments_.size(); i-- > 0;) {
      for (Taken& one : segments_[i].inputs) one.is_last = read_later.insert(one.number).second;
    }
  }

  void connect_backward(const Plan& plan, int first, size_t index) {
    const int end = first + static_cast<int>(segments_.size());
    const auto is_inside = [&](int stage) { return first <= stage && stage < end; };
    // A gradient leaves a stage once, and enters it once.
    std::map<Gradient, int> target_of;            // of what leaves, by value and the stage that makes it
    std::map<ValueId, int> entered_at, left_for;  // of what crosses the whole's border
    for (const Transfer& relay : plan.gradients) {
      if (relay.backward != static_cast<int>(index)) continue;
      if (is_inside(relay.source)) target_of[{relay.value, relay.source}] = relay.target;
      if (is_inside(relay.target) && !is_inside(relay.source)) entered_at[relay.value] = relay.target;
      if (is_inside(relay.source) && !is_inside(relay.target)) left_for[relay.value] = relay.target;
    }
    Roads& roads = roads_.emplace_back();
    Numbers<Gradient> numbers;
    const auto roots_of = [&](const BackwardValues& values, const auto& stage_of) {
      std::vector<int32_t> roots;
      for (size_t i = 0; i < values.roots.size(); ++i) {
        const bool is_loss = i == 0 && values.has_loss;
        roots.push_back(numbers[{values.roots[i], is_loss ? kLoss : stage_of(values.roots[i])}]);
      }
      return roots;
    };
    for (size_t i = 0; i < segments_.size(); ++i) {
      const int stage = first + static_cast<int>(i);
      const BackwardValues& values = segments_[i].stage->values().backwards[index];
      SegmentRoads& of_segment = roads.segments.emplace_back();
      of_segment.roots = roots_of(values, [stage](ValueId) { return stage; });
      for (const ValueId id : values.results) of_segment.results.push_back(numbers[{id, target_of.at({id, stage})}]);
    }
    const BackwardValues& whole = values_.backwards[index];
    roads.roots = roots_of(whole, [&](ValueId id) { return entered_at.at(id); });
    for (const ValueId id : whole.results) roads.results.push_back(numbers[{id, left_for.at(id)}]);
    roads.num_gradients = numbers.size();
  }

  StageValues values_;
  std::vector<Segment> segments_;
  std::vector<int32_t> inputs_, outputs_;
  size_t num_values_ = 0;
  std::vector<Roads> roads_;          // by backward
  size_t ends_backward_ = 0;          // the segment whose backward comes last
  std::vector<std::string> reasons_;  // of the plan's cuts
  size_t num_operators_ = 0;
};

}  // namespace

std::unique_ptr<Stage> make_segmented_stage(const Graph& graph, const Segments& segments, StageValues values,
                                            StageOptions options) {
  return std::make_unique<SegmentedStage>(graph, segments, std::move(values), std::move(options));
}

}  // namespace smp::runtime
