// Reads the steady clock.
#include "examples/common/clock.h"

#include <chrono>

namespace examples {

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace examples
