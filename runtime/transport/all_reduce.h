// Owns the sum over ranks by messages between them: any transport that has isend and irecv can use it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// What the algorithm needs of a group: its messages must not mix with those of callers.
struct Messenger {
  int rank;
  int size;
  std::function<Request(int dest, const void* data, int64_t num_bytes)> isend;
  std::function<Request(int source, void* data, int64_t max_bytes)> irecv;
};

/// Replaces data by the sum over all ranks, added in the order of the ranks: the same bits on every
/// rank, in every run and over every transport.
///
/// Each rank sums one part of the data: it receives that part from all others, and sends them the sum (reduce-scatter, then
/// all-gather, both direct). That moves 2 (n - 1) / n times the data per rank, which is the least possible, in two hops.
/// Short data goes to everybody at once, in one hop. action: for error texts.
void all_reduce_in_rank_order(const Messenger& messenger, void* data, int64_t num_elements, c10::ScalarType type,
                              const std::string& action);

}  // namespace smp::runtime
