// Owns what of a host may keep a job from running well.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "smp/fields.h"

namespace smp::tools {

/// Of the host of one rank. A number is 0 where the system does not say.
struct Facts {
  std::string host;
  int64_t num_cores = 0;               // that this process may use
  int64_t memory_bytes = 0;            // that is available, on the host or in the container
  int64_t shared_bytes = 0;            // free in /dev/shm
  int64_t num_files = 0;               // that may be open at once
  double clock_s = 0;                  // of the wall, since 1970
  std::vector<std::string> addresses;  // "eth0 10.0.0.1", without those of loopback
};

Facts facts_of_this_host();

/// What is likely to go wrong, in sentences. ranks: asked at the same time.
std::vector<std::string> warnings_of(const std::vector<Facts>& ranks);

}  // namespace smp::tools

template <>
struct smp::Fields<smp::tools::Facts> {
  static auto of(auto& facts) {
    return std::tie(facts.host, facts.num_cores, facts.memory_bytes, facts.shared_bytes, facts.num_files, facts.clock_s,
                    facts.addresses);
  }
};
