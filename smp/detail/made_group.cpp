// From the group that a caller names to the transport of this rank.
#include "smp/detail/made_group.h"

#include <c10/util/Exception.h>

#include <string>

#include "smp/detail/context.h"

namespace smp::detail {

GroupUse::GroupUse(const char* caller, const ProcessGroup& group) : caller_(caller), kind_(group.kind_) {
  context(caller);
  if (!group.is_made_) return;
  made_ = group.made_.lock();
  TORCH_CHECK_VALUE(made_ != nullptr, caller, ": expected a process group of this job, got one that smp::shutdown has ",
                    "ended. Make it anew after smp::init.");
}

std::vector<int> GroupUse::ranks() const {
  if (made_ != nullptr) return made_->ranks;
  const Context& own = context(caller_);
  return own.topology.group(own.kind(kind_), own.world->rank());
}

runtime::Transport& GroupUse::transport() const {
  const Context& own = context(caller_);
  if (made_ == nullptr) return own.group(kind_);
  std::string members;
  for (const int rank : made_->ranks) members += (members.empty() ? "" : ", ") + std::to_string(rank);
  TORCH_CHECK_VALUE(made_->transport != nullptr, caller_, ": expected a call on a member of the process group {", members,
                    "}, got one on rank ", own.world->rank(), ". Ask group.is_member() first.");
  return *made_->transport;
}

}  // namespace smp::detail
