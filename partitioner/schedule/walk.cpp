// Ranks take turns: each goes on until it has to wait for another.
#include "partitioner/schedule/walk.h"

#include <map>
#include <tuple>
#include <unordered_map>

#include "partitioner/schedule/dependencies.h"

namespace smp::partitioner {
namespace {

class Walk {
 public:
  Walk(const Schedule& schedule, const Perform& perform, bool limits_sends)
      : schedule_(schedule), perform_(perform), limits_sends_(limits_sends), next_(schedule.columns.size(), 0) {}

  std::vector<Position> run() {
    for (int rank = static_cast<int>(next_.size()); rank-- > 0;) runnable_.push_back(rank);
    while (!runnable_.empty()) {
      const int rank = runnable_.back();
      runnable_.pop_back();
      while (!is_done(rank) && go_on({rank, next_[rank]})) ++next_[rank];
    }
    std::vector<Position> stuck;
    for (int rank = 0; rank < static_cast<int>(next_.size()); ++rank) {
      if (!is_done(rank)) stuck.push_back({rank, next_[rank]});
    }
    return stuck;
  }

 private:
  /// One edge and direction.
  struct Channel {
    int sent = 0;
    int received = 0;
    int reached = 0;             // receives that their rank has come to, the one it waits at included
    std::vector<int> waiting{};  // ranks
  };

  bool is_done(int rank) const { return next_[rank] == static_cast<int>(schedule_.columns[rank].size()); }

  void wake(Channel& channel) {
    runnable_.insert(runnable_.end(), channel.waiting.begin(), channel.waiting.end());
    channel.waiting.clear();
  }

  /// False where the rank has to wait.
  bool go_on(Position at) {
    const Action& action = schedule_.columns[at.rank][at.index];
    if (action.is_compute()) {
      perform_(at, at);
      return true;
    }
    const Action send = send_of(action);
    Channel& channel = channels_[{send.is_forward(), send.stage, send.peer}];
    const bool goes = action.is_send() ? sends(send, at, channel) : receives(send, at, channel);
    if (!goes) channel.waiting.push_back(at.rank);
    return goes;
  }

  bool sends(const Action& send, Position at, Channel& channel) {
    if (limits_sends_ && channel.sent - channel.reached >= schedule_.send_limit(send)) return false;
    ++channel.sent;
    sent_.emplace(send, at);
    perform_(at, at);
    wake(channel);
    return true;
  }

  bool receives(const Action& send, Position at, Channel& channel) {
    if (channel.reached == channel.received) {
      ++channel.reached;
      wake(channel);
    }
    const auto message = sent_.find(send);
    if (message == sent_.end()) return false;
    ++channel.received;
    perform_(at, message->second);
    sent_.erase(message);
    return true;
  }

  const Schedule& schedule_;
  const Perform& perform_;
  const bool limits_sends_;
  std::vector<int> next_;  // by rank: position in its column
  std::vector<int> runnable_;
  std::map<std::tuple<bool, int, int>, Channel> channels_;
  std::unordered_map<Action, Position, ActionHash> sent_;  // and not received
};

}  // namespace

std::vector<Position> walk(const Schedule& schedule, const Perform& perform) { return Walk(schedule, perform, false).run(); }

bool may_limit_sends(const Schedule& schedule) {
  return Walk(schedule, [](Position, Position) {}, true).run().empty();
}

}  // namespace smp::partitioner
