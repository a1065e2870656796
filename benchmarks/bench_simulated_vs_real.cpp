// How much longer a step takes than the planner's simulator says: a pipeline whose stages sleep
// instead of computing, so that many processes fit on few cores, through the whole library. What
// the ratio holds beyond 1 is what messages, waiting and the step around the schedule cost.
#include <sched.h>
#include <time.h>
#include <torch/torch.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "benchmarks/measure.h"
#include "partitioner/schedule/simulate.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
namespace schedules = smp::partitioner;

constexpr double kForwardSeconds = 0.005, kBackwardSeconds = 0.010;
constexpr int64_t kMicrobatches = 32, kRows = 4, kWidth = 16;  // messages of 0.5 KB
constexpr int kSteps = 11;

// What the actions of this process have taken in the step, by microbatch.
std::vector<double> forwards_us, backwards_us;
double backward_start = 0;

// Every core has something to do, which gives way to anything else: a virtual core that halts is given away, and on a busy
// host comes back milliseconds late. Stages that compute instead of sleeping halt none.
class AwakeCores {
 public:
  AwakeCores() {
    cpu_set_t cores;
    require(sched_getaffinity(0, sizeof(cores), &cores) == 0, "the cores of this process are unknown");
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &cores)) threads_.emplace_back([this, core] { keep_awake(core); });
    }
  }
  ~AwakeCores() {
    is_over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void keep_awake(int core) const {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    const sched_param no_priority{};
    require(sched_setaffinity(0, sizeof(own), &own) == 0 && sched_setscheduler(0, SCHED_IDLE, &no_priority) == 0,
            "a thread cannot give way to all others");
    while (!is_over_) sched_yield();
  }

  std::atomic<bool> is_over_ = false;
  std::vector<std::thread> threads_;
};

void sleep_for(double seconds) {
  const timespec duration{0, static_cast<long>(1e9 * seconds)};
  nanosleep(&duration, nullptr);
}

// Comes first in the forward of a stage, and so last in its backward.
struct Enter : torch::autograd::Function<Enter> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& scale) { return scale.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    backwards_us.push_back(1e6 * (seconds_now() - backward_start));
    return gradients;
  }
};

// Comes last in the forward of a stage, and so first in its backward.
struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    sleep_for(kForwardSeconds);
    return x + 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    backward_start = seconds_now();
    sleep_for(kBackwardSeconds);
    return gradients;
  }
};

at::Tensor run_stage(const at::Tensor& x, const at::Tensor& scale) {
  at::Tensor y;
  forwards_us.push_back(1e6 * seconds_of([&] { y = Sleep::apply(x * Enter::apply(scale)); }));
  return y;
}

// One layer per stage. Its scale is a parameter because placement goes by parameters.
struct Sleeper : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return smp::opaque([](at::Tensor t, at::Tensor by) { return run_stage(t, by); }, x, scale);
  }
  at::Tensor scale = register_parameter("scale", torch::ones({kWidth}));
};

struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < smp::size(); ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<Sleeper>()));
      smp::set_partition(*layers.back(), i);
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<Sleeper>> layers;
};

// The library's own table for the step that has just run.
schedules::Schedule schedule_of(const smp::engine::Program& program) {
  return generate({schedules::ScheduleKind::kInterleaved}, stage_graph(program.plan, program.graph), kMicrobatches);
}

struct StepTimes {
  double real_us = 0;       // until the last rank is done
  double simulated_us = 0;  // from the times that each rank has measured in this step
};

StepTimes timed_step(const std::function<void()>& step, const schedules::Schedule& schedule) {
  forwards_us.clear();
  backwards_us.clear();
  smp::barrier();
  const double real_us = 1e6 * seconds_of(step);
  require(forwards_us.size() == kMicrobatches && backwards_us.size() == kMicrobatches,
          "a stage did not sleep once per action");
  StepTimes times;
  schedules::SimulationInput input;
  for (const auto& [forward_us, backward_us, real] :
       smp::allgather(std::make_tuple(forwards_us, backwards_us, real_us), smp::CommGroup::WORLD)) {
    auto& stage = input.microbatch_times.emplace_back();
    for (size_t m = 0; m < forward_us.size(); ++m) stage.push_back({forward_us[m], backward_us[m]});
    times.real_us = std::max(times.real_us, real);
  }
  times.simulated_us = simulate(schedule, input).makespan_us;
  return times;
}

void measure(const std::string& name) {
  smp::DistributedModel model(std::make_shared<Net>());
  auto step = smp::step([&](at::Tensor data) {
    const at::Tensor loss = model(data).mean();
    model.backward(loss);
    return loss;
  });
  const auto data = torch::zeros({kMicrobatches * kRows, kWidth});
  const smp::StepOutput losses = step(data);
  require(losses.reduce_mean().item<double>() == smp::size(), "a loss is not the number of stages passed");
  const schedules::Schedule schedule = schedule_of(*smp::engine::rank_state("measure").models.all().front()->first_program);
  std::vector<double> ratios, reals_ms, simulated_ms;
  for (int s = 0; s < kSteps; ++s) {
    const StepTimes times = timed_step([&] { step(data); }, schedule);
    reals_ms.push_back(times.real_us / 1e3);
    simulated_ms.push_back(times.simulated_us / 1e3);
    ratios.push_back(times.real_us / times.simulated_us);
  }
  if (smp::rank() != 0) return;
  report(name, median(ratios), "x",
         {{"real ms", median(reals_ms)},
          {"simulated ms", median(simulated_ms)},
          {"ms if no sleep were late", 1e3 * (kMicrobatches + smp::size() - 1) * (kForwardSeconds + kBackwardSeconds)}});
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  smp::init({.microbatches = kMicrobatches, .auto_partition = false, .log_level = smp::LogLevel::kOff});
  std::optional<AwakeCores> awake;  // one for all processes of this machine
  if (smp::local_rank() == 0) awake.emplace();
  const std::string name = "simulated_vs_real_" + std::to_string(smp::size());
  require(is_wanted(argc, argv, name), "on this many processes it measures " + name);
  measure(name);
  smp::shutdown();
}
