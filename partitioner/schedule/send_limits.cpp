// Performs a table with channels that hold so many messages and no more.
#include "partitioner/schedule/send_limits.h"

#include <map>
#include <tuple>

namespace smp::partitioner {
namespace {

class BoundedWalk {
 public:
  explicit BoundedWalk(const Schedule& schedule) : schedule_(schedule), next_(schedule.columns.size(), 0) {}

  bool ends() {
    for (size_t rank = next_.size(); rank-- > 0;) runnable_.push_back(rank);
    while (!runnable_.empty()) {
      const size_t rank = runnable_.back();
      runnable_.pop_back();
      const auto& column = schedule_.columns[rank];
      while (next_[rank] < column.size() && perform(rank, column[next_[rank]])) ++next_[rank];
    }
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      if (next_[rank] < schedule_.columns[rank].size()) return false;
    }
    return true;
  }

 private:
  struct Channel {
    int sent = 0;
    int received = 0;
    int reached = 0;                // receives that their rank has come to, the one it waits at included
    std::vector<size_t> waiting{};  // ranks
  };

  Channel& channel_of(const Action& transfer) {
    const bool is_send = transfer.is_send();
    return channels_[{transfer.is_activation(), is_send ? transfer.stage : transfer.peer,
                      is_send ? transfer.peer : transfer.stage}];
  }

  /// False where the rank has to wait.
  bool perform(size_t rank, const Action& action) {
    if (action.is_compute()) return true;
    Channel& channel = channel_of(action);
    const bool is_new = action.is_receive() && channel.reached == channel.received;
    if (is_new) ++channel.reached;
    const bool can_go =
        action.is_send() ? channel.sent - channel.reached < schedule_.send_limit(action) : channel.received < channel.sent;
    if (can_go) ++(action.is_send() ? channel.sent : channel.received);
    if (is_new || can_go) wake(channel);
    if (!can_go) channel.waiting.push_back(rank);
    return can_go;
  }

  void wake(Channel& channel) {
    runnable_.insert(runnable_.end(), channel.waiting.begin(), channel.waiting.end());
    channel.waiting.clear();
  }

  const Schedule& schedule_;
  std::vector<size_t> next_;  // by rank: position in its column
  std::vector<size_t> runnable_;
  std::map<std::tuple<bool, int, int>, Channel> channels_;
};

}  // namespace

bool may_limit_sends(const Schedule& schedule) { return BoundedWalk(schedule).ends(); }

}  // namespace smp::partitioner
