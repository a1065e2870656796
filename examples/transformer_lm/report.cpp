// Formatting, and the two statistics that it needs.
#include "examples/transformer_lm/report.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "smp/comm.h"

namespace transformer_lm {
namespace {

constexpr double kMib = 1024.0 * 1024.0;

double predicted_mib(const Outcome& outcome, size_t rank) {
  const auto stage = static_cast<size_t>(outcome.pipeline_ranks[rank]);
  return static_cast<double>(outcome.predicted_peak_bytes.at(stage)) / kMib;
}

}  // namespace

std::vector<double> gather(double value) {
  auto values = torch::zeros({smp::size()}, torch::kDouble);
  values[smp::rank()] = value * smp::size();  // the mean over the world divides by its size
  values = smp::all_reduce_mean(values, smp::CommGroup::WORLD);
  const double* first = values.const_data_ptr<double>();
  return {first, first + values.numel()};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void print_progress(const Progress& progress) {
  std::printf("epoch %3ld | %4ld/%ld | lr %.3g | %6.1f ms/step | %6.0f tokens/s | loss %.3f | perplexity %.1f\n",
              progress.epoch, progress.batch, progress.batches, progress.lr, 1e3 * progress.step_s, progress.tokens_per_s,
              progress.mean_loss, std::exp(progress.mean_loss));
  std::fflush(stdout);
}

void print_outcome(const Outcome& outcome) {
  std::printf("step time: predicted %.1f ms, measured %.1f ms (median)\n", 1e3 * outcome.predicted_step_s,
              1e3 * outcome.measured_step_s);
  for (size_t rank = 0; rank < outcome.tensor_peak_bytes.size(); ++rank) {
    std::printf("peak memory, rank %zu: predicted %.1f MiB, measured %.1f MiB (the process grew by %.1f)\n", rank,
                predicted_mib(outcome, rank), outcome.tensor_peak_bytes[rank] / kMib,
                outcome.resident_peak_bytes[rank] / kMib);
  }
}

std::vector<std::pair<std::string, double>> summary_of(const Outcome& outcome) {
  std::vector<std::pair<std::string, double>> figures = {{"predicted_step_s", outcome.predicted_step_s},
                                                         {"measured_step_s", outcome.measured_step_s}};
  for (size_t rank = 0; rank < outcome.tensor_peak_bytes.size(); ++rank) {
    const std::string suffix = "_peak_mib_rank_" + std::to_string(rank);
    figures.emplace_back("predicted" + suffix, predicted_mib(outcome, rank));
    figures.emplace_back("measured" + suffix, outcome.tensor_peak_bytes[rank] / kMib);
    figures.emplace_back("resident" + suffix, outcome.resident_peak_bytes[rank] / kMib);
  }
  return figures;
}

}  // namespace transformer_lm
