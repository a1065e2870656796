// The unsplit model, run eagerly: the numbers that every split run must reproduce. Never uses our own replay.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/support/model_zoo.h"

namespace smp::support {

/// Which random numbers a step draws; the fields are those of runtime::RandomState.
struct RandomOptions {
  uint64_t base_seed = 0;
  uint64_t step = 0;
  uint64_t first_microbatch = 0;  // of the step, counted over all replicas
};

/// What a step leaves behind, all detached from autograd and from the module.
struct OracleResult {
  std::vector<at::Tensor> losses;                // one per microbatch, not divided by their number
  std::vector<std::vector<at::Tensor>> outputs;  // outputs[m]: BodyResult::outputs of microbatch m
  std::map<std::string, at::Tensor> gradients;   // by qualified parameter name; undefined where there is none
  std::map<std::string, at::Tensor> buffers;     // by qualified name, after the step
};

/// Cuts every tensor along dimension 0 into equal microbatches in fresh storage:
/// result[m][argument]. Throws c10::ValueError if `microbatches` does not divide a size.
std::vector<std::vector<at::Tensor>> split_batch(const std::vector<at::Tensor>& full_batch, int microbatches);

/// One step of `model` on `module`: for each microbatch in order the body with every random operator reseeded, then (loss /
/// microbatches).backward() for each of its losses, which adds to the gradients that are there. With training=false the
/// module is in evaluation mode and no gradient is computed. Leaves the user's random state as it was.
OracleResult run_oracle(const ZooModel& model, torch::nn::Module& module, const std::vector<at::Tensor>& full_batch,
                        int microbatches, RandomOptions random, bool training);

/// The module's gradients and buffers as they are now, copied.
std::map<std::string, at::Tensor> copy_gradients(const torch::nn::Module& module);
std::map<std::string, at::Tensor> copy_buffers(const torch::nn::Module& module);

/// Losses, outputs and buffers bit-equal; gradients too, or within `relative_gradients` where that is not 0.
void expect_same_step(const OracleResult& got, const OracleResult& want, const std::string& what,
                      double relative_gradients = 0.0);

}  // namespace smp::support
