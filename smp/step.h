// The step function: a loop body written for one batch, run as a pipeline of microbatches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/step_arguments.h"
#include "smp/step_call.h"
#include "smp/step_results.h"

namespace smp {

/// How a step function treats its arguments, which are counted from 0.
///
///   auto train_step = smp::step(body, {.non_split_inputs = {1}, .input_split_axes = {{0, 1}}});
struct StepOptions {
  /// Arguments that every microbatch gets whole: a mask for all, a table, a 0-dimensional tensor.
  std::vector<int64_t> non_split_inputs{};
  /// Dimension along which an argument is cut, by position of the argument; negative ones count from the last. 0 for
  /// those that are not named. Holds for every tensor in a container.
  std::map<int64_t, int64_t> input_split_axes{};
  /// Results are always detached: they exist on ranks that have no graph of them. false is refused.
  bool detach_outputs = true;
};

namespace step_internal {

/// Throws c10::ValueError for options that hold for no step.
void check_options(const StepOptions& options);
/// How each of `num_arguments` is cut. Throws c10::ValueError for positions of arguments that there are not.
std::vector<Cut> cuts_of(const StepOptions& options, int64_t num_arguments);

/// One step on this rank.
Results run(int step_number, const Call& call);

/// Tensors as temporaries, everything else as an object that the body may change.
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
  explicit Step(BodyFunction body, StepOptions options = {}) : body_(std::move(body)), options_(std::move(options)) {
    step_internal::check_options(options_);
  }

  template <class... Args>
  auto operator()(Args&&... args) {
    using namespace step_internal;
    using Result = std::invoke_result_t<BodyFunction&, typename Argument<std::remove_reference_t<Args>>::Handed...>;
    const std::vector<Cut> cuts = cuts_of(options_, sizeof...(Args));
    auto arguments = [&]<size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Argument<std::remove_reference_t<Args>>...>{
          Argument<std::remove_reference_t<Args>>(args, cuts[I])...};
    }(std::index_sequence_for<Args...>());
    using Return = Returned<std::remove_cvref_t<Result>>;
    Return returned;
    Call call{
        .arguments = [&](const Share& share) { return collect(arguments, share); },
        .body = [&](const Tensors& inputs, int64_t m) { return run_body<Result>(arguments, returned, inputs, m); },
    };
    if constexpr (Return::kHasValues) call.values = [&] { return returned.take_values(); };
    if constexpr (Return::kHasStructure) call.payload = [&] { return returned.take_structure(); };
    return Return::make(run(number_.get(), call));
  }

 private:
  template <class... As>
  static std::vector<step_internal::StepTensor> collect(std::tuple<As...>& arguments, const step_internal::Share& share) {
    std::vector<step_internal::StepTensor> tensors;
    std::apply([&](As&... argument) { (argument.collect(tensors, share), ...); }, arguments);
    return tensors;
  }

  template <class Result, class Return, class... As>
  step_internal::Tensors run_body(std::tuple<As...>& arguments, Return& returned, const step_internal::Tensors& inputs,
                                  int64_t m) {
    using namespace step_internal;
    size_t next = 0;
    // Braces fix the order of evaluation, and with it which tensor goes to which argument.
    auto picked = std::apply(
        [&](As&... argument) { return std::tuple<typename As::Picked...>{argument.pick(inputs, next, m)...}; }, arguments);
    auto call = [&](auto&... each) -> Result { return std::invoke(body_, hand_over(each)...); };
    if constexpr (std::is_void_v<Result>) {
      (void)returned, (void)m;
      std::apply(call, picked);
      return {};
    } else {
      return returned.take(std::apply(call, picked), m);
    }
  }

  BodyFunction body_;
  StepOptions options_;
  step_internal::StepNumber number_;
};

/// Turns a body into a step function.
///
///   auto train_step = smp::step([&](at::Tensor data, at::Tensor target) {
///     auto loss = torch::nll_loss(model(data), target);
///     model.backward(loss);
///     return loss;                                      // or std::make_tuple(loss, data.size(0)), or nothing
///   });
///   smp::StepOutput loss = train_step(data, target);
///
/// Every tensor argument is cut along dimension 0 into Config::microbatches equal parts, which the body may change
/// without changing the argument; `options` name other dimensions, and arguments that stay whole. So are the tensors in a
/// std::vector, list, deque, array, map, optional, pair, tuple or torch::data::Example and in structs with smp::Fields, of
/// which the body gets a copy; other templates of tensors do not compile. In place of an object with a member
/// smp_slice(num_microbatches, microbatch, axis) the body gets what that returns, called on pp_rank() 0 only. Other
/// arguments, and objects that the body captures, reach it as they are. The body runs on pp_rank() 0 only, once per
/// microbatch, on tensors that have shapes but no data; what it calls is recorded and run on the stages.
///
/// The results are on every rank. In place of a tensor that the body returns there is a StepOutput, one tensor per
/// microbatch; in place of a number, string or other object with a Serialiser a std::vector, one entry per microbatch. A
/// std::tuple, pair, vector, array, map or optional of tensors keeps its structure, which must be the same for every
/// microbatch; a struct with smp::Fields comes as a StructOutput.
///
/// Collective over the pipeline (and its replicas): call it on every rank. Arguments of other ranks than pp_rank() 0
/// are ignored. A step that is refused (a batch that microbatches do not divide, an operator that cannot be captured)
/// throws on every rank of the pipeline, with the text of the rank that refused, before any weight or gradient changes.
/// What fails later, while the stages run (an index out of range), ends the job: it throws where it happens, and every
/// other rank's present or next call throws "rank R failed: " and its text, as does every later call of all.
template <class BodyFunction>
Step<std::decay_t<BodyFunction>> step(BodyFunction&& body, StepOptions options = {}) {
  return Step<std::decay_t<BodyFunction>>(std::forward<BodyFunction>(body), std::move(options));
}

/// Graphs that steps have made so far on this rank, each planned and prepared once: one per signature (shapes, types, modes
/// of the module) and structure of a body, and one more per read of a value. A number that grows with every step tells of a
/// program whose shapes or branches never come back: pad them to a few lengths, and see Config::max_cached_graphs. Throws
/// c10::Error before init.
int64_t num_graphs();

}  // namespace smp
