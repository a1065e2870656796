// Turns work into microseconds: a roofline per operator, latency and bandwidth per message.
#pragma once

#include <cstdint>

#include "partitioner/cost/operator_cost.h"

namespace smp::partitioner {

/// One rank's device and its links. The defaults are one core of a 2020s x86 server in float32 and
/// a transport through shared memory, measured with LibTorch 2.11 on one thread.
struct DeviceModel {
  double peak_gflops = 100;            // products, GFLOP/s
  double half_gflops = 100;            // products of 16-bit numbers
  double memory_gigabytes_per_s = 25;  // operators that only move data, GB/s
  double transcendental_ns = 0.3;      // per element
  double random_ns = 6;                // per drawn number
  double forward_overhead_us = 1.0;    // per leaf operator: dispatch, allocation, autograd node
  double backward_overhead_us = 3.0;   // per leaf operator: engine, saved tensors
  double body_us = 0.5;                // the step's body, per operator and microbatch: on the first rank, before all else
  double link_gigabytes_per_s = 4;     // one message, GB/s
  double link_latency_us = 5;          // per message, each side
  int64_t allocation_bytes = 1;        // memory is taken in multiples of it
  bool operator==(const DeviceModel&) const = default;

  /// max(flops / peak, bytes / bandwidth) + elementwise functions + overhead. (Roofline: Williams et al., CACM 2009)
  double forward_us(const Work& work) const;
  double backward_us(const Work& work) const;
  /// One message of `num_bytes`, as either side sees it.
  double message_us(int64_t num_bytes) const;
};

}  // namespace smp::partitioner
