// Pins each layer with smp::set_partition.
#include "examples/mnist/placement.h"

#include "smp/partition.h"

namespace mnist {

void place_by_hand(const ConvNet& net, int num_stages) {
  const auto modules = net.named_children();
  int layer = 0;
  for (const char* name : {"conv1", "conv2", "fc1", "fc2"}) {
    constexpr int kNumLayers = 4;
    smp::set_partition(*modules[name], layer++ * num_stages / kNumLayers);
  }
}

}  // namespace mnist
