// The step function: a loop body written for one batch, run as a pipeline of microbatches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/step_arguments.h"
#include "smp/step_output.h"

namespace smp {

namespace step_internal {

using Tensors = std::vector<at::Tensor>;
/// The body, type-erased: tensor arguments of one microbatch in, returned tensors out.
using Body = std::function<Tensors(const Tensors&)>;

/// Number of the next step object of this rank; the same on all ranks that make the same objects in the same order.
/// -1 before smp::init.
int register_step();
/// One step on this rank: outputs by returned tensor.
std::vector<StepOutput> run(int step_number, const Tensors& arguments, const Body& body);

template <class T>
inline constexpr bool is_tensor = std::is_base_of_v<at::Tensor, std::remove_cvref_t<T>>;

template <class Result>
struct Returned;
template <>
struct Returned<void> {
  static void make(std::vector<StepOutput>&&) {}
};
template <>
struct Returned<at::Tensor> {
  static Tensors flatten(at::Tensor tensor) { return {std::move(tensor)}; }
  static StepOutput make(std::vector<StepOutput>&& outputs) { return std::move(outputs.at(0)); }
};
template <>
struct Returned<std::vector<at::Tensor>> {
  static Tensors flatten(Tensors tensors) { return tensors; }
  static std::vector<StepOutput> make(std::vector<StepOutput>&& outputs) { return std::move(outputs); }
};
template <class... Ts>
  requires(is_tensor<Ts> && ...)
struct Returned<std::tuple<Ts...>> {
  static Tensors flatten(const std::tuple<Ts...>& tensors) {
    return std::apply([](const auto&... each) { return Tensors{each...}; }, tensors);
  }
  static auto make(std::vector<StepOutput>&& outputs) { return unpack(outputs, std::index_sequence_for<Ts...>{}); }

 private:
  template <size_t... I>
  static auto unpack(std::vector<StepOutput>& outputs, std::index_sequence<I...>) {
    return std::make_tuple(std::move(outputs.at(I))...);
  }
};

/// The argument for the body: the microbatch's tensor, a copy of the caller's container with the microbatch's tensors, or
/// the caller's own object.
template <class Arg>
decltype(auto) pick(const Tensors& microbatch, size_t& next, Arg& original) {
  if constexpr (is_tensor<Arg>) {
    (void)original;
    return at::Tensor(microbatch[next++]);
  } else if constexpr (holds_tensors<Arg>) {
    std::remove_cv_t<Arg> copy = original;
    for_each_tensor(copy, [&](at::Tensor& tensor) { tensor = microbatch[next++]; });
    return copy;
  } else {
    (void)microbatch, (void)next;
    return static_cast<Arg&>(original);
  }
}

/// As what the body gets it: tensors as temporaries, everything else as an object it may change.
template <class Arg>
using Handed = std::conditional_t<
    is_tensor<Arg>, at::Tensor,
    std::conditional_t<holds_tensors<Arg>, std::remove_cvref_t<Arg>&, std::remove_reference_t<Arg>&>>;
inline at::Tensor&& hand_over(at::Tensor& tensor) { return std::move(tensor); }
template <class T>
T& hand_over(T& object) {
  return object;
}

}  // namespace step_internal

/// A body made by smp::step, callable like a function. See smp::step.
template <class BodyFunction>
class Step {
 public:
  explicit Step(BodyFunction body) : body_(std::move(body)), number_(step_internal::register_step()) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    using namespace step_internal;
    using Result = std::invoke_result_t<BodyFunction&, Handed<Args>...>;
    if (number_ < 0) number_ = register_step();
    Tensors tensors;
    (collect(tensors, args), ...);
    auto erased = [&](const Tensors& microbatch) -> Tensors {
      size_t next = 0;
      // Braces fix the order of evaluation, and with it which tensor goes to which argument.
      std::tuple<decltype(pick(microbatch, next, args))...> picked{pick(microbatch, next, args)...};
      auto call = [&](auto&... each) -> Result { return std::invoke(body_, hand_over(each)...); };
      if constexpr (std::is_void_v<Result>) {
        std::apply(call, picked);
        return {};
      } else {
        return Returned<std::remove_cvref_t<Result>>::flatten(std::apply(call, picked));
      }
    };
    return Returned<std::remove_cvref_t<Result>>::make(run(number_, tensors, erased));
  }

 private:
  template <class Arg>
  static void collect(step_internal::Tensors& tensors, Arg& arg) {
    if constexpr (step_internal::is_tensor<Arg>) {
      tensors.push_back(arg);
    } else {
      step_internal::for_each_tensor(arg, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    }
  }

  BodyFunction body_;
  int number_;
};

/// Turns a body into a step function.
///
///   auto train_step = smp::step([&](at::Tensor data, at::Tensor target) {
///     auto loss = torch::nll_loss(model(data), target);
///     model.backward(loss);
///     return loss;                                      // at::Tensor, std::tuple or std::vector of them, or nothing
///   });
///   smp::StepOutput loss = train_step(data, target);
///
/// Every tensor argument is cut along dimension 0 into Config::microbatches equal parts, which the body may change
/// without changing the argument. So are the tensors in a std::vector, list, deque, array, map, optional, pair, tuple or
/// torch::data::Example, of which the body gets a copy; other types made of tensors do not compile. Other arguments, and
/// objects that the body captures, reach it as they are. The body runs on pp_rank() 0 only, once per
/// microbatch, on tensors that have shapes but no data; what it calls is recorded and run on the stages. The results are
/// on every rank.
///
/// Collective over the pipeline (and its replicas): call it on every rank. Arguments of other ranks than pp_rank() 0
/// are ignored. A step that is refused (a batch that microbatches do not divide, an operator that cannot be captured)
/// throws on every rank of the pipeline, with the text of the rank that refused, before any weight or gradient changes.
/// What fails later, while the stages run (an index out of range), ends the job: it throws where it happens, and every
/// other rank's present or next call throws "rank R failed: " and its text, as does every later call of all.
template <class BodyFunction>
Step<std::decay_t<BodyFunction>> step(BodyFunction&& body) {
  return Step<std::decay_t<BodyFunction>>(std::forward<BodyFunction>(body));
}

}  // namespace smp
