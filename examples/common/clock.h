// Time for measuring steps.
#pragma once

namespace examples {

/// Seconds since some fixed moment; never goes back.
double seconds_now();

}  // namespace examples
