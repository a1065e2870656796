// What transports share whose groups list their members by ranks of the world. Internal to the transport room.
#pragma once

#include <utility>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

class GroupTransport : public Transport {
 public:
  int rank() const final { return rank_; }
  int size() const final { return static_cast<int>(members_.size()); }

 protected:
  /// members: world ranks by rank of the group.
  GroupTransport(std::vector<int> members, int rank) : members_(std::move(members)), rank_(rank) {}

  const std::vector<int>& members() const { return members_; }
  int world_rank(int rank) const { return members_[static_cast<size_t>(rank)]; }
  /// The members of a new group of these ranks of this one.
  std::vector<int> world_ranks(const std::vector<int>& ranks) const {
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(world_rank(rank));
    return members;
  }

 private:
  std::vector<int> members_;
  int rank_;
};

}  // namespace smp::runtime
