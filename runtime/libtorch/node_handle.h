// Owning handles of autograd nodes: all in which the LibTorch releases that smp builds on differ. LibTorch 2.11 shares nodes
// by std::shared_ptr, 2.15 by c10::intrusive_ptr.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/version.h>

#include <memory>
#include <type_traits>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 11
#include <torch/csrc/autograd/function.h>  // an intrusive_ptr wants the whole class
#endif

namespace smp::runtime {

using NodeHandle = decltype(torch::autograd::Edge::function);

inline constexpr bool kNodesAreIntrusive = !std::is_same_v<NodeHandle, std::shared_ptr<torch::autograd::Node>>;

/// Of a class derived from torch::autograd::Node.
template <class Derived>
using HandleOf = std::conditional_t<kNodesAreIntrusive, c10::intrusive_ptr<Derived>, std::shared_ptr<Derived>>;

template <class Derived>
HandleOf<Derived> make_node() {
  if constexpr (kNodesAreIntrusive) {
    return c10::make_intrusive<Derived>();
  } else {
    // Found by its argument: newer releases have no such function. It destroys long chains of nodes without recursion.
    return HandleOf<Derived>(new Derived, [](auto* node) { deleteNode(node); });
  }
}

}  // namespace smp::runtime
