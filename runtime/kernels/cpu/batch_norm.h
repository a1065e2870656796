// Batch normalisation in training, with the bits of LibTorch's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace smp::runtime {

/// What aten::native_batch_norm takes in training; undefined where it may be.
struct BatchNormArguments {
  at::Tensor input, weight, bias, running_mean, running_var;
  double momentum = 0.1, epsilon = 1e-5;
};

struct BatchNormResults {
  at::Tensor output, mean, inverse_std;
};

/// Whether this LibTorch adds up as batch_norm_in_training() does. Tried once, with a few kilobytes.
bool batch_norm_adds_up_alike();

/// Adds up the channels' elements in LibTorch's order, several channels at once: LibTorch takes one after the other, where
/// each sum waits for the one before. False, and nothing done, where that would not give the same bits: for other than float
/// images of several pixels on a CPU that lie channel by channel, with parameters and statistics of the same kind, and where
/// LibTorch adds up in another way.
bool batch_norm_in_training(const BatchNormArguments& arguments, BatchNormResults& results);

/// aten::native_batch_norm, by batch_norm_in_training() where that can.
void own_native_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace smp::runtime
