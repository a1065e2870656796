// A taped stage that is cut around operators which cannot be taped.
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <utility>

#include "runtime/stage/stage.h"
#include "runtime/stage/stage_chain.h"

namespace smp::runtime {
namespace {

using namespace partitioner;

class SegmentedStage : public Stage {
 public:
  SegmentedStage(const Graph& graph, const Plan& plan, int stage, StageOptions options, SegmentCutter cutter)
      : graph_(graph),
        options_(std::move(options)),
        cutter_(std::move(cutter)),
        values_(stage_values(graph, plan, stage)),
        nodes_(plan.stages[static_cast<size_t>(stage)].nodes) {
    now_ = make_tape_stage(graph, plan, stage, link_options());
  }

  const StageValues& values() const override { return values_; }

  StageReport report() const override {
    StageReport report = now_->report();
    report.stays_on_autograd.clear();
    for (const std::string& reason : reasons_) report.stays_on_autograd += (report.stays_on_autograd.empty() ? "" : "; ") + reason;
    const size_t num_operators = nodes_.size();
    if (report.num_on_autograd > 0 && report.num_on_autograd < num_operators) {
      report.stays_on_autograd +=
          " (" + std::to_string(report.num_on_autograd) + " of " + std::to_string(num_operators) + " operators)";
    }
    return report;
  }

  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup& tensors) override {
    auto outputs = now_->forward(context, std::move(inputs), tensors);
    values_.has_backward ? in_flight_.push_back(context.microbatch) : answer_refusals();
    return outputs;
  }

  std::vector<at::Tensor> backward(int microbatch, size_t index, std::vector<at::Tensor> gradients) override {
    if (!values_.has_backward) return {};
    return stage_of(microbatch).backward(microbatch, index, std::move(gradients));
  }

  void weight_gradients(int microbatch) override {
    stage_of(microbatch).weight_gradients(microbatch);
    land(microbatch);
  }

  void drop(int microbatch) override {
    stage_of(microbatch).drop(microbatch);
    land(microbatch);
  }

  void reset() override {
    now_->reset();
    before_.clear();
    in_flight_.clear();
  }

 private:
  static constexpr int kMostCuts = 8;  // each takes two steps, in which tapes are recorded anew

  // A microbatch ends on the stage that has begun it.
  Stage& stage_of(int microbatch) const {
    if (before_.empty()) return *now_;
    const auto before = before_.find(microbatch);
    return before == before_.end() ? *now_ : *before->second;
  }

  void land(int microbatch) {
    std::erase(in_flight_, microbatch);
    before_.erase(microbatch);
    answer_refusals();
  }

  StageOptions link_options() {
    StageOptions options = options_;
    options.stays_on_autograd = [this](const std::string& reason) { new_reasons_.push_back(reason); };
    return options;
  }

  void answer_refusals() {
    if (new_reasons_.empty()) return;
    const std::vector<std::string> reasons = std::exchange(new_reasons_, {});
    const std::string said = report().stays_on_autograd;
    const size_t num_known = untaped_.size();
    for (const NodeId n : now_->report().refused_at) add_untaped(n);
    if (untaped_.size() > num_known && num_cuts_ < kMostCuts) cut();
    for (const std::string& reason : reasons) {
      if (std::find(reasons_.begin(), reasons_.end(), reason) == reasons_.end()) reasons_.push_back(reason);
    }
    const std::string now = report().stays_on_autograd;
    if (now != said && options_.stays_on_autograd) options_.stays_on_autograd(now);
  }

  // With one operator that is none of LibTorch's go all others: a recording meets them one by one.
  void add_untaped(NodeId refused) {
    const auto is_foreign = [this](NodeId n) { return !graph_.nodes[static_cast<size_t>(n)].op.starts_with("aten::"); };
    for (const NodeId n : nodes_) {
      const bool is_known = std::find(untaped_.begin(), untaped_.end(), n) != untaped_.end();
      if (!is_known && (n == refused || (is_foreign(refused) && is_foreign(n)))) untaped_.push_back(n);
    }
  }

  void cut() {
    const std::optional<Segments> segments = cutter_(untaped_);
    if (!segments) return;
    ++num_cuts_;
    std::vector<std::unique_ptr<Stage>> links;
    for (size_t i = 0; i < segments->is_taped.size(); ++i) {
      const int segment = segments->first + static_cast<int>(i);
      links.push_back((segments->is_taped[i] ? make_tape_stage : make_autograd_stage)(graph_, segments->plan, segment, link_options()));
    }
    for (const int microbatch : in_flight_) before_.emplace(microbatch, now_);
    now_ = make_stage_chain(*segments, values_, std::move(links));
  }

  const Graph& graph_;
  StageOptions options_;
  SegmentCutter cutter_;
  StageValues values_;
  std::vector<NodeId> nodes_;
  std::shared_ptr<Stage> now_;
  std::vector<int> in_flight_;                     // microbatches
  std::map<int, std::shared_ptr<Stage>> before_;  // those that began on a stage that has been cut since
  std::vector<NodeId> untaped_;
  std::vector<std::string> new_reasons_, reasons_;
  int num_cuts_ = 0;
};

}  // namespace

std::unique_ptr<Stage> make_segmented_stage(const Graph& graph, const Plan& plan, int stage, StageOptions options,
                                            SegmentCutter cutter) {
  return std::make_unique<SegmentedStage>(graph, plan, stage, std::move(options), std::move(cutter));
}

}  // namespace smp::runtime
