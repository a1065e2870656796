// Pins each module with smp::set_partition.
#include "examples/transformer_lm/placement.h"

#include "smp/partition.h"

namespace transformer_lm {

void place_by_hand(const TransformerLm& net, int num_stages) {
  const auto modules = net.named_children();
  const auto layers = modules["encoder"]->children();
  smp::set_partition(*modules["embedding"], 0);
  for (size_t i = 0; i < layers.size(); ++i) {
    const size_t stage = i * static_cast<size_t>(num_stages) / layers.size();
    smp::set_partition(*layers[i], static_cast<int>(stage));
  }
  smp::set_partition(*modules["decoder"], num_stages - 1);
}

}  // namespace transformer_lm
