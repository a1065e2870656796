// One JSON file, replaced as a whole.
#include "smp/engine/planning/cost_cache.h"

#include <torch/version.h>

#include <filesystem>
#include <fstream>

#include "partitioner/graph/graph_io.h"
#include "runtime/device/device.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/libtorch/arithmetic.h"
#include "smp/engine/files/durable_file.h"
#include "smp/engine/files/input_file.h"
#include "smp/version.h"

namespace smp::engine {
namespace {

std::filesystem::path folder_of(const Config& config, const EnvironmentLookup& lookup) {
  if (!config.cost_cache.empty()) return config.cost_cache;
  const auto cache = lookup("XDG_CACHE_HOME");
  if (cache && !cache->empty()) return std::filesystem::path(*cache) / "smp";
  const auto home = lookup("HOME");
  if (home && !home->empty()) return std::filesystem::path(*home) / ".cache" / "smp";
  return {};
}

constexpr int kTimesVersion = 3;  // of what is measured and how it is written

}  // namespace

CostCache::CostCache(const Config& config, int ranks_per_host, const Logger& logger, const EnvironmentLookup& lookup)
    : logger_(logger) {
  const std::filesystem::path folder = config.cost_cache == "off" ? "" : folder_of(config, lookup);
  if (folder.empty()) return;
  std::ostringstream machine;
  machine << runtime::host().model() << ", " << ranks_per_host << " ranks of " << config.threads << " threads, LibTorch "
          << TORCH_VERSION << ", stage " << static_cast<int>(config.stage) << ", smp " << version() << ", times "
          << kTimesVersion;
  const runtime::Device& device = runtime::this_ranks_device();
  if (device.type != runtime::host().type) {
    machine << ", " << device.model();
    for (const runtime::ArithmeticSwitch& one : runtime::arithmetic_switches()) machine << ' ' << one.value;
  }
  path_ = folder / ("costs-" + hex_digits(partitioner::hash(machine.str())) + ".json");
}

partitioner::MeasuredCosts CostCache::read() const {
  partitioner::MeasuredCosts costs;
  std::error_code error;
  if (path_.empty() || !std::filesystem::exists(path_, error)) return costs;
  try {
    const std::string text = InputFile(path_, "expected a file of times").read_all();
    costs.add_json(text);
  } catch (...) {
    logger_.warning("cannot use the times in '" + path_ + "' (" + runtime::describe_exception(std::current_exception()) +
                    "). They are measured anew.");
  }
  return costs;
}

void CostCache::write(const partitioner::MeasuredCosts& costs) const {
  if (path_.empty()) return;
  try {
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
    DurableFile file(path_);
    const std::string text = costs.to_json() + '\n';
    file.write(text.data(), text.size());
    file.commit();
  } catch (...) {
    logger_.warning("cannot keep the measured times in '" + path_ + "' (" +
                    runtime::describe_exception(std::current_exception()) +
                    "). The next job measures anew; cost_cache names another folder, or is \"off\".");
  }
}

}  // namespace smp::engine
