// What a stage on one GPU reaches beside LibTorch there: forward and backward of four microbatches a step, bf16 autocast.
// Prints "name value unit", and the times behind a ratio on stderr.
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <iostream>

#include "runtime/device/loaded_devices.h"
#include "smp/smp.h"
#include "tests/support/language_model.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

namespace smp::benchmarks {
namespace {

using support::Gpt, support::GptOptions;

constexpr int kMicrobatches = 4;
// The next step's losses are looked at by no peer.
const Config kOneGpu{.microbatches = kMicrobatches,
                     .device = DeviceKind::kCuda,
                     .nonfinite = Nonfinite::kIgnore,
                     .log_level = LogLevel::kWarning};

struct Workload {
  const char* name;
  GptOptions model;
  int64_t rows;  // of a microbatch
  int steps;
};
const Workload kLarge{"large", {.width = 2048, .tokens = 1024}, 4, 10}, kSmall{"small", {.width = 256}, 8, 40};

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCUDA, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCUDA, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

int64_t now_ns() { return runtime::this_ranks_device().now_ns(); }

/// Milliseconds per step, the least of five series.
template <class Step>
double time_of(const Workload& workload, const Step& step) {
  for (int i = 0; i < 6; ++i) step();
  double least = 1e30;
  for (int series = 0; series < 5; ++series) {
    const int64_t begin = now_ns();
    for (int i = 0; i < workload.steps; ++i) step();
    least = std::min(least, static_cast<double>(now_ns() - begin) * 1e-6 / workload.steps);
  }
  return least;
}

struct Batch {
  at::Tensor tokens, targets;
};
Batch make_batch(const Workload& workload, int64_t microbatches = kMicrobatches) {
  const auto options = at::TensorOptions(runtime::this_ranks_device().current()).dtype(at::kLong);
  const std::vector<int64_t> sizes{microbatches * workload.rows, workload.model.tokens};
  return {torch::randint(workload.model.vocab, sizes, options), torch::randint(workload.model.vocab, sizes, options)};
}

void clear(torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad().reset();
}

/// Calls `measure(step)`, whose step is LibTorch's.
template <class Measure>
double with_eager(const Workload& workload, int64_t microbatches, const Measure& measure) {
  Gpt net(workload.model, runtime::this_ranks_device().current());
  const Batch batch = make_batch(workload, microbatches);
  return measure([&] {
    clear(net);
    for (int64_t m = 0; m < microbatches; ++m) {
      at::Tensor loss;
      {
        const Autocast autocast;
        loss = net.forward(batch.tokens.narrow(0, m * workload.rows, workload.rows),
                           batch.targets.narrow(0, m * workload.rows, workload.rows));
      }
      (loss / microbatches).backward();
    }
  });
}

double time_of_eager(const Workload& workload) {
  return with_eager(workload, kMicrobatches, [&](const auto& step) { return time_of(workload, step); });
}

/// LibTorch's forward and backward of a microbatch as one CUDA graph, which adds to gradients that stay.
double time_of_graphed(const Workload& workload) {
  const runtime::Device& device = runtime::this_ranks_device();
  Gpt net(workload.model, device.current());
  const Batch batch = make_batch(workload);
  at::Tensor tokens = batch.tokens.narrow(0, 0, workload.rows).clone(),
             targets = batch.targets.narrow(0, 0, workload.rows).clone();
  const auto work = [&] {
    at::Tensor loss;
    {
      const Autocast autocast;
      loss = net.forward(tokens, targets);
    }
    (loss / kMicrobatches).backward();
  };
  for (int i = 0; i < 3; ++i) work();
  const auto graph = device.new_graph(nullptr);
  graph->record(work);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net.parameters()) gradients.push_back(parameter.grad());
  return time_of(workload, [&] {
    at::_foreach_zero_(gradients);
    for (int64_t m = 0; m < kMicrobatches; ++m) {
      tokens.copy_(batch.tokens.narrow(0, m * workload.rows, workload.rows));
      targets.copy_(batch.targets.narrow(0, m * workload.rows, workload.rows));
      graph->replay(0);
    }
  });
}

/// Calls `measure(step)` on each rank; the result is that of rank 0.
template <class Measure>
double with_smp(const Workload& workload, int ranks, const Config& config, const Measure& measure) {
  double result = 0;
  tests::run_smp_ranks(ranks, config, [&] {
    const auto net = std::make_shared<Gpt>(workload.model, runtime::this_ranks_device().current());
    DistributedModel<Gpt> model(net);
    const Batch batch = make_batch(workload, config.microbatches);
    auto step = smp::step([&](at::Tensor tokens, at::Tensor targets) {
      at::Tensor loss;
      {
        const Autocast autocast;
        loss = model(tokens, targets);
      }
      model.backward(loss);
      return loss;
    });
    const double measured = measure([&] {
      clear(*net);
      step(batch.tokens, batch.targets);
    });
    for (const runtime::StageReport& report : support::stage_reports()) {
      const std::string why = report.stays_on_autograd + report.stays_off_graphs;
      if (!why.empty()) std::cerr << workload.name << ", rank " << rank() << ": " << why << '\n';
    }
    if (rank() == 0) result = measured;
  });
  return result;
}

double time_of_smp(const Workload& workload, int ranks, Config config = kOneGpu) {
  return with_smp(workload, ranks, config, [&](const auto& step) { return time_of(workload, step); });
}

void print(const char* name, double value, const char* unit) {
  std::cout << name << ' ' << value << ' ' << unit << std::endl;
}

void compare(const Workload& workload) {
  const double eager = time_of_eager(workload), graphed = time_of_graphed(workload), own = time_of_smp(workload, 1);
  Config off = kOneGpu;
  off.cuda_graphs = CudaGraphs::kOff;
  const double taped = time_of_smp(workload, 1, off);
  std::cerr << workload.name << ": eager " << eager << " ms, LibTorch as a CUDA graph " << graphed << " ms, smp " << own
            << " ms, smp without graphs " << taped << " ms\n";
  if (std::strcmp(workload.name, "large") == 0) {
    print("gpu_stage_large", own, "ms");
    print("gpu_stage_vs_best_large", std::min(eager, graphed) / own, "ratio");
    const double two = time_of_smp(workload, 2);
    std::cerr << "large: two stages " << two << " ms\n";
    print("gpu_two_stages_vs_one_large", own / two, "ratio");
  } else {
    print("gpu_stage_small", own, "ms");
    print("gpu_stage_vs_eager_small", eager / own, "ratio");
    print("gpu_stage_vs_graphed_small", graphed / own, "ratio");
  }
}

/// Microseconds of the host for a step; nothing is waited for within it.
template <class Step>
double host_us_of(const Workload& workload, const Step& step) {
  const runtime::Device& device = runtime::this_ranks_device();
  for (int i = 0; i < 6; ++i) step();
  double least = 1e30;
  for (int i = 0; i < workload.steps; ++i) {
    device.wait(device.record());
    const int64_t begin = runtime::host().now_ns();
    step();
    least = std::min(least, static_cast<double>(runtime::host().now_ns() - begin) * 1e-3);
  }
  return least;
}

/// Of the host, for one more microbatch: the program's own body, which runs for each, and what smp and CUDA do for it.
void print_overhead() {
  const Workload tiny{"tiny", {.width = 64, .layers = 2, .vocab = 64, .tokens = 16}, 2, 20};
  constexpr int64_t kFew = 4, kMany = 36;
  const auto measure = [&](const auto& step) { return host_us_of(tiny, step); };
  const auto one_more = [&](const auto& host_us) { return (host_us(kMany) - host_us(kFew)) / (kMany - kFew); };
  const double own = one_more([&](int64_t microbatches) {
    Config config = kOneGpu;
    config.microbatches = microbatches;
    return with_smp(tiny, 1, config, measure);
  });
  const double eager = one_more([&](int64_t microbatches) { return with_eager(tiny, microbatches, measure); });
  std::cerr << "tiny: of the host, for one more microbatch: smp " << own << " us, eager " << eager << " us\n";
  print("gpu_overhead_us", own, "us");
  print("gpu_host_vs_eager", eager / own, "ratio");
}

}  // namespace
}  // namespace smp::benchmarks

int main() {
  using namespace smp::benchmarks;
  try {
    smp::runtime::use_device(smp::runtime::cuda_device());
    print_overhead();
    compare(kSmall);
    compare(kLarge);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
