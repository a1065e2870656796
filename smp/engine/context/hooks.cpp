// Calling hooks.
#include "smp/engine/context/hooks.h"

#include <c10/util/ScopeExit.h>

#include <vector>

namespace smp {

void HookHandle::remove() {
  if (const auto hooks = hooks_.lock()) hooks->remove(id_);
}

namespace engine {

int64_t Hooks::add(Moment moment, Hook hook) {
  hooks_.emplace(next_id_, Entry{moment, std::move(hook)});
  return next_id_++;
}

void Hooks::call(Moment moment) {
  std::vector<int64_t> due;
  for (const auto& [id, entry] : hooks_) {
    if (entry.moment == moment) due.push_back(id);
  }
  for (const int64_t id : due) {
    const auto found = hooks_.find(id);
    if (found == hooks_.end()) continue;   // an earlier hook has removed it
    const Hook hook = found->second.hook;  // it may remove itself
    is_calling_ = true;
    const auto end = c10::make_scope_exit([this] { is_calling_ = false; });
    hook();
  }
}

void Hooks::step_ends(bool is_partitioned) {
  if (is_partitioned && !has_stepped_) call(Moment::kAfterFirstStep);
  has_stepped_ = has_stepped_ || is_partitioned;
  call(Moment::kAfterStep);
}

}  // namespace engine
}  // namespace smp
