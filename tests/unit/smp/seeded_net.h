// Modules that are made from one seed, with their values or without.
#pragma once

#include <memory>

#include "runtime/device/random.h"
#include "smp/smp.h"

namespace smp::tests {

/// Seeds the generator of the process, which ranks share, and holds it.
template <class Net, class... Args>
std::shared_ptr<Net> seeded(bool delayed, Args... args) {
  const runtime::UserRandomStateScope user;
  const runtime::GeneratorHold guard(17);
  const DelayParamInitialization delay(delayed);
  return std::make_shared<Net>(args...);
}

}  // namespace smp::tests
