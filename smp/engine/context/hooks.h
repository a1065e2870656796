// The hooks of one model on one rank, by the moment at which they are called.
#pragma once

#include <cstdint>
#include <map>

#include "smp/hooks.h"

namespace smp::engine {

enum class Moment { kBeforePartition, kAfterPartition, kBeforeStep, kAfterStep, kAfterFirstStep };

class Hooks {
 public:
  int64_t add(Moment moment, Hook hook);
  void remove(int64_t id) { hooks_.erase(id); }
  /// Calls those of `moment`, in the order of registration. Hooks may add and remove hooks; added ones come the next time.
  void call(Moment moment);
  /// Does one run right now?
  bool is_calling() const { return is_calling_; }
  /// Has a step that uses the model been completed, with its hooks?
  bool has_stepped() const { return has_stepped_; }
  /// Those after the first step that uses the model, which partitions it, once; and those after every step.
  void step_ends(bool is_partitioned);

 private:
  struct Entry {
    Moment moment;
    Hook hook;
  };
  std::map<int64_t, Entry> hooks_;  // by id, which grows
  int64_t next_id_ = 0;
  bool is_calling_ = false;
  bool has_stepped_ = false;
};

}  // namespace smp::engine
