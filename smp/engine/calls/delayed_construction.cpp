// The scope in which modules are constructed without values.
#include "runtime/delayed/construction.h"
#include "smp/delayed_init.h"
#include "smp/engine/context/context.h"
#include "smp/engine/engine.h"

namespace smp {

struct DelayParamInitialization::State {
  runtime::ConstructionScope scope;
};

DelayParamInitialization::DelayParamInitialization(bool enabled) {
  engine::refuse_in_body("DelayParamInitialization", "Construct modules before the step.");
  if (enabled) state_ = std::make_unique<State>();
}

DelayParamInitialization::~DelayParamInitialization() = default;

namespace engine {

struct DelayedConstruction::State {
  runtime::ConstructionScope scope{runtime::Literals::kHidden};
};

DelayedConstruction::DelayedConstruction() {
  refuse_in_body("smp::DelayParamInitialization", "Construct modules before the step.");
  state_ = std::make_unique<State>();
}

DelayedConstruction::~DelayedConstruction() = default;

}  // namespace engine
}  // namespace smp
