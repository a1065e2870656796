// The way out of delayed construction.
#include "smp/delayed_init.h"

#include <torch/nn/module.h>

#include "smp/engine/engine.h"
#include "smp/module_view.h"

void smp::initialize_parameters(const torch::nn::Module& module) { engine::make_values(tensors_of(module)); }
