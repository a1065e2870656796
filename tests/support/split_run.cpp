// Zoo models through smp.
#include "tests/support/split_run.h"

#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "runtime/device/device.h"
#include "smp/engine/models/models.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/smp_ranks.h"

namespace smp::support {
namespace {

constexpr uint64_t kModelSeed = 7, kDataSeed = 11;

void clear_gradients(torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad().reset();
}

std::vector<StepOutput> call(const ZooModel& model, DistributedModel<torch::nn::Module>& distributed,
                             torch::nn::Module& module, const SplitOptions& options) {
  auto step = smp::step([&](const std::vector<at::Tensor>& microbatch) {
    const BodyResult result = model.body(module, microbatch);
    distributed.backward(result.loss);
    for (const at::Tensor& loss : result.more_losses) distributed.backward(loss);
    std::vector<at::Tensor> returned{result.loss};
    returned.insert(returned.end(), result.outputs.begin(), result.outputs.end());
    return returned;
  });
  std::vector<StepOutput> outputs;
  for (int s = 0; s < options.steps; ++s) {
    if (options.clears_gradients) clear_gradients(module);
    std::vector<at::Tensor> inputs = model.make_inputs(options.batch, kDataSeed + static_cast<uint64_t>(s));
    for (at::Tensor& input : inputs) input = input.chunk(dp_size())[dp_rank()].clone();
    outputs = step(inputs);
  }
  return outputs;
}

}  // namespace

OracleResult run_split(const ZooModel& model, const SplitOptions& options) {
  const auto module = model.make(kModelSeed);
  options.place(*module);
  DistributedModel<torch::nn::Module> distributed(module, options.model);
  if (options.bucket_bytes > 0) ModelAccess::of(distributed).reduction.bucket_bytes = options.bucket_bytes;
  const std::vector<StepOutput> outputs = call(model, distributed, *module, options);
  options.look();
  OracleResult result;
  for (int64_t m = 0; m < outputs.at(0).size(); ++m) {
    result.losses.push_back(outputs[0][m]);
    auto& rest = result.outputs.emplace_back();
    for (size_t i = 1; i < outputs.size(); ++i) rest.push_back(outputs[i][m]);
  }
  for (const auto& [name, tensor] : distributed.local_named_parameters()) {
    result.gradients[name] = tensor.grad().defined() ? tensor.grad().clone() : at::Tensor();
  }
  const StateDict state = distributed.state_dict();
  for (const auto& entry : state.entries) {
    if (entry.is_buffer) result.buffers[entry.name] = entry.tensor;
  }
  return result;
}

std::vector<runtime::StageReport> stage_reports() {
  std::vector<runtime::StageReport> reports;
  for (const auto& [index, stage] :
       engine::rank_state("stage_reports").models.all().front()->first_program->rank_program.stages) {
    reports.push_back(stage->report());
  }
  return reports;
}

bool PipelineRun::is_taped() const {
  return std::all_of(reports.begin(), reports.end(), [](const runtime::StageReport& report) {
    return report.num_taped > 0 && report.stays_on_autograd.empty();
  });
}

std::string PipelineRun::reasons() const {
  std::string text;
  for (const runtime::StageReport& report : reports) text += report.stays_on_autograd + "; ";
  return text;
}

PipelineRun run_on_pipeline(const ZooModel& model, int ranks, Config config, const SplitOptions& options) {
  std::mutex mutex;
  PipelineRun all;
  std::vector<runtime::Event> ends;  // of what ranks have given the device: others read what they have made
  const auto wait_for_all = [&ends] {
    for (const runtime::Event& end : ends) runtime::this_ranks_device().wait(end);
  };
  config.seed = kSplitBaseSeed;
  tests::run_smp_ranks(ranks, config, [&] {
    std::vector<runtime::StageReport> reports;
    SplitOptions looked = options;
    looked.look = [&] {
      reports = stage_reports();
      options.look();
    };
    OracleResult mine = run_split(model, looked);
    const std::lock_guard<std::mutex> lock(mutex);
    ends.push_back(runtime::this_ranks_device().record());
    wait_for_all();
    if (!all.result.losses.empty()) expect_bit_equal(mine.losses, all.result.losses, model.name + ": losses on two ranks");
    runtime::this_ranks_device().wait(runtime::this_ranks_device().record());  // before the others' go
    all.result.losses = std::move(mine.losses);
    all.result.outputs = std::move(mine.outputs);
    all.result.buffers = std::move(mine.buffers);
    for (auto& [name, gradient] : mine.gradients) all.result.gradients[name] = std::move(gradient);
    all.reports.insert(all.reports.end(), reports.begin(), reports.end());
  });
  wait_for_all();
  return all;
}

OracleResult run_unsplit(const ZooModel& model, int microbatches, const SplitOptions& options) {
  const auto module = model.make(kModelSeed);
  const at::Device device = runtime::this_ranks_device().current();
  module->to(device);
  OracleResult result;
  for (int s = 0; s < options.steps; ++s) {
    if (options.clears_gradients) clear_gradients(*module);
    const auto step = static_cast<uint64_t>(s);
    std::vector<at::Tensor> inputs = model.make_inputs(options.batch, kDataSeed + step);
    for (at::Tensor& input : inputs) input = input.to(device);
    result =
        run_oracle(model, *module, inputs, microbatches, {.base_seed = kSplitBaseSeed, .step = step}, /*training=*/true);
  }
  return result;
}

}  // namespace smp::support
