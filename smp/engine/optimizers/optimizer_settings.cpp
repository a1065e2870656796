// The first line counts steps, the others are options, one each.
#include "smp/engine/optimizers/optimizer_settings.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <sstream>

#include "smp/engine/optimizers/optimizer.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {
namespace {

// "optimizer 0 (SGD), group 1: lr = 0.1"
void describe_options(const Optimizer& alive, size_t number, std::ostream& text) {
  const StateView* state = alive.view->state();
  const std::string optimizer =
      "\noptimizer " + std::to_string(number) + " (" + (state ? state->kind() : "of another kind") + ")";
  const std::vector<OptimizerGroup> groups = alive.view->groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::string group = optimizer + ", group " + std::to_string(g) + ": ";
    uint32_t pattern = 2166136261U;  // FNV-1a
    for (const at::Tensor& parameter : groups[g].parameters) {
      const runtime::NamedTensor* named = alive.model->own.find(parameter);
      const ptrdiff_t place = named ? named - alive.model->own.tensors().data() : -1;
      pattern = (pattern ^ static_cast<uint32_t>(place)) * 16777619U;
    }
    text << group << groups[g].parameters.size() << " parameters (pattern " << std::hex << pattern << std::dec << ")";
    for (const auto& [name, value] : groups[g].options) text << group << name << " = " << exact_text(value);
  }
}

}  // namespace

std::string describe_optimizers(const RankState& rank) {
  std::ostringstream counts, options;
  size_t number = 0;
  for (const auto& alive : rank.live_optimizers()) {
    counts << (number == 0 ? "" : ", ") << alive->num_steps;
    describe_options(*alive, number++, options);
  }
  return counts.str() + options.str();
}

std::string differing_optimizers(const std::string& caller, const std::string& optimizers, const std::string& rank,
                                 const std::string& other_optimizers, const std::string& other_rank) {
  std::istringstream lines(optimizers), other_lines(other_optimizers);
  std::string line, other;
  std::getline(lines, line), std::getline(other_lines, other);
  if (line != other) {
    return caller + ": expected every rank to call DistributedOptimizer::step() equally often, got " + line + " calls on " +
           rank + " and " + other + " on " + other_rank +
           ". Each rank updates the parameters that live there, so parts of the model have missed an update. Call step() of "
           "every optimizer on every rank, and load an earlier state.";
  }
  while (line == other && std::getline(lines, line) && std::getline(other_lines, other)) continue;
  return caller + ": expected optimizers with the same options and parameter groups on every rank, got '" + line + "' on " +
         rank + " and '" + other + "' on " + other_rank +
         ". Each rank updates a part of the model, or a replica of it, by its own options. Set them on every rank alike, "
         "learning rates too.";
}

void check_same_optimizers(runtime::Transport& ranks, const std::string& own, const std::string& kind, const char* caller) {
  const std::vector<std::string> all = ranks.all_gather(own);
  size_t first = 0;
  while (first < all.size() && all[first].empty()) ++first;
  for (size_t r = first; r < all.size(); ++r) {
    TORCH_CHECK_VALUE(
        all[r].empty() || all[r] == all[first],
        differing_optimizers(caller, all[first], kind + std::to_string(first), all[r], kind + std::to_string(r)));
  }
}

void check_optimizers(const RankState& rank, runtime::Transport& ranks, const char* caller) {
  const bool is_world = &ranks == rank.context.world.get();
  check_same_optimizers(ranks, describe_optimizers(rank), is_world ? "rank " : "pipeline rank ", caller);
}

void forget_optimizer_steps(const RankState& rank) {
  for (const auto& alive : rank.live_optimizers()) alive->num_steps = 0;
}

std::string exact_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace smp::engine
