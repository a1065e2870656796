// Which parameters and buffers live on which pipeline ranks; releases the others. Plans nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "partitioner/plan/home.h"
#include "partitioner/plan/plan.h"
#include "runtime/capture/bindings.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

using partitioner::TensorHome;
using partitioner::TensorHomes;

/// Homes after the first plan. Tensors on one storage live on all ranks where a stage reads one of
/// them, since a write to one is a write to the others; those that no stage reads, on rank 0.
TensorHomes homes_of(const partitioner::Graph& graph, const partitioner::Plan& plan, const Bindings& bindings);

/// Gives the tensors that this rank holds the values that their construction has put off. Local.
void make_local_values(const TensorHomes& homes, const Bindings& bindings, int pipeline_rank);

/// Every rank of `group` gets the values of its rank `source`. Collective.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, Transport& group, int source);

/// Copies tied tensors from their owner to the other ranks that hold them, and everything from replica 0 to the other
/// replicas. Collective over the pipeline and the replicas.
void synchronise(const TensorHomes& homes, const Bindings& bindings, Transport& pipeline, Transport& replicas);

/// Moves tensors to this rank's device, with their gradients: their data where they are to be here, else their face alone.
/// Tensors on one storage stay on one. Who has made views of them outside of `bindings` keeps the old data. True when it has
/// moved any: storages are others then.
bool move_to_device(const Bindings& bindings, const std::function<bool(const NamedTensor&)>& is_here);

/// Frees the data of every tensor that this rank does not hold. The tensor objects and their sizes stay, and every
/// access to the data throws a text that names the owner.
void release_others(const TensorHomes& homes, const Bindings& bindings, int pipeline_rank);

}  // namespace smp::runtime
