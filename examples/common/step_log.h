// The JSON-lines file in which an example keeps its training: one line at the start, one per step, one at the end.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace examples {

struct StepRecord {
  int64_t step = 0;                                       // from 1
  double loss = 0;                                        // mean over all microbatches of all replicas
  double step_s = 0;                                      // seconds of the whole step
  std::vector<std::pair<std::string, double>> figures{};  // what else this example measures
};

/// Numbers have nine significant digits, which tell any two float32 apart; what is not finite is
/// null. Every line is flushed, so a killed job leaves all its steps.
///
///   examples::StepLog log(flags.log, smp::rank() == 0);
///   log.start(smp::config().to_json(), plan_json);        // {"config":...,"plan":...}
///   log.step({.step = 1, .loss = 7.5, .step_s = 0.1, .figures = {{"tokens_per_s", 5600}}});
///   log.finish({{"test_perplexity", 210.3}});             // {"summary":{...}}
class StepLog {
 public:
  /// Writes nothing when `path` is empty or `is_writer` is false (every rank but 0). An existing
  /// file is replaced. Throws c10::ValueError when the file cannot be created.
  StepLog(const std::string& path, bool is_writer);

  /// Both arguments are JSON. Throws c10::ValueError when one is not.
  void start(std::string_view config_json, std::string_view plan_json);
  void step(const StepRecord& record);
  void finish(const std::vector<std::pair<std::string, double>>& summary);

 private:
  /// Throws c10::Error when the line cannot be written: a full disk is not to pass for a log.
  void write_line(const std::string& line);

  std::string path_;
  std::ofstream file_;
};

}  // namespace examples
