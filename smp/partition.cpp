// The tensors of modules that are placed by hand.
#include "smp/partition.h"

#include <torch/nn/module.h>

#include "smp/engine/engine.h"
#include "smp/module_view.h"

void smp::set_partition(const torch::nn::Module& module, int stage) { engine::set_partition(tensors_of(module), stage); }
