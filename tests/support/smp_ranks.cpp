// Contexts over loopback transports.
#include "tests/support/smp_ranks.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>

#include "runtime/device/device.h"
#include "smp/engine/calls/job.h"
#include "tests/support/loopback_world.h"
#include "tests/support/own_stream.h"

namespace smp::tests {

void run_smp_ranks(int num_ranks, const Config& config, const std::function<void()>& fn) {
  Config quiet = config;
  if (quiet.log_level == LogLevel::kInfo) quiet.log_level = LogLevel::kOff;  // warnings only where a test asks for them
  if (runtime::this_ranks_device().type != runtime::host().type) quiet.device = DeviceKind::kCuda;
  // A process's first tanh gave other bits, once in some hundred, where several threads began with one.
  [[maybe_unused]] static const at::Tensor first = at::tanh(at::ones({64}));
  run_ranks(num_ranks, [&](runtime::Transport& transport) {
    const std::shared_ptr<runtime::Transport> borrowed(std::shared_ptr<void>(), &transport);
    runtime::Launch launch{.rank = transport.rank(), .size = transport.size()};
    const auto context = engine::make_context(quiet, launch, borrowed);
    const engine::ThreadContext thread(context.get());
    const OwnStream stream;
    fn();
  });
}

}  // namespace smp::tests
