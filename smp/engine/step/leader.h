// The leader's part of a step: it runs the body for each microbatch and tells the followers what to run.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/step_protocol.h"
#include "smp/engine/step/replica_meeting.h"
#include "smp/engine/step/step_rounds.h"
#include "smp/step_call.h"

namespace smp::engine {

/// Bodies run one after the other, as in a plain loop. One that reads a value finds it computed: at the first read the
/// forwards of this microbatch and all later ones run through the pipeline, on the assumption that their bodies will do
/// what the recording says. Each body proves that when it has ended; where one does something else, the forwards from
/// that microbatch on are undone and run again. Gradients are touched only after the last body.
class Leader {
 public:
  Leader(RankState& rank, int step_number, const step_internal::Call& call)
      : rank_(rank), step_number_(step_number), call_(call) {}

  /// Throws what refuses the step, after telling the followers.
  step_internal::Results lead();

 private:
  /// How far forwards run ahead of the bodies.
  enum class Ahead {
    kNone,      // no body has read a value that stages compute: the step is one round
    kAll,       // one has, and later ones are taken to do as it does
    kOneByOne,  // a later one did not, so each is waited for: each may use a number of its own
  };

  MicrobatchInputs split();
  void capture_bodies();
  bool may_repeat_first_body() const;
  std::vector<at::Tensor> read(const runtime::ValueRead& read);
  std::optional<std::vector<at::Tensor>> probe(const runtime::ValueRead& read);
  void begin_ahead();
  void forward_until(size_t end, const runtime::CapturedBody& current);
  bool all_here(const runtime::ValueRead& read) const;
  void check_made(const partitioner::Graph& graph) const;

  /// Throws what has ended the step, which a body may have caught: nothing could answer another read.
  void check_goes_on() const;
  /// What fn() returns. What it throws is the failure of this step, and ends the job.
  template <class Fn>
  auto or_fail(const Fn& fn) {
    return runtime::or_end_the_job(*rank_.context.world, [&] {
      try {
        return fn();
      } catch (...) {
        failure_ = std::current_exception();
        throw;
      }
    });
  }

  runtime::StepMessage new_message(runtime::Round round, size_t first) const;
  Program& add_microbatch(const runtime::CapturedBody& body, runtime::StepMessage& message);
  Program& add_program(const runtime::Recording& recording, runtime::StepMessage& message);
  std::optional<step_internal::Results> lead_round(runtime::StepMessage& message);
  void leave_out_dropped();
  void check_random_stream(bool trains) const;
  void describe_training(runtime::StepMessage& message) const;
  void meet_replicas(runtime::StepMessage& message, bool is_last);
  void send(runtime::StepMessage& message);
  void refuse(runtime::StepMessage& message);

  RankState& rank_;
  int step_number_;
  const step_internal::Call& call_;
  ReplicaMeeting meeting_{rank_, step_number_};
  StepRounds rounds_{rank_};
  std::vector<step_internal::StepTensor> arguments_;
  MicrobatchInputs inputs_;
  std::vector<runtime::CapturedBody> bodies_;            // that have ended
  std::vector<runtime::CapturedBody> assumed_;           // by microbatch: what its forward ran as
  runtime::TensorHomes planned_ = rank_.models.homes();  // placement after the programs planned so far
  std::optional<bool> trains_;                           // which random numbers the forwards so far drew
  Ahead ahead_ = Ahead::kNone;
  bool has_read_ = false;                        // a body has, be it of its arguments alone
  std::exception_ptr failure_;                   // of a round or a meeting
  std::optional<runtime::StepMessage> refusal_;  // by the replicas, in answer to a read
  std::vector<uint64_t> added_;                  // programs new in this step
  std::vector<uint64_t> forgotten_;              // programs that the followers do not know to be forgotten
};

}  // namespace smp::engine
