// Per-operator seeds and the guard around the generator of the process.
#include "runtime/device/random.h"

#include <ATen/core/enum_tag.h>

#include <optional>

#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

struct DefaultGenerator {
  std::mutex mutex;  // held around (reseed, operator)
  int scopes = 0;
  std::optional<at::Generator> saved;
};

DefaultGenerator& default_generator() {
  static DefaultGenerator generator;
  return generator;
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

uint32_t operator_seed(const RandomState& state, uint64_t ordinal) {
  uint64_t h = mix(state.base_seed);
  h = mix(h ^ state.step);
  h = mix(h ^ state.microbatch);
  h = mix(h ^ ordinal);
  return static_cast<uint32_t>(h >> 32);
}

bool is_random(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

GeneratorHold::GeneratorHold() : lock_(default_generator().mutex) {}

GeneratorHold::GeneratorHold(uint32_t seed) : GeneratorHold() {
  at::Generator generator = this_ranks_device().default_generator();
  std::lock_guard<std::mutex> inner(generator.mutex());
  generator.set_current_seed(seed);
}

UserRandomStateScope::UserRandomStateScope() {
  auto& own = default_generator();
  std::lock_guard<std::mutex> lock(own.mutex);
  if (own.scopes++ > 0) return;
  at::Generator generator = this_ranks_device().default_generator();
  std::lock_guard<std::mutex> inner(generator.mutex());
  own.saved = generator.clone();
}

UserRandomStateScope::~UserRandomStateScope() {
  auto& own = default_generator();
  std::lock_guard<std::mutex> lock(own.mutex);
  if (--own.scopes > 0) return;
  at::Generator generator = this_ranks_device().default_generator();
  std::lock_guard<std::mutex> inner(generator.mutex());
  generator.set_state(own.saved->get_state());
  own.saved.reset();
}

}  // namespace smp::runtime
