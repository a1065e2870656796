// Per-operator seeds and the guard around the generator of the process.
#include "runtime/device/random.h"

#include <ATen/core/enum_tag.h>

#include <optional>
#include <vector>

#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

struct DefaultGenerator {
  std::mutex mutex;  // held around (reseed, operator)
  int scopes = 0;
  std::vector<at::Generator> saved;  // of devices()
};

// The host's is one of them: operators that name no device draw there.
std::vector<const Device*> devices() {
  if (this_ranks_device().type == host().type) return {&host()};
  return {&host(), &this_ranks_device()};
}

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

uint64_t random_stream(const RandomState& state) {
  uint64_t h = mix(state.base_seed);
  h = mix(h ^ state.step);
  return mix(h ^ state.microbatch);
}

uint32_t operator_seed(uint64_t stream, uint64_t ordinal) { return static_cast<uint32_t>(mix(stream ^ ordinal) >> 32); }

// The backward of an attention is tagged as well, and draws its forward's numbers again, by the seed that it is handed.
bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) && !op.schema().argumentIndexWithName("philox_seed");
}

GeneratorHold::GeneratorHold() : lock_(default_generator().mutex) {}

GeneratorHold::GeneratorHold(uint32_t seed) : GeneratorHold() {
  at::Generator generator = host().default_generator();
  std::lock_guard<std::mutex> inner(generator.mutex());
  generator.set_current_seed(seed);
}

GeneratorHold::GeneratorHold(const RandomState& state, uint64_t ordinal, Draws draws) : GeneratorHold() {
  const uint64_t stream = random_stream(state);
  const auto seed = [&](const Device& device) {
    at::Generator generator = device.default_generator();
    std::lock_guard<std::mutex> inner(generator.mutex());
    device.seed(generator, stream, ordinal, draws);
  };
  seed(host());
  if (this_ranks_device().type != host().type) seed(this_ranks_device());
}

Draws draws_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const std::optional<int> position = schema.argumentIndexWithName("dropout_p");
  if (!position) return Draws::kByThread;
  const c10::IValue& p = stack[stack.size() - schema.arguments().size() + static_cast<size_t>(*position)];
  return p.isDouble() && p.toDouble() > 0 ? Draws::kByElement : Draws::kByThread;
}

UserRandomStateScope::UserRandomStateScope() {
  auto& own = default_generator();
  std::lock_guard<std::mutex> lock(own.mutex);
  if (own.scopes++ > 0) return;
  for (const Device* device : devices()) {
    at::Generator generator = device->default_generator();
    std::lock_guard<std::mutex> inner(generator.mutex());
    own.saved.push_back(generator.clone());
  }
}

UserRandomStateScope::~UserRandomStateScope() {
  auto& own = default_generator();
  std::lock_guard<std::mutex> lock(own.mutex);
  if (--own.scopes > 0) return;
  for (const at::Generator& saved : own.saved) {
    at::Generator generator = (saved.device().type() == host().type ? host() : this_ranks_device()).default_generator();
    std::lock_guard<std::mutex> inner(generator.mutex());
    generator.set_state(saved.get_state());
  }
  own.saved.clear();
}

}  // namespace smp::runtime
