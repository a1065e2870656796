// One step on one rank, round by round.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/exchange/step_protocol.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/step_call.h"

namespace smp::engine {

/// The step's arguments on the leader, by microbatch; empty elsewhere.
using MicrobatchInputs = std::vector<std::vector<at::Tensor>>;

/// On the leader: sends them a round, which it performs with them.
void tell_followers(const RankState& rank, const runtime::StepMessage& message);
/// Throws what the leader refused the step for.
[[noreturn]] void throw_refusal(const runtime::StepMessage& message);

/// Random numbers of microbatch `number` of this replica in a step that trains or not.
runtime::RandomState random_state(const RankState& rank, bool trains, uint64_t step, uint64_t number, uint64_t count);

/// Tensors of a model that live here, of the kinds that are wanted: every replica gets those of replica `source`.
/// Collective over the replicas.
void broadcast_over_replicas(const RankState& rank, const Model& model, int source,
                             const std::function<bool(const runtime::NamedTensor&)>& is_wanted);

class StepRounds {
 public:
  explicit StepRounds(RankState& rank) : rank_(rank) {}

  /// Performs a round; returns what the step returns when it was the last one. A whole round takes the inputs.
  /// Collective over the pipeline (and, in the first round and the last, its replicas).
  std::optional<step_internal::Results> perform_round(const runtime::StepMessage& message, MicrobatchInputs& inputs);
  /// Forgets the forwards from microbatch `first` on and undoes what they wrote to parameters and buffers.
  void drop_from(size_t first);
  /// On the leader: a value that the forward of a microbatch read.
  const at::Tensor& value(size_t microbatch, partitioner::ValueId id) const { return read_.at(microbatch).at(id); }
  /// On the leader: the table of the whole round that comes next, for these programs, one per microbatch.
  /// Throws c10::ValueError where they have different stages.
  void prove_table(const std::vector<Program*>& programs);
  /// Of a step whose forwards have all run: throws c10::NotImplementedError where one has written to what the backward of an
  /// earlier one may need.
  void check_writes() const;

 private:
  using Values = std::map<partitioner::ValueId, at::Tensor>;
  using Written = std::vector<std::pair<at::Tensor, at::Tensor>>;  // a tensor, and a copy from before

  void begin(const runtime::StepMessage& message);
  void add_runs(const runtime::StepMessage& message, MicrobatchInputs& inputs);
  runtime::MicrobatchRun make_run(const runtime::StepMessage& message, size_t index, MicrobatchInputs& inputs);
  void keep_written(runtime::MicrobatchRun& run, const Program& program, size_t number);
  void place(const std::shared_ptr<Program>& program, runtime::Round round);
  void perform_column(const partitioner::Schedule& schedule, size_t first, runtime::RunOptions options = {});
  const partitioner::Schedule& schedule(TablePart part, size_t first);
  void collect_reads(size_t first);
  step_internal::Results end(const runtime::StepMessage& message, TablePart part);
  std::vector<int> trained_on(const std::string& parameter) const;
  std::vector<StepOutput> exchange_recorded_results();
  void shadow(const runtime::StepMessage& message);
  void count(const runtime::StepMessage& message);
  void note_pace(const runtime::StepMessage& message);
  void broadcast_buffers(int source);

  RankState& rank_;
  std::vector<std::pair<std::shared_ptr<Program>, runtime::Round>> added_;  // programs new in this step
  bool has_begun_ = false;
  const partitioner::Schedule* whole_ = nullptr;    // the table that was proved
  std::vector<std::shared_ptr<Program>> programs_;  // by microbatch, like all below
  std::vector<runtime::MicrobatchRun> runs_;
  runtime::RankResults results_;
  std::map<size_t, Values> read_;
  std::map<size_t, Written> written_;
};

}  // namespace smp::engine
