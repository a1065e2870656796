// Owns the comparison of what ranks run.
#include "smp/engine/context/versions.h"

#include <ATen/Version.h>

#include <map>
#include <string_view>

#include "smp/version.h"

namespace smp::engine {
namespace {

// Of the settings with which LibTorch was built, "KEY=value, ", as it says itself: its headers may be of another version.
std::string setting(const std::string& config, std::string_view key) {
  const std::string begin = " " + std::string(key) + "=";
  const size_t found = config.find(begin);
  if (found == config.npos) return "unknown";
  const size_t value = found + begin.size();
  return config.substr(value, config.find_first_of(",\n", value) - value);
}

}  // namespace

std::string versions() {
  const std::string config = at::show_config();
  return std::string("smp ") + version() + ", LibTorch " + setting(config, "TORCH_VERSION") + " of commit " +
         setting(config, "COMMIT_SHA").substr(0, 7) + ", for CUDA " + setting(config, "CUDA_VERSION");
}

std::string differing_versions(const std::vector<std::string>& texts) {
  std::map<std::string, std::string> ranks;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::string& others = ranks[texts[rank]];
    others += (others.empty() ? "" : ", ") + std::to_string(rank);
  }
  std::string result;
  for (const auto& [text, numbers] : ranks) {
    const bool is_one = numbers.find(',') == numbers.npos;
    result += (result.empty() ? "" : "; ") + std::string(is_one ? "rank " : "ranks ") + numbers +
              (is_one ? " has " : " have ") + text;
  }
  return ranks.size() == 1 ? "" : result;
}

}  // namespace smp::engine
