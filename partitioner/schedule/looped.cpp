// The columns of interleaved 1F1B.
#include "partitioner/schedule/looped.h"

#include <algorithm>
#include <cstdint>

#include "partitioner/schedule/dependencies.h"

namespace smp::partitioner {

bool is_looped(const MicrobatchGraphs& graphs, int visits) {
  const int num_ranks = graphs.num_ranks();
  const int num_stages = graphs.num_stages(0);
  if (visits < 2 || num_ranks < 2 || graphs.num_programs() > 1) return false;
  if (num_stages != int64_t{visits} * num_ranks || graphs.num_microbatches() % num_ranks != 0) return false;
  for (int stage = 0; stage < num_stages; ++stage) {
    if (graphs.rank_of(stage, 0) != stage % num_ranks) return false;
  }
  return true;
}

std::vector<std::vector<Action>> looped_columns(const MicrobatchGraphs& graphs, int visits) {
  const int num_ranks = graphs.num_ranks(), all = graphs.num_microbatches();
  std::vector<std::vector<Action>> columns(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<Action> forwards, backwards;
    for (int group = 0; group < all; group += num_ranks) {
      for (int visit = 0; visit < visits; ++visit) {
        const int stage = visit * num_ranks + rank;
        const int back = (visits - 1 - visit) * num_ranks + rank;
        for (int m = group; m < group + num_ranks; ++m) {
          forwards.push_back({ActionKind::kForward, stage, m});
          backwards.push_back({ActionKind::kBackward, back, m});
        }
      }
    }
    const size_t warm_up = 2 * (num_ranks - 1 - rank) + (visits - 1) * num_ranks;
    const size_t before = std::min(forwards.size(), warm_up);
    for (size_t i = 0; i < forwards.size() + before; ++i) {
      if (i < forwards.size()) columns[rank].push_back(forwards[i]);
      if (i < before) continue;
      const Action& backward = backwards[i - before];
      if (graphs.has_backward(backward.stage, backward.microbatch)) {
        append_with_followers(backward, columns[rank]);
      }
    }
  }
  return columns;
}

}  // namespace smp::partitioner
