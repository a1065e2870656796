// The command line that all examples share. An example sets its own defaults and adds its own flags.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "smp/config.h"

namespace examples {

enum class Partition { kAuto, kManual };
enum class Optimizer { kSgd, kAdam, kAdamW };

struct Flags {
  int64_t steps = 0;                                     // --steps: training ends after so many; 0 = after --epochs
  int64_t epochs = 1;                                    // --epochs
  int64_t batch_size = 16;                               // --batch-size: of all replicas together
  int64_t microbatches = 4;                              // --microbatches: per pipeline
  int64_t pipeline_degree = 0;                           // --pipeline-degree: stages; 0 = the whole world
  smp::Pipeline schedule = smp::Pipeline::kInterleaved;  // --schedule interleaved|simple
  Partition partition = Partition::kAuto;                // --partition auto|manual
  Optimizer optimizer = Optimizer::kSgd;                 // --optimizer sgd|adam|adamw
  double lr = 0.01;                                      // --lr
  int64_t seed = 0;                                      // --seed
  int64_t threads = 1;                                   // --threads: per rank
  smp::DeviceKind device = smp::DeviceKind::kCpu;        // --device auto|cpu|cuda
  std::string data = "";                                 // --data: a file or folder; "" = the example's default
  std::string log = "";                                  // --log: JSON lines of rank 0; "" = none

  /// What smp::init is given: pipeline degree, microbatches, schedule, seed, threads, device, and whether
  /// the planner places modules.
  smp::Config config() const;
};

/// Where an example has its data from. One that draws them has neither --data nor --epochs, and --steps is at least 1.
enum class DataSource { kFiles, kDrawn };

/// Reads a command line into Flags.
///
///   examples::Flags flags{.epochs = 3, .lr = 5.0};        // this example's defaults
///   examples::FlagParser parser("Trains a language model.", flags);
///   int64_t bptt = 35;
///   parser.add("--bptt", bptt, "Tokens per column of a batch");
///   if (const auto exit_code = parser.parse(argc, argv)) return *exit_code;
class FlagParser {
 public:
  /// `flags` holds the defaults, receives the values and must outlive the parser.
  FlagParser(const std::string& description, Flags& flags, DataSource source = DataSource::kFiles);
  ~FlagParser();
  FlagParser(const FlagParser&) = delete;
  FlagParser& operator=(const FlagParser&) = delete;

  /// One more flag, whose default is the variable's value. Integers below `minimum` are mistakes. A
  /// bool is a flag without value.
  void add(const std::string& flag, int64_t& value, const std::string& help, int64_t minimum = 1);
  void add(const std::string& flag, double& value, const std::string& help);
  void add(const std::string& flag, bool& value, const std::string& help);
  void add(const std::string& flag, std::string& value, const std::string& help);

  /// nullopt: go on. Otherwise the program is to end with this code: 0 after --help, whose text is
  /// on stdout; 2 after a mistake, which is explained on stderr.
  std::optional<int> parse(int argc, const char* const* argv);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace examples
