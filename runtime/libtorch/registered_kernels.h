// All kernels that LibTorch has of an operator, also those that others lie over.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <list>

namespace smp::runtime {

/// The kernels registered for `op` at exactly `key`, the newest first, which is the one that runs; null: none is. Not to be
/// called while another thread registers or drops kernels of `op`.
const std::list<c10::impl::AnnotatedKernel>* registered_kernels(const c10::OperatorHandle& op, c10::DispatchKey key);

}  // namespace smp::runtime
