// Times of operators kept from job to job: one file per kind of machine.
#pragma once

#include <optional>
#include <string>

#include "partitioner/cost/measured_costs.h"
#include "smp/config.h"
#include "smp/engine/context/log.h"

namespace smp::engine {

/// A file that cannot be read or written costs a warning, never the job.
class CostCache {
 public:
  /// Config::cost_cache, or the user's cache folder ($XDG_CACHE_HOME/smp, else $HOME/.cache/smp); "off": no file.
  /// `ranks_per_host` is part of what makes machines alike: neighbours slow each other down.
  CostCache(const Config& config, int ranks_per_host, const Logger& logger,
            const EnvironmentLookup& lookup = environment_lookup());

  /// Empty: nothing is kept.
  const std::string& path() const { return path_; }
  partitioner::MeasuredCosts read() const;
  void write(const partitioner::MeasuredCosts& costs) const;

 private:
  std::string path_;
  const Logger& logger_;
};

}  // namespace smp::engine
