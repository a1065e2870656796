// The comparison of plans.
#include "smp/engine/planning/auto_layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <set>
#include <sstream>
#include <tuple>

#include "partitioner/partition/choose_layout.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/arguments/split.h"
#include "smp/engine/planning/trial_captures.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {

using namespace partitioner;
using step_internal::Call;
using step_internal::Share;

namespace {

constexpr int kMostMicrobatches = 32;

// What divides all sizes that are cut.
int64_t rows_of(const Call& call) {
  int64_t rows = 0;
  for (const auto& argument : call.arguments({})) {
    const bool is_cut = argument.pieces.empty() && !argument.is_whole && argument.tensor.defined();
    const int64_t axis = is_cut ? axis_of(argument) : -1;
    if (axis >= 0 && axis < argument.tensor.dim()) rows = std::gcd(rows, argument.tensor.size(axis));
  }
  TORCH_CHECK_VALUE(rows > 0,
                    "step: expected a tensor among the arguments that is cut into microbatches, got none, so that ",
                    "microbatches=auto cannot know into how many. Give a number: Config::microbatches.");
  return rows;
}

std::string describe(const Layout& layout) {
  std::ostringstream text;
  text << layout.replicas << (layout.replicas == 1 ? " pipeline of " : " pipelines of ") << layout.pipeline_ranks
       << (layout.pipeline_ranks == 1 ? " rank, " : " ranks, ") << layout.microbatches << " microbatches";
  return text.str();
}

/// `groups`: pipeline ranks and replicas. `shared`: the replicas share the batch, else each has one of its own.
std::vector<LayoutCandidate> candidates_of(const Config& config, const Call& call, TrialCaptures& captures,
                                           const std::vector<std::pair<int, int>>& groups, bool shared) {
  const int64_t rows = config.microbatches == kAutoMicrobatches || shared ? rows_of(call) : 0;
  std::vector<LayoutCandidate> candidates;
  for (const auto& [pipeline_ranks, replicas] : groups) {
    const int64_t parts = shared ? replicas : 1;
    if (rows % parts != 0) continue;
    const auto counts = config.microbatches == kAutoMicrobatches ? microbatch_counts(rows / parts, kMostMicrobatches)
                                                                 : std::vector<int>{static_cast<int>(config.microbatches)};
    for (const int count : counts) {
      const Graph* graph = captures.graph(parts * count);
      if (graph != nullptr)
        candidates.push_back({pipeline_ranks, replicas, count, std::max<int64_t>(rows / parts, count), graph});
    }
  }
  return candidates;
}

// The ranks of a pipeline with one microbatch compute one after the other. Where each may as well be a replica, such a
// pipeline is for want of memory: a rule of thumb, for its graph, that of the whole batch, is the one that takes longest to
// measure.
std::vector<LayoutCandidate> without_last_resorts(const std::vector<LayoutCandidate>& candidates) {
  const auto is_one_rank = [](const LayoutCandidate& one) { return one.pipeline_ranks == 1; };
  std::vector<LayoutCandidate> others = candidates;
  if (std::any_of(candidates.begin(), candidates.end(), is_one_rank)) {
    std::erase_if(others, [](const LayoutCandidate& one) { return one.pipeline_ranks > 1 && one.microbatches == 1; });
  }
  return others;
}

struct Comparison {
  std::vector<LayoutCandidate> candidates;
  LayoutChoice choice;

  const LayoutCandidate& best() const { return candidates[choice.best]; }
};

Comparison compare(const std::vector<LayoutCandidate>& candidates, const PartitionOptions& options) {
  const std::vector<LayoutCandidate> usual = without_last_resorts(candidates);
  if (usual.size() == candidates.size()) return {candidates, choose_layout(candidates, options)};
  try {
    return {usual, choose_layout(usual, options)};
  } catch (const c10::ValueError&) {  // they do not fit
    return {candidates, choose_layout(candidates, options)};
  }
}

/// The best and what came next, fastest first.
std::string describe(const Comparison& comparison, bool shared) {
  constexpr size_t kMost = 4;
  const auto& [candidates, choice] = comparison;
  std::vector<size_t> order;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (choice.predictions[i].plan && i != choice.best) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return choice.predictions[a].us_per_row < choice.predictions[b].us_per_row; });
  order.insert(order.begin(), choice.best);
  std::ostringstream text;
  text << "chosen for batches of " << comparison.best().rows * (shared ? comparison.best().replicas : 1) << ", best of "
       << candidates.size() << ": ";
  for (size_t i = 0; i < std::min(kMost, order.size()); ++i) {
    const LayoutCandidate& one = candidates[order[i]];
    text << (i == 0   ? ""
             : i == 1 ? "; next "
                      : ", ")
         << describe(Layout{one.pipeline_ranks, one.replicas, one.microbatches}) << (i == 0 ? ", predicted " : " ")
         << choice.predictions[order[i]].plan->predicted_step_us / 1000 << " ms" << (i == 0 ? " per step" : "");
  }
  return text.str();
}

