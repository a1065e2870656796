// From the group that a caller names to the transport of this rank.
#include "smp/detail/made_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "smp/detail/context.h"

namespace smp::detail {

namespace {

// Other replicas may have left the loop, or be at another step of it.
void check_outside_join(const Context& own, const char* caller, const std::vector<int>& ranks) {
  if (!own.is_in_join || own.is_in_step) return;
  const std::vector<int> mine = own.topology.group(runtime::GroupKind::kPipeline, own.world->rank());
  const bool is_own_replica =
      std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return std::count(mine.begin(), mine.end(), rank) > 0; });
  TORCH_CHECK_VALUE(is_own_replica, caller, ": expected a group within one pipeline in the loop of smp::join, got one with "
                    "ranks of other replicas, which may have left the loop. Call it after smp::join.");
}

}  // namespace

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
  own.check_laid_out(own.kind(kind_), caller_);
  return own.topology.group(own.kind(kind_), own.world->rank());
}

runtime::Transport& GroupUse::transport() const {
  const Context& own = context(caller_);
  if (made_ == nullptr) {
    own.check_laid_out(own.kind(kind_), caller_);
    check_outside_join(own, caller_, own.topology.group(own.kind(kind_), own.world->rank()));
    return own.group(kind_);
  }
  check_outside_join(own, caller_, made_->ranks);
  std::string members;
  for (const int rank : made_->ranks) members += (members.empty() ? "" : ", ") + std::to_string(rank);
  TORCH_CHECK_VALUE(made_->transport != nullptr, caller_, ": expected a call on a member of the process group {", members,
                    "}, got one on rank ", own.world->rank(), ". Ask group.is_member() first.");
  return *made_->transport;
}

}  // namespace smp::detail
