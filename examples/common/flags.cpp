// The shared flags, read by CLI11.
#include "examples/common/flags.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <iostream>
#include <map>

namespace examples {
namespace {

constexpr int kUsageError = 2;

// Checks the text before CLI11 converts it: one wording for too small, too large and no integer.
CLI::Validator at_least(int64_t minimum) {
  const std::string least = std::to_string(minimum);
  return {[minimum, least](const std::string& text) {
            int64_t value = 0;
            const char* end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            const bool is_right = error == std::errc() && stop == end && value >= minimum;
            return is_right ? "" : "expected an integer, " + least + " or more, got " + text;
          },
          "INT >= " + least};
}

CLI::Validator above_zero() {
  return {[](const std::string& text) {
            double value = 0;
            const char* end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            const bool is_right = error == std::errc() && stop == end && std::isfinite(value) && value > 0;
            return is_right ? "" : "expected a number above 0, got " + text;
          },
          "NUMBER > 0"};
}

// A flag whose value is one of the words; its help shows them and the word of the default.
template <typename Enum>
void add_choice(CLI::App& app, const std::string& flag, Enum& value, const std::map<std::string, Enum>& words,
                const std::string& help) {
  std::string list, fallback;
  for (const auto& [word, enumerator] : words) {
    list.append(list.empty() ? "" : "|").append(word);
    if (enumerator == value) fallback = word;
  }
  app.add_option_function<std::string>(
         flag, [&value, words](const std::string& word) { value = words.at(word); }, help)
      ->check(CLI::Validator(
          [words, list](const std::string& word) {
            return words.contains(word) ? "" : "expected " + list + ", got " + word;
          },
          list))
      ->type_name("")
      ->default_str(fallback);
}

}  // namespace

struct FlagParser::Impl {
  CLI::App app;
};

smp::Config Flags::config() const {
  return {.pipeline_parallel_degree = pipeline_degree,
          .microbatches = microbatches,
          .pipeline = schedule,
          .device = device,
          .auto_partition = partition == Partition::kAuto,
          .seed = seed,
          .threads = threads};
}

FlagParser::FlagParser(const std::string& description, Flags& flags, DataSource source) : impl_(std::make_unique<Impl>()) {
  CLI::App& app = impl_->app;
  app.description(description);
  app.option_defaults()->always_capture_default();
  if (source == DataSource::kFiles) {
    add("--steps", flags.steps, "Training ends after so many; 0: after --epochs", 0);
    add("--epochs", flags.epochs, "Passes over the data");
    app.add_option("--data", flags.data, "File or folder with the data")->type_name("PATH");
  } else {
    add("--steps", flags.steps, "Training ends after so many");
  }
  add("--batch-size", flags.batch_size, "Samples of all replicas together");
  add("--microbatches", flags.microbatches, "Parts of a batch, per pipeline");
  add("--pipeline-degree", flags.pipeline_degree, "Stages of a pipeline; 0: all processes form one", 0);
  using smp::Pipeline;
  add_choice<Pipeline>(app, "--schedule", flags.schedule,
                       {{"interleaved", Pipeline::kInterleaved}, {"simple", Pipeline::kSimple}},
                       "Order of forwards and backwards");
  add_choice<Partition>(app, "--partition", flags.partition, {{"auto", Partition::kAuto}, {"manual", Partition::kManual}},
                        "Who places the modules: the planner or the program");
  add_choice<Optimizer>(app, "--optimizer", flags.optimizer,
                        {{"sgd", Optimizer::kSgd}, {"adam", Optimizer::kAdam}, {"adamw", Optimizer::kAdamW}}, "Optimizer");
  app.add_option("--lr", flags.lr, "Learning rate")->check(above_zero())->type_name("");
  add("--seed", flags.seed, "Seed of weights and dropout", 0);
  add("--threads", flags.threads, "Threads per process");
  add_choice<smp::DeviceKind>(
      app, "--device", flags.device,
      {{"auto", smp::DeviceKind::kAuto}, {"cpu", smp::DeviceKind::kCpu}, {"cuda", smp::DeviceKind::kCuda}},
      "What each process computes on: a GPU where there is one, the CPU, or a GPU of its own");
  app.add_option("--log", flags.log, "Write JSON lines to this file")->type_name("FILE");
}

FlagParser::~FlagParser() = default;

void FlagParser::add(const std::string& flag, int64_t& value, const std::string& help, int64_t minimum) {
  impl_->app.add_option(flag, value, help)->check(at_least(minimum))->type_name("");
}

void FlagParser::add(const std::string& flag, double& value, const std::string& help) {
  impl_->app.add_option(flag, value, help)->type_name("");
}

void FlagParser::add(const std::string& flag, bool& value, const std::string& help) {
  impl_->app.add_flag(flag, value, help);
}

void FlagParser::add(const std::string& flag, std::string& value, const std::string& help) {
  impl_->app.add_option(flag, value, help)->type_name("");
}

std::optional<int> FlagParser::parse(int argc, const char* const* argv) {
  try {
    impl_->app.parse(argc, argv);
  } catch (const CLI::ParseError& end) {
    return impl_->app.exit(end, std::cout, std::cerr) == 0 ? 0 : kUsageError;
  }
  return std::nullopt;
}

}  // namespace examples
