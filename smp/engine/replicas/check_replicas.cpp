// Whether replicas have the same weights.
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "runtime/exchange/wire.h"
#include "runtime/stage/bit_digest.h"
#include "smp/engine/context/call.h"
#include "smp/engine/engine.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {
namespace {

// In the order of the model, which is that of the replicas.
std::string digests_of(const std::vector<runtime::NamedTensor>& parameters) {
  runtime::WireWriter out;
  for (const auto& parameter : parameters) out.put(runtime::bit_digest(parameter.tensor));
  return out.take();
}

// "one value on replicas 0, 2 and another on replica 1", the most frequent first; empty where all are equal.
std::string described(const std::vector<uint64_t>& digests) {
  std::map<uint64_t, std::vector<size_t>> replicas;
  for (size_t replica = 0; replica < digests.size(); ++replica) replicas[digests[replica]].push_back(replica);
  if (replicas.size() == 1) return "";
  std::vector<std::vector<size_t>> groups;
  for (auto& [digest, group] : replicas) groups.push_back(std::move(group));
  std::sort(groups.begin(), groups.end(),
            [](const auto& a, const auto& b) { return a.size() != b.size() ? a.size() > b.size() : a < b; });
  std::string text;
  for (const auto& group : groups) {
    text += (text.empty() ? "one value on replica" : " and another on replica") + std::string(group.size() > 1 ? "s" : "");
    for (const size_t replica : group) text += (replica == group.front() ? " " : ", ") + std::to_string(replica);
  }
  return text;
}

}  // namespace

void check_replicas(const Model& model) {
  const char* caller = "check_replicas";
  refuse_in_body(caller);
  refuse_in_join(caller);
  const RankState& own = rank_state(caller);
  TORCH_CHECK(model.is_partitioned(), caller,
              ": expected a call after the first step of the model, which gives all replicas ", "the weights of dp_rank 0.");
  const std::string complaint = in_call(own.context, caller, runtime::GroupKind::kWorld, [&] {
    std::vector<runtime::NamedTensor> parameters;
    for (const auto& named : model.own.tensors()) {
      if (named.kind == partitioner::ValueKind::kParameter && own.models.is_here(named.tensor)) parameters.push_back(named);
    }
    std::vector<std::vector<uint64_t>> digests(parameters.size());
    for (const std::string& bytes : own.context.replicas->all_gather(digests_of(parameters))) {
      runtime::read_all(bytes, "digests of parameters", [&](runtime::WireReader& in) {
        for (auto& of_one : digests) of_one.push_back(in.get<uint64_t>());
      });
    }
    std::string difference;
    for (size_t i = 0; i < digests.size() && difference.empty(); ++i) {
      const std::string values = described(digests[i]);
      if (!values.empty()) difference = "parameter '" + parameters[i].name + "', got " + values;
    }
    return first_complaint(difference, own.context);
  });
  with_exit_code(ExitCode::kNumerics, [&] {
    TORCH_CHECK(
        complaint.empty(), caller, ": expected the same bits on all replicas of ", complaint,
        ". A host computes differently, as processors of different kinds do, or its memory is bad, or the program has "
        "changed one replica alone. Load a save that was made before.");
  });
}

}  // namespace smp::engine
