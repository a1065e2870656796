// How long the exact contiguous split takes, with traffic and memory limits, and a whole plan.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "partitioner/partition/contiguous.h"
#include "partitioner/partition/partition.h"
#include "tests/support/graph_builder.h"

namespace {

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

double median_ms(int num_operators, int num_stages, int repetitions) {
  std::vector<double> ms;
  for (int i = 0; i < repetitions; ++i) {
    const Chain chain = transformer_like_chain(num_operators, num_stages, static_cast<unsigned>(i));
    const auto start = std::chrono::steady_clock::now();
    const auto split = smp::partitioner::split_chain(chain);
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    if (split.num_used_stages != num_stages || split.slowest_stage_us < split.least_us) {
      std::fprintf(stderr, "bench_partition: expected %d stages, got %d\n", num_stages, split.num_used_stages);
      std::exit(1);
    }
    ms.push_back(elapsed.count());
  }
  std::nth_element(ms.begin(), ms.begin() + repetitions / 2, ms.end());
  return ms[ms.size() / 2];
}

/// Everything that planning does, on a captured step: orders, splits, memory, schedules, simulations.
double plan_s(int num_operators, int num_ranks) {
  smp::testing::GraphBuilder builder;
  auto x = builder.input({16, 64});
  for (int i = 0; builder.num_nodes() + 3 < num_operators; ++i) {
    const auto y = builder.relu(builder.linear(x, "layers." + std::to_string(i), 64));
    x = builder.op("aten::add", {x, y}, {16, 64});
  }
  const auto graph = builder.build(builder.sum(x));
  smp::partitioner::PartitionOptions options;
  options.num_ranks = num_ranks;
  options.num_microbatches = 4 * num_ranks;
  const auto start = std::chrono::steady_clock::now();
  const auto plan = smp::partitioner::partition(graph, options);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return plan.predicted_step_us > 0 ? elapsed.count() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  if (only.empty() || only == "partition_1000x64_ms") {
    std::printf("partition_1000x64_ms %.3f ms\n", median_ms(1000, 64, 101));
  }
  if (only.empty() || only == "partition_100000x64_s") {
    std::printf("partition_100000x64_s %.3f s\n", median_ms(100000, 64, 5) / 1000);
  }
  if (only.empty() || only == "plan_10000x64_s") {
    std::printf("plan_10000x64_s %.3f s\n", plan_s(10000, 64));
  }
}
