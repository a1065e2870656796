// The table of devices, and how the job uses them.
#include "smp/engine/context/planned_device.h"

#include "partitioner/cost/device_table.h"

namespace smp::engine {

using namespace partitioner;

PlannedDevice planned_device(const Context& context) {
  const bool is_asked_for = !context.config.planned_device.empty();
  const std::string& name = is_asked_for ? context.config.planned_device : context.device.model;
  if (name.empty()) return {};
  const KnownDevice* const known = find_known_device(name);
  const KnownDevice& device = known != nullptr ? *known : usual_device();
  const DeviceUse use{.tf32 = context.device.tf32,
                      .graphs = context.config.stage == StageKind::kTape && context.config.cuda_graphs == CudaGraphs::kAuto,
                      .direct = context.device.links != nullptr || (is_asked_for && context.config.nccl)};
  return {device_model(device, use), is_asked_for ? device.memory_gibibytes << 30 : -1};
}

}  // namespace smp::engine
