// Owns the comparison of what ranks run.
#include "smp/engine/context/versions.h"

#include <caffe2/core/common.h>

#include <map>
#include <string_view>

#include "smp/version.h"

namespace smp::engine {
namespace {

// Of those with which LibTorch was built, as it says itself: its headers may be of another version. (at::show_config says
// them, too, but asks for CUDA, which may not be loaded yet.)
std::string setting(const std::string& key) {
  const auto& settings = caffe2::GetBuildOptions();
  const auto found = settings.find(key);
  return found == settings.end() ? "unknown" : found->second;
}

}  // namespace

std::string versions() {
  return std::string("smp ") + version() + ", LibTorch " + setting("TORCH_VERSION") + " of commit " +
         setting("COMMIT_SHA").substr(0, 7) + ", for CUDA " + setting("CUDA_VERSION");
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
