// What recording a timeline costs: steps of a pipeline of two with and without it, in turn, in one run. The ratio is time
// with over time without. Small layers, so that actions are short: 16 times 64 rows through 8 Linear(256) per stage.
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "benchmarks/measure.h"
#include "smp/engine/context/context.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;

constexpr int64_t kMicrobatches = 16, kRows = 64, kWidth = 256;
constexpr int kLayers = 16, kRounds = 301;

torch::nn::Sequential make_net() {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  return net;
}

// Each rank's recorder is taken away for every second step.
class Switch {
 public:
  explicit Switch(std::shared_ptr<smp::engine::StepTimeline>& timeline) : timeline_(timeline) {}
  void set(bool records) {
    if (records != (timeline_ != nullptr)) std::swap(timeline_, kept_);
  }

 private:
  std::shared_ptr<smp::engine::StepTimeline>& timeline_;
  std::shared_ptr<smp::engine::StepTimeline> kept_;
};

void measure() {
  smp::DistributedModel model(make_net());
  auto step = smp::step([&](at::Tensor data) {
    auto loss = model(data).square().mean();
    model.backward(loss);
    return loss;
  });
  const auto data = torch::randn({kMicrobatches * kRows, kWidth});
  for (int i = 0; i < 5; ++i) step(data);  // planned, placed, and the timeline's warm-up
  Switch timeline(smp::engine::context("bench_timeline").timeline);
  std::vector<double> withs, withouts, ratios;
  for (int round = 0; round < kRounds; ++round) {
    double seconds[2] = {};
    for (const bool records : {round % 2 == 0, round % 2 != 0}) {
      timeline.set(records);
      smp::barrier();
      seconds[records] = seconds_of([&] {
        step(data);
        smp::barrier();
      });
    }
    withouts.push_back(seconds[0]);
    withs.push_back(seconds[1]);
    ratios.push_back(seconds[1] / seconds[0]);
  }
  timeline.set(true);
  if (smp::rank() != 0) return;
  report("timeline_cost", median(ratios), "x",
         {{"with ms", 1e3 * median(withs)}, {"without ms", 1e3 * median(withouts)}, {"rounds", kRounds}});
}

// What was measured has really been recorded.
void require_record(const std::string& trace) {
  std::ifstream in(trace);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  require(text.find("\"B 15\"") != std::string::npos, "expected a record of all microbatches in " + trace);
}

}  // namespace

int main() {
  const auto folder = std::filesystem::temp_directory_path() / ("timeline_cost_" + std::to_string(::getppid()));
  std::filesystem::create_directories(folder);
  const std::string trace = folder / "trace.json";
  at::set_num_threads(1);
  smp::Config config;
  config.microbatches = kMicrobatches;
  config.log_level = smp::LogLevel::kOff;
  config.timeline = trace;
  config.timeline_steps = 2 * kRounds;
  smp::init(config);
  require(smp::size() == 2, "expected two processes; start it with: smp run -np 2 bench_timeline");
  measure();
  const bool writes = smp::rank() == 0;
  smp::shutdown();
  if (writes) require_record(trace);
  if (writes) std::filesystem::remove_all(folder);
}
