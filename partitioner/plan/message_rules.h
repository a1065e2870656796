// Rules of messages between stages, which the runtime obeys and the prediction of memory counts: which receives are posted
// ahead, and what a message takes beside its tensor.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "partitioner/plan/action.h"

namespace smp::partitioner {

/// Receives of one edge and direction that a rank posts before it needs their messages.
inline constexpr int64_t kReceivesAhead = 2;

/// Which receives of its column a rank has posted: in the column's order, until one edge and direction has enough.
class ReceivesAhead {
 public:
  /// Calls post_one(receive) for each that may be posted now.
  template <class Post>
  void post(const std::vector<Action>& column, const Post& post_one) {
    for (; next_ < column.size(); ++next_) {
      if (!column[next_].is_receive()) continue;
      int64_t& posted = posted_of(column[next_]);
      if (posted >= kReceivesAhead) return;
      ++posted;
      post_one(column[next_]);
    }
  }
  /// The message of a posted one is here.
  void take(const Action& receive) { --posted_of(receive); }

 private:
  int64_t& posted_of(const Action& receive) { return posted_[{receive.kind, receive.stage, receive.peer}]; }

  size_t next_ = 0;  // position in the column
  std::map<std::tuple<ActionKind, int, int>, int64_t> posted_;
};

/// Bytes that a message is longer than the tensor in it, at most: header and alignment.
inline constexpr int64_t kMessageOverheadBytes = 320;

}  // namespace smp::partitioner