Layout choose(RankState& rank, const Call& call, const std::vector<std::pair<int, int>>& groups, bool shared) {
  TrialCaptures captures(rank, call);
  const std::vector<LayoutCandidate> candidates = candidates_of(rank.context.config, call, captures, groups, shared);
  if (candidates.empty()) captures.rethrow();
  const Comparison comparison = compare(candidates, rank.programs.options(*candidates.front().graph));
  if (rank.context.world->rank() == 0) rank.context.logger.info(describe(comparison, shared));
  const LayoutCandidate& best = comparison.best();
  return {best.pipeline_ranks, best.replicas, best.microbatches};
}

}  // namespace

std::vector<GraphToPlan> graphs_to_plan(RankState& rank, const Call& call) {
  const Context& context = rank.context;
  const bool shared = context.config.parallelism == Parallelism::kAuto;
  const auto groups = context.is_laid_out
                          ? std::vector<std::pair<int, int>>{{context.pipeline->size(), context.replicas->size()}}
                          : layouts_of(context.world->size());
  TrialCaptures captures(rank, call);
  std::vector<GraphToPlan> graphs;
  std::set<const Graph*> seen;
  for (const LayoutCandidate& candidate :
       without_last_resorts(candidates_of(context.config, call, captures, groups, shared))) {
    if (seen.insert(candidate.graph).second) graphs.push_back({*candidate.graph, captures.inputs_of(candidate.graph)});
  }
  return graphs;
}

Share share_of(RankState& rank, int step_number, const Call& call) {
  const Context& context = rank.context;
  const bool shared = context.config.parallelism == Parallelism::kAuto;
  Share share{.microbatches = context.config.microbatches};
  if (shared) share.replica = context.replicas->rank(), share.replicas = context.replicas->size();
  if (share.microbatches != kAutoMicrobatches) return share;
  const auto [known, is_new] = rank.auto_microbatches.try_emplace({step_number, rows_of(call)}, 0);
  if (is_new) {
    try {
      known->second = choose(rank, call, {{context.pipeline->size(), context.replicas->size()}}, shared).microbatches;
    } catch (...) {
      rank.auto_microbatches.erase(known);
      throw;
    }
  }
  share.microbatches = known->second;
  return share;
}

namespace {

std::string choose_for_all(RankState& rank, int step_number, const Call& call) {
  runtime::WireWriter out;
  std::string error;
  Layout layout;
  int64_t rows = 0;
  try {
    layout = choose(rank, call, layouts_of(rank.context.world->size()), /*shared=*/true);
    if (rank.context.config.microbatches == kAutoMicrobatches) rows = rows_of(call);
  } catch (...) {
    error = runtime::describe_exception(std::current_exception());
  }
  out.put(static_cast<int32_t>(step_number));
  out.put(static_cast<int32_t>(layout.pipeline_ranks));
  out.put(layout.microbatches);
  out.put(rows);
  out.put(error);
  return out.take();
}

}  // namespace

void lay_out(RankState& rank, int step_number, const Call& call) {
  runtime::Transport& world = *rank.context.world;
  std::string bytes;
  if (world.rank() == 0) {
    bytes = choose_for_all(rank, step_number, call);
    for (int r = 1; r < world.size(); ++r) world.send_bytes(r, runtime::kLayoutTag, bytes);
  } else {
    bytes = world.receive_bytes(0, runtime::kLayoutTag);
  }
  const auto [step_function, pipeline_ranks, microbatches, rows, error] =
      runtime::read_all(bytes, "layout", [](runtime::WireReader& in) {
        return std::tuple{in.get<int32_t>(), in.get<int32_t>(), in.get<int64_t>(), in.get<int64_t>(), in.get_string()};
      });
  TORCH_CHECK_VALUE(error.empty(), error);
  TORCH_CHECK(step_function == step_number, "step: expected all ranks to call the same step function, got number ",
              step_function, " on rank 0 and number ", step_number, " on rank ", world.rank(), ".");
  // Other leaders would compare fewer layouts, and might cut their shares in another way.
  if (rows > 0) rank.auto_microbatches[{step_number, rows}] = microbatches;
  rank.context.lay_out(pipeline_ranks);
  rank.executor.emplace(*rank.context.pipeline, rank.context.buffers);
}

}  // namespace smp::engine
