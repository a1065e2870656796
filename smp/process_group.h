// Groups of ranks as values, by kind or made by new_group.
#pragma once

#include <memory>
#include <vector>

namespace smp {

/// Sets of ranks that act together; each rank belongs to one of every kind (docs/placement.md).
enum class CommGroup {
  WORLD,      ///< all ranks
  MP_GROUP,   ///< one full replica of the model
  DP_GROUP,   ///< the ranks that hold my stage, one per replica
  PP_GROUP,   ///< the stages of my replica; today the same as MP_GROUP
  TP_GROUP,   ///< the shards of my stage; today this rank alone
  RDP_GROUP,  ///< the ranks that hold exactly my parameters; today the same as DP_GROUP
};
/// Whose rank a number is: that of the world, or that of my group of this kind.
enum class RankType { WORLD_RANK, MP_RANK, DP_RANK, PP_RANK, TP_RANK, RDP_RANK };
using enum CommGroup;  // smp::DP_GROUP
using enum RankType;   // smp::DP_RANK

namespace engine {
struct MadeGroup;
class GroupUse;
}  // namespace engine

/// A group of ranks as a value, wherever smp takes a group: one of the kinds above, or one made by new_group.
///
///   smp::ProcessGroup odd = smp::new_group({1, 3});      // on all ranks
///   if (smp::rank() % 2 == 1) smp::barrier(odd);         // on its members
class ProcessGroup {
 public:
  /// My group of that kind.
  ProcessGroup(CommGroup kind) : kind_(kind) {}

  /// Its members as ranks of the world; a rank's place in the list is its rank in the group. This and everything below
  /// throws c10::Error before init and c10::ValueError when shutdown has ended the group.
  std::vector<int> ranks() const;
  int size() const;
  /// Is this rank a member?
  bool is_member() const;
  /// This rank's rank in the group. Throws c10::ValueError when it is no member.
  int rank() const;

 private:
  friend class engine::GroupUse;
  explicit ProcessGroup(const std::shared_ptr<engine::MadeGroup>& made) : made_(made) {}

  CommGroup kind_ = CommGroup::WORLD;
  std::shared_ptr<engine::MadeGroup> made_;  // null: that of kind_
};

}  // namespace smp
