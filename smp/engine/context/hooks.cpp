// Calling hooks.
#include "smp/engine/context/hooks.h"

#include <c10/util/Exception.h>

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
  struct Calling {
    explicit Calling(bool& flag) : is_calling(flag) { is_calling = true; }
    ~Calling() { is_calling = false; }
    bool& is_calling;
  };
  for (const int64_t id : due) {
    const auto found = hooks_.find(id);
    if (found == hooks_.end()) continue;   // an earlier hook has removed it
    const Hook hook = found->second.hook;  // it may remove itself
    const Calling calling(is_calling_);
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
