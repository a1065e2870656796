// What rank 0 prints while the model trains, and the figures that it compares at the end.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace transformer_lm {

/// `value` of every rank of the world, by rank. Collective over the world.
std::vector<double> gather(double value);

/// The middle one; the mean of the two middle ones when their number is even, 0 when there is none.
double median(std::vector<double> values);

struct Progress {
  int64_t epoch = 0;    // from 1
  int64_t batch = 0;    // from 1, of this epoch
  int64_t batches = 0;  // of an epoch
  double lr = 0;
  double mean_loss = 0;     // since the last line
  double step_s = 0;        // mean since the last line
  double tokens_per_s = 0;  // of all replicas, since the last line
};

/// One line of progress.
void print_progress(const Progress& progress);

/// What the planner has promised and what the run has shown.
struct Outcome {
  double predicted_step_s = 0;
  double measured_step_s = 0;                 // median over all full steps but the first
  std::vector<int64_t> predicted_peak_bytes;  // by pipeline rank
  std::vector<double> tensor_peak_bytes;      // by world rank: what predicted_peak_bytes predicts
  std::vector<double> resident_peak_bytes;    // by world rank: growth since before the model
  std::vector<double> pipeline_ranks;         // by world rank
};

/// Predicted against measured: step time, then peak memory of each rank.
void print_outcome(const Outcome& outcome);

/// The same for the log.
std::vector<std::pair<std::string, double>> summary_of(const Outcome& outcome);

}  // namespace transformer_lm
