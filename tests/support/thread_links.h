// Links between ranks that are threads: the second end that starts a transfer makes it. Each end's own is given at once,
// on the host when it is made.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/links.h"

namespace smp::support {

class ThreadLinks final : public runtime::DeviceLinks {
 public:
  /// device: is told what each end does.
  explicit ThreadLinks(const runtime::Device& device = runtime::host()) : device_(device) {}

  std::string new_name() const override {
    const std::lock_guard lock(mutex_);
    std::string name(128, ' ');
    const std::string number = std::to_string(num_names_++);
    return name.replace(0, number.size(), number);
  }
  std::unique_ptr<runtime::DeviceLink> connect(std::string_view name, End end) const override {
    const std::lock_guard lock(mutex_);
    ++(end == End::kSender ? ends_[std::string(name)].first : ends_[std::string(name)].second);
    std::shared_ptr<Line>& line = lines_[std::string(name)];
    if (!line) line = std::make_shared<Line>();
    return std::make_unique<Link>(device_, line, end == End::kSender);
  }

  /// Of each link, how often its ends were asked for: the sender's, the receiver's.
  std::vector<std::pair<int, int>> ends() const {
    std::vector<std::pair<int, int>> numbers;
    for (const auto& [name, number] : ends_) numbers.push_back(number);
    return numbers;
  }

 private:
  struct Line {
    std::mutex mutex;
    std::deque<runtime::DeviceMemory> sent, received;
    int num_moved = 0;
  };

  class Link final : public runtime::DeviceLink {
   public:
    Link(const runtime::Device& device, std::shared_ptr<Line> line, bool sends)
        : device_(device), line_(std::move(line)), sends_(sends) {}

    void start(const runtime::DeviceMemory& memory, const runtime::Event& ready) override {
      device_.go_on_behind(ready);
      ++num_started_;
      const std::lock_guard lock(line_->mutex);
      (sends_ ? line_->sent : line_->received).push_back(memory);
      while (!line_->sent.empty() && !line_->received.empty()) {
        const auto& from = line_->sent.front();
        const auto& to = line_->received.front();
        if (from.num_bytes != to.num_bytes) throw std::logic_error("the ends of a link were given different transfers");
        std::memcpy(to.data, from.data, static_cast<size_t>(from.num_bytes));
        ++line_->num_moved;
        line_->sent.pop_front();
        line_->received.pop_front();
      }
    }
    std::optional<runtime::Event> next_given() override {
      if (num_told_ == num_started_) return std::nullopt;
      const std::lock_guard lock(line_->mutex);
      // Its events are reached from the beginning, and who sends may free what he has sent.
      const bool is_host = device_.type == runtime::host().type;
      if (is_host && num_told_ == line_->num_moved) return std::nullopt;
      ++num_told_;
      return device_.record();
    }

   private:
    const runtime::Device& device_;
    std::shared_ptr<Line> line_;
    bool sends_;
    int num_started_ = 0, num_told_ = 0;
  };

  const runtime::Device& device_;
  mutable std::mutex mutex_;
  mutable int num_names_ = 0;
  mutable std::map<std::string, std::shared_ptr<Line>> lines_;
  mutable std::map<std::string, std::pair<int, int>> ends_;
};

}  // namespace smp::support
