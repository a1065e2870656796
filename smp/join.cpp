// The loop between begin and end.
#include "smp/join.h"

#include "smp/engine/engine.h"

void smp::join(const std::function<void()>& loop, const JoinOptions& options) {
  engine::begin_join(options);
  try {
    loop();
  } catch (...) {
    engine::abandon_join(std::current_exception());
    throw;
  }
  engine::end_join();
}
