// Events one by one, so that a long record needs no tree of its own.
#include "partitioner/report/trace_io.h"

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <limits>
#include <map>
#include <string>

#include "partitioner/schedule/dependencies.h"

namespace smp::partitioner {
namespace {

namespace json = boost::json;

using Arrow = std::array<int64_t, 6>;  // replica, step, is it an activation, source, target, microbatch

class TraceWriter {
 public:
  TraceWriter(const std::vector<RankTimeline>& ranks, const std::function<void(std::string_view)>& write)
      : ranks_(ranks), write_(write) {
    origin_ns_ = std::numeric_limits<int64_t>::max();
    for (const RankTimeline& rank : ranks) {
      if (!rank.steps.empty()) origin_ns_ = std::min(origin_ns_, rank.steps.front().start_ns);
    }
  }

  void run() {
    write_("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    for (const RankTimeline& rank : ranks_) name_threads(rank);
    for (const RankTimeline& rank : ranks_) {
      for (const RankStep& step : rank.steps) write_step(rank, step);
    }
    write_idle_times();
    write_("\n]}\n");
  }

 private:
  void event(const json::object& fields) {
    if (!is_first_) write_(",\n");
    is_first_ = false;
    write_(json::serialize(fields));
  }

  double us_of(int64_t ns) const { return static_cast<double>(ns - origin_ns_) / 1000; }

  json::object fields(const char* phase, const RankTimeline& rank, std::string_view category, std::string_view name,
                      int64_t ns) const {
    return {{"ph", phase},     {"pid", rank.replica}, {"tid", rank.pipeline_rank},
            {"cat", category}, {"name", name},        {"ts", us_of(ns)}};
  }

  void slice(const RankTimeline& rank, std::string_view category, std::string_view name, int64_t start_ns, int64_t end_ns,
             json::object args) {
    json::object made = fields("X", rank, category, name, start_ns);
    made["dur"] = static_cast<double>(end_ns - start_ns) / 1000;
    made["args"] = std::move(args);
    event(made);
  }

  void name_threads(const RankTimeline& rank) {
    const auto name = [&](const char* what, const std::string& text) {
      event({{"ph", "M"}, {"pid", rank.replica}, {"tid", rank.pipeline_rank}, {"name", what}, {"args", {{"name", text}}}});
    };
    if (rank.pipeline_rank == 0) name("process_name", "replica " + std::to_string(rank.replica));
    name("thread_name", "rank " + std::to_string(rank.pipeline_rank));
  }

  void write_step(const RankTimeline& rank, const RankStep& step) {
    slice(rank, "step", "step " + std::to_string(step.number), step.start_ns, step.end_ns,
          {{"step", step.number}, {"trains", step.trains}});
    for (const Span& span : step.spans) {
      json::object args{{"step", step.number}};
      if (span.is_action()) {
        args["stage"] = span.action.stage;
        args["microbatch"] = span.action.microbatch;
        if (!span.is_compute()) args["peer"] = span.action.peer;
      }
      slice(rank, span.is_action() ? "action" : "work", to_string(span), span.start_ns, span.end_ns, std::move(args));
      if (span.is_action() && !span.is_compute()) arrow(rank, step, span);
    }
  }

  void arrow(const RankTimeline& rank, const RankStep& step, const Span& span) {
    const Action &action = span.action, send = send_of(action);
    const Arrow transfer{rank.replica, step.number, send.is_forward(), send.stage, send.peer, send.microbatch};
    const auto [id, is_new] = arrows_.try_emplace(transfer, static_cast<int64_t>(arrows_.size()));
    json::object made =
        fields(action.is_send() ? "s" : "f", rank, "message", "message", action.is_send() ? span.start_ns : span.end_ns);
    made["id"] = id->second;
    if (!action.is_send()) made["bp"] = "e";
    event(made);
  }

  void write_idle_times() {
    std::map<int, size_t> num_steps;  // by replica
    for (const RankTimeline& rank : ranks_) num_steps[rank.replica] = rank.steps.size();
    for (const auto& [replica, number] : num_steps) {
      for (size_t s = 0; s < number; ++s) write_idle_times(replica, pipeline_step(ranks_, replica, s));
    }
  }

  void write_idle_times(int replica, const PipelineStep& step) {
    const std::optional<Schedule> schedule = performed_schedule(step);
    if (!schedule) return;
    const StepAttribution attribution = attribute(step, *schedule);
    for (int rank = 0; rank < std::ssize(step); ++rank) {
      for (const CausedTime& piece : attribution.ranks[rank]) {
        if (piece.cause == Cause::kCompute) continue;
        slice({replica, rank, {}}, "idle", name_of(piece.cause), piece.start_ns, piece.end_ns,
              {{"step", step[rank].number}});
      }
    }
  }

  const std::vector<RankTimeline>& ranks_;
  const std::function<void(std::string_view)>& write_;
  int64_t origin_ns_ = 0;
  bool is_first_ = true;
  std::map<Arrow, int64_t> arrows_;
};

}  // namespace

void write_trace(const std::vector<RankTimeline>& ranks, const std::function<void(std::string_view)>& write) {
  TraceWriter(ranks, write).run();
}

}  // namespace smp::partitioner
