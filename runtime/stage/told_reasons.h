// Why a stage does not run as it could, told once each.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace smp::runtime {

class ToldReasons {
 public:
  /// `tell` may be empty.
  explicit ToldReasons(std::function<void(const std::string& reason)> tell) : tell_(std::move(tell)) {}

  /// A reason may come and go with every microbatch.
  void add(const std::string& reason) {
    if (std::find(told_.begin(), told_.end(), reason) != told_.end()) return;
    told_.push_back(reason);
    if (tell_) tell_(reason);
  }
  /// What was told before is a part of it.
  void replace_by(const std::string& reason) {
    told_.clear();
    add(reason);
  }
  std::string all() const {
    std::string text;
    for (const std::string& reason : told_) text += (text.empty() ? "" : "; ") + reason;
    return text;
  }

 private:
  const std::function<void(const std::string& reason)> tell_;
  std::vector<std::string> told_;
};

}  // namespace smp::runtime
