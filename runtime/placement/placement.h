// Which parameters and buffers live on which pipeline ranks; releases the others. Plans nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/capture/bindings.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Parameter or buffer name (the first, of several) -> pipeline ranks that hold it, ascending; the
/// first is its owner. Tied weights that are read on several ranks have several.
using Owners = std::map<std::string, std::vector<int>>;

/// Owners after the first plan. Tensors on one storage live on all ranks where a stage reads one of
/// them, since a write to one is a write to the others; those that no stage reads, on rank 0.
Owners owners_of(const partitioner::Graph& graph, const partitioner::Plan& plan, const Bindings& bindings);

bool holds(const Owners& owners, const std::string& name, int pipeline_rank);

/// Gives the tensors that this rank holds the values that their construction has put off. Local.
void make_local_values(const Owners& owners, const Bindings& bindings, int pipeline_rank);

/// Every rank of `group` gets the values of its rank `source`. Collective.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, Transport& group, int source);

/// Copies tied tensors from their owner to the other ranks that hold them, and everything from replica 0 to the other
/// replicas. Collective over the pipeline and the replicas.
void synchronise(const Owners& owners, const Bindings& bindings, Transport& pipeline, Transport& replicas);

/// Frees the data of every tensor that this rank does not hold. The tensor objects and their sizes stay, and every
/// access to the data throws a text that names the owner.
void release_others(const Owners& owners, const Bindings& bindings, int pipeline_rank);

}  // namespace smp::runtime
