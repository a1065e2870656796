// The one place that reads what LibTorch's dispatcher keeps private.
#include "runtime/libtorch/registered_kernels.h"

namespace smp::runtime {
namespace {

using Kernels = std::list<c10::impl::AnnotatedKernel>;

// An explicit instantiation may name private members ([temp.spec.general]); LibTorch shows only the newest kernel of a key.
template <auto kDefinition, auto kKernels>
struct PrivateMembers {
  static const Kernels* find(const c10::OperatorHandle& op, c10::DispatchKey key) {
    const auto& by_key = ((op.*kDefinition)->op).*kKernels;
    const auto found = by_key.find(key);
    return found == by_key.end() ? nullptr : &found->second;
  }
  friend const Kernels* find_kernels(const c10::OperatorHandle& op, c10::DispatchKey key) { return find(op, key); }
};
const Kernels* find_kernels(const c10::OperatorHandle& op, c10::DispatchKey key);
template struct PrivateMembers<&c10::OperatorHandle::operatorDef_, &c10::impl::OperatorEntry::kernels_>;

}  // namespace

const std::list<c10::impl::AnnotatedKernel>* registered_kernels(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return find_kernels(op, key);
}

}  // namespace smp::runtime
