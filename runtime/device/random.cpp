// Per-operator seeds and the guard around the process-wide CPU generator.
#include "runtime/device/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>

#include <optional>

namespace smp::runtime {
namespace {

struct CpuGenerator {
  std::mutex mutex;  // held around (reseed, operator)
  int scopes = 0;
  std::optional<at::Generator> saved;
};

CpuGenerator& cpu_generator() {
  static CpuGenerator generator;
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

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

OperatorSeedGuard::OperatorSeedGuard(uint32_t seed) : lock_(cpu_generator().mutex) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> inner(generator.mutex());
  generator.set_current_seed(seed);
}

GeneratorHold::GeneratorHold() : lock_(cpu_generator().mutex) {}

UserRandomStateScope::UserRandomStateScope() {
  auto& own = cpu_generator();
  std::lock_guard<std::mutex> lock(own.mutex);
  if (own.scopes++ > 0) return;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> inner(generator.mutex());
  own.saved = generator.clone();
}

UserRandomStateScope::~UserRandomStateScope() {
  auto& own = cpu_generator();
  std::lock_guard<std::mutex> lock(own.mutex);
  if (--own.scopes > 0) return;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> inner(generator.mutex());
  generator.set_state(own.saved->get_state());
  own.saved.reset();
}

}  // namespace smp::runtime
