// How long the exact contiguous split takes, with traffic and memory limits, and a whole plan.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/measure.h"
#include "partitioner/partition/contiguous.h"
#include "partitioner/partition/partition.h"
#include "tests/support/graph_builder.h"

namespace {

using namespace smp::benchmarks;
using smp::partitioner::Chain;

/// Goes to the next operator and, one in eight, to one further on; its gradient comes back from both.
void add_value(int made_at, int num_operators, double us, std::mt19937& random, Chain& chain) {
  std::vector<int> readers{made_at + 1};
  const int further = made_at + 2 + static_cast<int>(random() % 64);
  if (random() % 8 == 0 && further < num_operators) readers.push_back(further);
  chain.crossings.push_back({made_at, readers, us, false});
  chain.crossings.push_back({made_at, readers, us, true});
}

Chain transformer_like_chain(int num_operators, int num_stages, unsigned seed) {
  std::mt19937 random(seed);
  std::lognormal_distribution<double> us(3.0, 1.0);
  std::uniform_real_distribution<double> message_us(0.0, 20.0);
  Chain chain;
  int64_t total_bytes = 0;
  for (int i = 0; i <= num_operators; ++i) {
    chain.cut_allowed.push_back(random() % 8 != 0);
    if (i == num_operators) break;
    chain.time_us.push_back(us(random));
    if (i + 1 < num_operators) add_value(i, num_operators, message_us(random), random, chain);
    chain.fixed_bytes.push_back(static_cast<int64_t>(random() % 4'000'000));
    chain.activation_bytes.push_back(static_cast<int64_t>(random() % 100'000));
    total_bytes += chain.fixed_bytes.back() + num_stages * chain.activation_bytes.back();
  }
  for (int s = 0; s < num_stages; ++s) {
    chain.stages.push_back({num_stages - s, 2 * total_bytes / num_stages});
  }
  return chain;
}

double median_s(int num_operators, int num_stages, int repetitions) {
  std::vector<double> seconds;
  for (int i = 0; i < repetitions; ++i) {
    const Chain chain = transformer_like_chain(num_operators, num_stages, static_cast<unsigned>(i));
    const double start = seconds_now();
    const auto split = smp::partitioner::split_chain(chain);
    seconds.push_back(seconds_now() - start);
    require(split.num_used_stages == num_stages && split.slowest_stage_us >= split.least_us,
            "expected " + std::to_string(num_stages) + " stages, got " + std::to_string(split.num_used_stages));
  }
  return median(seconds);
}

smp::partitioner::Graph residual_layers(int num_operators) {
  smp::testing::GraphBuilder builder;
  auto x = builder.input({16, 64});
  for (int i = 0; builder.num_nodes() + 3 < num_operators; ++i) {
    const auto y = builder.relu(builder.linear(x, "layers." + std::to_string(i), 64));
    x = builder.op("aten::add", {x, y}, {16, 64});
  }
  return builder.build(builder.sum(x));
}

smp::partitioner::PartitionOptions options_for(int num_ranks) {
  smp::partitioner::PartitionOptions options;
  options.request.num_ranks = num_ranks;
  options.request.num_microbatches = 4 * num_ranks;
  return options;
}

/// Everything that planning does, on a captured step: orders, splits, memory, schedules, simulations.
double plan_s(int num_operators, int num_ranks) {
  const auto graph = residual_layers(num_operators);
  const auto options = options_for(num_ranks);
  const double start = seconds_now();
  const auto plan = smp::partitioner::partition(graph, options);
  const double seconds = seconds_now() - start;
  require(plan.predicted_step_us > 0, "expected a plan with a predicted time, got none");
  return seconds;
}

/// The choice of what runs again, below a limit of 70 % of what the fastest plan takes.
double choose_s(int num_operators, int num_ranks) {
  const auto graph = residual_layers(num_operators);
  auto options = options_for(num_ranks);
  const auto free = smp::partitioner::partition(graph, options);
  const auto most = *std::max_element(free.predicted_peak_bytes.begin(), free.predicted_peak_bytes.end());
  options.request.memory_limit_bytes = most * 7 / 10;
  options.request.chooses_recomputation = true;
  const double start = seconds_now();
  const auto plan = smp::partitioner::partition(graph, options);
  const double seconds = seconds_now() - start;
  require(!plan.recomputation.is_empty(), "expected a plan with recomputation, got one without");
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (is_wanted(argc, argv, "partition_1000x64_ms")) report("partition_1000x64_ms", 1e3 * median_s(1000, 64, 101), "ms");
  if (is_wanted(argc, argv, "partition_100000x64_s")) report("partition_100000x64_s", median_s(100000, 64, 5), "s");
  if (is_wanted(argc, argv, "plan_10000x64_s")) report("plan_10000x64_s", plan_s(10000, 64), "s");
  if (is_wanted(argc, argv, "recompute_10000x4_s")) report("recompute_10000x4_s", choose_s(10000, 4), "s");
  if (is_wanted(argc, argv, "recompute_100000x4_s")) report("recompute_100000x4_s", choose_s(100000, 4), "s");
}
