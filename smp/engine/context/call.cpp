// The beginning of calls, and their names in errors.
#include "smp/engine/context/call.h"

#include <algorithm>

#include "runtime/transport/checks.h"

namespace smp::engine {

std::vector<int> ranks_of_step(const Context& context) {
  const int own = context.world->rank();
  std::vector<int> ranks = context.topology.group(runtime::GroupKind::kPipeline, own);
  for (const int replica : context.topology.group(runtime::GroupKind::kDataParallel, own)) {
    if (replica != own) ranks.push_back(replica);
  }
  return ranks;
}

void tell_call(Context& context, std::string_view name, const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    if (rank != context.world->rank()) context.calls.tell(rank, name);
  }
}

// Those of a step first: who is in one instead tells nobody else. Of ranks in a step and ranks that are not, two are in one
// pipeline or replicas of each other, so the job ends.
void hear_call(Context& context, std::string_view name, const std::vector<int>& ranks) {
  std::vector<int> in_order = ranks;
  const std::vector<int> first = ranks_of_step(context);
  std::stable_partition(in_order.begin(), in_order.end(),
                        [&](int rank) { return std::find(first.begin(), first.end(), rank) != first.end(); });
  for (const int rank : in_order) {
    if (rank == context.world->rank()) continue;
    context.calls.hear(rank, std::string(name) + ", which waits until rank " + std::to_string(rank) + " calls it too");
  }
}

std::string first_complaint(const std::string& own, const Context& context) {
  for (const std::string& text : context.world->all_gather(own)) {
    if (!text.empty()) return text;
  }
  return "";
}

std::string listed(const std::vector<std::string>& items, size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), most); ++i) text += (i == 0 ? "'" : ", '") + items[i] + "'";
  if (items.size() > most) text += " and " + std::to_string(items.size() - most) + " more";
  return text;
}

CommError failed_call(std::string_view name, const std::vector<int>& ranks, const CommError& error) {
  return CommError(std::string(name) + " of ranks " + runtime::text_of(ranks) + ": " + error.what());
}

}  // namespace smp::engine
