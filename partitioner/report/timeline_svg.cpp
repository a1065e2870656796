// Panels of bars; a small writer of SVG elements.
#include "partitioner/report/timeline_svg.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "partitioner/report/text_table.h"

namespace smp::partitioner {
namespace {

constexpr double kWidth = 1280, kLeft = 70, kRight = 20, kBarsWidth = kWidth - kLeft - kRight;  // pixels, like all below
constexpr double kTitleHeight = 22, kLineHeight = 16, kAxisHeight = 34, kMargin = 12;
constexpr double kMinLabelWidth = 16, kMinLabelHeight = 12;

constexpr const char* kStyle = R"(
text{font:12px sans-serif;fill:#222}
text.head{font-size:15px;font-weight:bold}
text.label{font-size:10px;fill:#fff;text-anchor:middle}
text.tick{font-size:10px;text-anchor:middle}
text.table{font:12px monospace;white-space:pre}
line{stroke:#999;stroke-width:0.5}
rect{stroke:#fff;stroke-width:0.3}
.row{fill:#f3f3f3}
.forward{fill:#3b6fb6}
.backward{fill:#2f8f5b}
.weight{fill:#6fb98f}
.send{fill:#9467bd}
.dependency{fill:#cfcfcf}
.imbalance{fill:#f2a33a}
.communication{fill:#9467bd}
.host{fill:#d9534f}
)";

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

struct Bar {
  std::string kind;   // a class of the style
  std::string label;  // drawn where there is room
  std::string what;   // of the tooltip
  double start_us = 0, end_us = 0;
};
using Bars = std::vector<Bar>;  // of one row

class Drawing {
 public:
  explicit Drawing(double span_us, size_t num_rows)
      : span_us_(std::max(span_us, 1e-3)),
        row_height_(std::clamp(480.0 / static_cast<double>(std::max<size_t>(num_rows, 1)), 7.0, 26.0)) {}

  /// No word of ours has a sign that XML would read: names of models are not drawn, nor are receives ("<0F0").
  void text(const std::string& kind, double x, double y, const std::string& words) {
    body_ << "<text class=\"" << kind << "\" x=\"" << number(x) << "\" y=\"" << number(y) << "\">" << words << "</text>\n";
  }

  void head(const std::string& words) {
    y_ += kTitleHeight;
    text("head", kMargin, y_, words);
    y_ += kMargin;
  }

  void panel(const std::string& title, const std::vector<Bars>& rows) {
    y_ += kLineHeight;
    text("title", kMargin, y_, title);
    y_ += kMargin / 2;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      text("rank", kMargin, y_ + row_height_ / 2 + 4, "rank " + std::to_string(rank));
      body_ << "<rect class=\"row\" x=\"" << number(kLeft) << "\" y=\"" << number(y_ + 1) << "\" width=\""
            << number(kBarsWidth) << "\" height=\"" << number(row_height_ - 2) << "\"/>\n";
      for (const Bar& bar : rows[rank]) draw(bar);
      y_ += row_height_;
    }
    axis();
  }

  void legend(const std::vector<std::pair<std::string, std::string>>& entries) {
    double x = kMargin;
    for (const auto& [kind, words] : entries) {
      body_ << "<rect class=\"" << kind << "\" x=\"" << number(x) << "\" y=\"" << number(y_)
            << "\" width=\"14\" height=\"14\"/>\n";
      text("legend", x + 18, y_ + 11, words);
      x += 40 + 7.0 * static_cast<double>(words.size());
    }
    y_ += kLineHeight + kMargin;
  }

  void lines(const std::string& table) {
    std::istringstream in(table);
    for (std::string line; std::getline(in, line);) {
      y_ += kLineHeight;
      text("table", kMargin, y_, line);
    }
  }

  std::string take() const {
    std::ostringstream out;
    const std::string height = number(y_ + 2 * kMargin);
    out << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\""
        << number(kWidth) << "\" height=\"" << height << "\" viewBox=\"0 0 " << number(kWidth) << ' ' << height
        << "\" xml:space=\"preserve\">\n<style>" << kStyle
        << "</style>\n<rect x=\"0\" y=\"0\" width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
        << body_.str() << "</svg>\n";
    return out.str();
  }

 private:
  double x_of(double us) const { return kLeft + kBarsWidth * us / span_us_; }

  void draw(const Bar& bar) {
    const double x = x_of(bar.start_us), width = x_of(bar.end_us) - x;
    body_ << "<rect class=\"" << bar.kind << "\" x=\"" << number(x) << "\" y=\"" << number(y_ + 1) << "\" width=\""
          << number(width) << "\" height=\"" << number(row_height_ - 2) << "\"><title>" << bar.what << ", "
          << time_text(bar.end_us - bar.start_us) << "</title></rect>\n";
    const double needed = std::max(kMinLabelWidth, 7.0 * static_cast<double>(bar.label.size()));
    if (bar.label.empty() || width < needed || row_height_ < kMinLabelHeight) return;
    text("label", x + width / 2, y_ + row_height_ / 2 + 4, bar.label);
  }

  // Ticks at 1, 2 or 5 times a power of ten, ten of them at most.
  void axis() {
    const double least = span_us_ / 10, power = std::pow(10, std::floor(std::log10(least)));
    double step = 10 * power;
    for (const double factor : {5.0, 2.0, 1.0}) {
      if (factor * power >= least) step = factor * power;
    }
    for (int i = 0; i * step <= span_us_; ++i) {
      const double x = x_of(i * step);
      body_ << "<line x1=\"" << number(x) << "\" y1=\"" << number(y_) << "\" x2=\"" << number(x) << "\" y2=\""
            << number(y_ + 5) << "\"/>\n";
      text("tick", x, y_ + 16, i == 0 ? "0" : time_text(i * step));
    }
    y_ += kAxisHeight;
  }

  double span_us_;
  double row_height_;
  double y_ = 0;
  std::ostringstream body_;
};

/// The class of a bar in the drawing.
const char* class_of(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kWeightGradient:
      return "weight";
    case ActionKind::kSendActivation:
    case ActionKind::kSendGradient:
      return "send";
    case ActionKind::kReceiveActivation:
    case ActionKind::kReceiveGradient:
      break;  // waits
  }
  TORCH_INTERNAL_ASSERT(false, to_string(action), " is not drawn");
}

std::vector<Bars> simulated_bars(const Schedule& schedule, const Simulation& simulation, double shift_us) {
  std::vector<Bars> rows;
  for (size_t rank = 0; rank < schedule.columns.size(); ++rank) {
    Bars& row = rows.emplace_back();
    for (size_t i = 0; i < schedule.columns[rank].size(); ++i) {
      const Action& action = schedule.columns[rank][i];
      const ActionTime& time = simulation.times[rank][i];
      if (action.is_receive() || time.end_us <= time.start_us) continue;
      const std::string label = action.row().letter + std::to_string(action.microbatch);
      row.push_back({class_of(action), action.is_send() ? "" : label, to_string(action), shift_us + time.start_us,
                     shift_us + time.end_us});
    }
  }
  return rows;
}

std::vector<Bars> measured_bars(const PipelineStep& step, const StepAttribution& attribution) {
  const auto us_of = [&](int64_t ns) { return static_cast<double>(ns - attribution.start_ns) / kNsPerUs; };
  std::vector<Bars> rows;
  for (size_t rank = 0; rank < step.size(); ++rank) {
    Bars& row = rows.emplace_back();
    for (const Span& span : step[rank].spans) {
      if (!span.is_compute()) continue;
      row.push_back({class_of(span.action), span.action.row().letter + std::to_string(span.action.microbatch),
                     to_string(span), us_of(span.start_ns), us_of(span.end_ns)});
    }
    for (const CausedTime& piece : attribution.ranks[rank]) {
      if (piece.cause == Cause::kCompute) continue;
      row.push_back({name_of(piece.cause), "", name_of(piece.cause), us_of(piece.start_ns), us_of(piece.end_ns)});
    }
  }
  return rows;
}

// From the start of the step.
double first_action_us(const PipelineStep& step, const StepAttribution& attribution) {
  int64_t first_ns = attribution.end_ns;
  for (const RankStep& rank : step) {
    const auto action =
        std::find_if(rank.spans.begin(), rank.spans.end(), [](const Span& span) { return span.is_action(); });
    if (action != rank.spans.end()) first_ns = std::min(first_ns, action->start_ns);
  }
  return std::max(0.0, static_cast<double>(first_ns - attribution.start_ns) / kNsPerUs);
}

std::string numbers(const std::string& what, double us, double bubble) {
  return what + " " + time_text(us) + ", bubble " + percent_text(bubble);
}

double measured_us(const StepAttribution& attribution) { return static_cast<double>(attribution.num_ns()) / kNsPerUs; }

}  // namespace

std::string timeline_title(const PipelineStep& step, const Schedule& schedule, const StepAttribution& attribution,
                           const std::optional<SimulationInput>& predicted) {
  std::string title = "step " + std::to_string(step.front().number) +
                      (step.front().trains ? " (training): " : " (evaluation): ") +
                      numbers("measured", measured_us(attribution), attribution.bubble());
  if (!predicted) return title;
  const Simulation simulation = simulate(schedule, *predicted);
  return title + "; " + numbers("predicted", simulation.makespan_us, simulation.bubble);
}

std::string timeline_svg(const PipelineStep& step, const Schedule& schedule, const StepAttribution& attribution,
                         const std::optional<SimulationInput>& predicted) {
  const double shift_us = first_action_us(step, attribution);
  const Simulation ideal = simulate(schedule, measured_times(step, schedule));
  std::optional<Simulation> prediction;
  if (predicted) prediction = simulate(schedule, *predicted);
  const double simulated_us = std::max(ideal.makespan_us, prediction ? prediction->makespan_us : 0);
  Drawing drawing(std::max(measured_us(attribution), shift_us + simulated_us), step.size());
  drawing.head(timeline_title(step, schedule, attribution, predicted));
  if (prediction) {
    drawing.panel(numbers("simulated, predicted durations:", prediction->makespan_us, prediction->bubble),
                  simulated_bars(schedule, *prediction, shift_us));
  }
  drawing.panel(numbers("simulated, measured durations and free messages:", ideal.makespan_us, ideal.bubble),
                simulated_bars(schedule, ideal, shift_us));
  drawing.panel(numbers("measured:", measured_us(attribution), attribution.bubble()), measured_bars(step, attribution));
  drawing.legend({{"forward", "forward"},
                  {"backward", "backward"},
                  {"weight", "gradients of parameters"},
                  {"dependency", "dependency"},
                  {"imbalance", "imbalance"},
                  {"communication", "communication"},
                  {"host", "host"}});
  drawing.lines(idle_table(attribution));
  return drawing.take();
}

}  // namespace smp::partitioner
