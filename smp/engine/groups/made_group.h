// What stands behind smp::ProcessGroup: the members and, on them, the transport.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/placement/topology.h"
#include "runtime/transport/transport.h"
#include "smp/process_group.h"

namespace smp::engine {

class MadeGroups;

/// A group made by smp::new_group; all its ProcessGroup values of this rank share it.
struct MadeGroup {
  uint64_t number = 0;     // the same on all ranks
  std::vector<int> ranks;  // of the world, by rank of the group
  bool is_member = false;
  std::weak_ptr<runtime::Transport> transport{};  // the job's; none where this rank is no member
  std::weak_ptr<MadeGroups> job{};
};

/// The groups of one job. MPI has some 65,000 communicators and frees one collectively, so a group whose last value is gone
/// on all its members is freed when the next one is made.
class MadeGroups {
 public:
  explicit MadeGroups(std::shared_ptr<runtime::Transport> world) : world_(std::move(world)) {}
  /// Numbers of those that have no value on this rank any more.
  std::vector<uint64_t> ended() const;
  /// Collective over the world. all_ended: what ended() gives, by rank.
  static std::shared_ptr<MadeGroup> add(const std::shared_ptr<MadeGroups>& groups, const std::vector<int>& ranks,
                                        const std::vector<std::vector<uint64_t>>& all_ended);
  size_t size() const { return groups_.size(); }

 private:
  struct Group {
    uint64_t number;
    std::vector<int> ranks;
    std::shared_ptr<runtime::Transport> transport;
    std::weak_ptr<MadeGroup> value;
  };
  void free(const std::vector<std::vector<uint64_t>>& all_ended);

  std::shared_ptr<runtime::Transport> world_;
  uint64_t num_made_ = 0;
  std::vector<Group> groups_;  // by number, the same on all ranks
};

/// Throws c10::ValueError for a number that is none of the enumerators.
runtime::GroupKind kind_of(CommGroup group);
runtime::GroupKind kind_of(RankType rank_type);

/// A ProcessGroup in a call of `caller`, which errors name. Throws c10::Error before init, and c10::ValueError for a group
/// that shutdown has ended.
class GroupUse {
 public:
  GroupUse(const char* caller, const ProcessGroup& group);
  std::vector<int> ranks() const;
  bool is_member() const { return made_ == nullptr || made_->is_member; }
  /// These throw c10::ValueError on a rank that is no member.
  void check_is_member() const;
  int rank() const;
  runtime::Transport& transport() const;
  /// `call` over this group, by the name that it has on all ranks and in all languages: "barrier of PP_GROUP".
  std::string name_of(std::string_view call) const;

  static ProcessGroup value_of(const std::shared_ptr<MadeGroup>& made) { return ProcessGroup(made); }

 private:
  const char* caller_;
  CommGroup kind_;
  std::shared_ptr<MadeGroup> made_;  // null: the group of kind_
};

}  // namespace smp::engine
