// What stands behind smp::ProcessGroup: the members and, on them, the transport.
#pragma once

#include <memory>
#include <vector>

#include "runtime/transport/transport.h"
#include "smp/comm.h"

namespace smp::detail {

/// A group made by smp::new_group; the context owns it, a ProcessGroup refers to it.
struct MadeGroup {
  std::vector<int> ranks;                         // of the world, by rank of the group
  std::shared_ptr<runtime::Transport> transport;  // null on ranks that are no members
};

/// A ProcessGroup in a call of `caller`, which errors name. Throws c10::Error before init, and c10::ValueError for a group
/// that shutdown has ended.
class GroupUse {
 public:
  GroupUse(const char* caller, const ProcessGroup& group);
  std::vector<int> ranks() const;
  bool is_member() const { return made_ == nullptr || made_->transport != nullptr; }
  /// Throws c10::ValueError on a rank that is no member.
  runtime::Transport& transport() const;

  static ProcessGroup value_of(const std::shared_ptr<MadeGroup>& made) { return ProcessGroup(made); }

 private:
  const char* caller_;
  CommGroup kind_;
  std::shared_ptr<MadeGroup> made_;  // null: the group of kind_
};

}  // namespace smp::detail
