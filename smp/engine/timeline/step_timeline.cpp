// Gathers records at world rank 0 and writes them.
#include "smp/engine/timeline/step_timeline.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "partitioner/partition/predict_step.h"
#include "partitioner/report/timeline_svg.h"
#include "partitioner/report/trace_io.h"
#include "partitioner/report/typical_step.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/files/durable_file.h"
#include "smp/engine/programs/programs.h"

namespace smp::engine {

using namespace partitioner;
using Phase = runtime::TimelineRecorder::Phase;

namespace {

void write_file(const std::string& path, std::string_view text) {
  DurableFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

void write_trace_file(const std::string& path, const std::vector<RankTimeline>& ranks) {
  constexpr size_t kPartBytes = size_t{1} << 20;
  DurableFile file(path);
  std::string part;
  write_trace(ranks, [&](std::string_view text) {
    part += text;
    if (part.size() < kPartBytes) return;
    file.write(part.data(), part.size());
    part.clear();
  });
  file.write(part.data(), part.size());
  file.commit();
}

}  // namespace

std::string drawing_path(const std::string& trace) {
  std::filesystem::path path(trace);
  return path.extension() == ".json" ? path.replace_extension(".svg").string() : trace + ".svg";
}

std::string timeline_complaint(const std::string& trace) {
  if (trace.empty()) return "";
  if (std::filesystem::path(trace).extension() == ".svg") {
    return "timeline: expected the name of a JSON file, got '" + trace +
           "'. Name the trace, as in trace.json; the drawing is written beside it as trace.svg.";
  }
  for (const std::string& path : {trace, drawing_path(trace)}) {
    try {
      const DurableFile probe(path);
    } catch (...) {
      return "timeline: expected a file that can be written, got '" + path +
             "': " + runtime::describe_exception(std::current_exception()) +
             " Name a file in a folder that exists and that rank 0 may write to, or leave the key out.";
    }
  }
  return "";
}

StepTimeline::StepTimeline(Context& context)
    : context_(context), recorder_(kNumWarmUpSteps, context.config.timeline_steps) {}

void StepTimeline::count_step(bool trains, const std::vector<std::shared_ptr<Program>>& programs, const Programs& planner) {
  recorder_.count_step(num_steps_++, trains);
  if (writes() && recorder_.phase() == Phase::kRecords) predict(programs, planner);
}

// Stages of one program have the same numbers in all microbatches.
void StepTimeline::predict(const std::vector<std::shared_ptr<Program>>& programs, const Programs& planner) {
  const bool is_one = !programs.empty() && std::all_of(programs.begin(), programs.end(),
                                                       [&](const auto& one) { return one == programs.front(); });
  if (is_one && predicted_ && predicted_hash_ == programs.front()->hash) return;
  predicted_.reset();
  if (!is_one) return;
  const Program& program = *programs.front();
  predicted_ = std::make_shared<const SimulationInput>(
      predicted_times(program.graph, program.plan, planner.options(program.graph).machine.device));
  predicted_hash_ = program.hash;
}

bool StepTimeline::end_step() {
  const bool records = recorder_.phase() == Phase::kRecords;
  const bool has_phase_ended = recorder_.end_step();
  if (records && recorder_.num_steps() > predictions_.size()) predictions_.push_back(predicted_);
  if (!has_phase_ended) return false;
  if (records) {
    publish();
    return true;
  }
  first_reading_ = runtime::measure_clock(*context_.world, runtime::steady_now_ns);
  return false;
}

void StepTimeline::finish() {
  if (recorder_.phase() == Phase::kRecords && recorder_.num_steps() > 0) return publish();
  if (writes()) {
    context_.logger.warning("timeline: expected more than " + std::to_string(kNumWarmUpSteps) +
                            " steps, got fewer; nothing was recorded and no file is written");
  }
}

RankTimeline StepTimeline::own_record() const {
  const runtime::ClockReading last = runtime::measure_clock(*context_.world, runtime::steady_now_ns);
  const auto to_common = [&](int64_t& own_ns) { own_ns = runtime::on_common_clock(own_ns, first_reading_, last); };
  RankTimeline rank{context_.replicas->rank(), context_.pipeline->rank(), recorder_.steps()};
  for (RankStep& step : rank.steps) {
    to_common(step.start_ns), to_common(step.end_ns);
    for (Span& span : step.spans) to_common(span.start_ns), to_common(span.end_ns);
  }
  return rank;
}

void StepTimeline::publish() const {
  runtime::Transport& world = *context_.world;
  RankTimeline own = own_record();
  if (!writes()) return world.send_bytes(0, runtime::kTimelineTag, runtime::encode(own));
  std::vector<RankTimeline> ranks{std::move(own)};
  for (int r = 1; r < world.size(); ++r) {
    ranks.push_back(runtime::decode<RankTimeline>(world.receive_bytes(r, runtime::kTimelineTag), "timeline"));
  }
  try {
    write(ranks);
  } catch (...) {  // a training run is worth more than its picture
    context_.logger.warning("timeline: expected to write " + context_.config.timeline +
                            ", got: " + runtime::describe_exception(std::current_exception()));
  }
}

void StepTimeline::write(const std::vector<RankTimeline>& ranks) const {
  const std::string& trace = context_.config.timeline;
  write_trace_file(trace, ranks);
  const std::string text = "timeline: " + std::to_string(ranks.front().steps.size()) + " steps of " +
                           std::to_string(ranks.size()) + " ranks in " + trace;
  const std::optional<size_t> typical = typical_step(ranks, ranks.front().replica);
  if (!typical) {
    context_.logger.info(text + "; no drawing, because no step has performed each action of a table once");
    return;
  }
  const PipelineStep step = pipeline_step(ranks, ranks.front().replica, *typical);
  const Schedule schedule = *performed_schedule(step);
  const StepAttribution attribution = attribute(step, schedule);
  std::optional<SimulationInput> predicted;
  if (const Prediction& known = predictions_.at(*typical)) predicted = *known;
  const std::string title = timeline_title(step, schedule, attribution, predicted), table = idle_table(attribution);
  context_.timeline_drawing = {title + "\n" + table, timeline_svg(step, schedule, attribution, predicted)};
  write_file(drawing_path(trace), context_.timeline_drawing.svg);
  context_.logger.info(text + "\n" + title + ", drawn in " + drawing_path(trace) + "\n" + table);
}

}  // namespace smp::engine
