// Custom autograd functions in a body: their backward would be lost, so each is refused, whatever its operators look like.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::expect_as_in_a_loop;
using tests::Loop;
using tests::LoopBody;
using tests::SmallNet;
using tests::Texts;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Form = at::Tensor (*)(AutogradContext*, at::Tensor);

at::Tensor view_of(AutogradContext*, at::Tensor x) { return x.view_as(x); }
at::Tensor part_of(AutogradContext*, at::Tensor x) { return x.slice(0, 0, 1); }
at::Tensor itself(AutogradContext*, at::Tensor x) { return x; }
at::Tensor copy_of(AutogradContext*, at::Tensor x) { return x.clone(); }
at::Tensor written(AutogradContext* context, at::Tensor x) {
  x.mul_(2);
  if (context != nullptr) context->mark_dirty({x});
  return x;
}

template <Form kForm>
struct Reversed : torch::autograd::Function<Reversed<kForm>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) { return kForm(context, x); }
  static variable_list backward(AutogradContext*, variable_list gradients) { return {gradients[0].neg()}; }
};

struct WithFactor : torch::autograd::Function<WithFactor> {
  static variable_list forward(AutogradContext*, const at::Tensor& x, int64_t factor) { return {x * factor, x}; }
  static variable_list backward(AutogradContext*, variable_list gradients) { return {gradients[1].neg(), at::Tensor()}; }
};

/// Off: the operators that the function calls, without the function.
template <Form kForm>
at::Tensor reverse(const at::Tensor& x, bool on) {
  if (on) return Reversed<kForm>::apply(x);
  const at::NoGradGuard no_grad;
  const at::Tensor result = kForm(nullptr, x);
  return kForm == itself ? x.view_as(x) : result;
}

struct Place {
  std::string name;
  std::function<at::Tensor(const BodyRun<SmallNet>&, bool on)> body;
};

void PrintTo(const Place& place, std::ostream* out) { *out << place.name; }

template <Form kForm>
at::Tensor of_an_activation(const BodyRun<SmallNet>& run, bool on) {
  const at::Tensor hidden = run.forward(run.data);
  return run.trained(hidden.sum() + reverse<kForm>(hidden, on).sum());
}

template <Form kForm>
at::Tensor after_a_write(const BodyRun<SmallNet>& run, bool on) {
  const at::Tensor hidden = run.forward(run.data).mul_(0.5);
  return run.trained(hidden.sum() + reverse<kForm>(hidden, on).sum());
}

template <Form kForm>
at::Tensor of_the_loss(const BodyRun<SmallNet>& run, bool on) {
  const at::Tensor loss = run.forward(run.data).sum();
  const at::Tensor reversed = reverse<kForm>(loss, on);
  run.backward(on ? reversed : loss);
  return loss;
}

template <Form kForm>
at::Tensor of_a_parameter(const BodyRun<SmallNet>& run, bool on) {
  return run.trained(run.forward(run.data).sum() + reverse<kForm>(run.net.first->weight, on).sum());
}

template <Form kForm>
at::Tensor of_what_is_returned(const BodyRun<SmallNet>& run, bool on) {
  const at::Tensor hidden = run.forward(run.data);
  run.backward(hidden.sum());
  return reverse<kForm>(hidden, on);
}

at::Tensor of_the_base_of_a_view(const BodyRun<SmallNet>& run, bool on) {
  const at::Tensor hidden = run.forward(run.data), view = hidden.view(-1);
  reverse<written>(hidden, on);
  return run.trained(view.sum());
}

at::Tensor of_a_view(const BodyRun<SmallNet>& run, bool on) {
  const at::Tensor hidden = run.forward(run.data);
  reverse<written>(hidden.select(0, 1), on);
  return run.trained(hidden.sum());
}

at::Tensor of_several(const BodyRun<SmallNet>& run, bool on) {
  const at::Tensor hidden = run.forward(run.data);
  variable_list both;
  if (on) {
    both = WithFactor::apply(hidden, 3);
  } else {
    const at::NoGradGuard no_grad;
    both = {hidden * 3, hidden.view_as(hidden)};
  }
  return run.trained(hidden.sum() + both[0].sum() + both[1].sum());
}

std::vector<Place> places() {
  return {{"ViewOfAnActivation", of_an_activation<view_of>},
          {"PartOfAnActivation", of_an_activation<part_of>},
          {"AnActivationItself", of_an_activation<itself>},
          {"CopyOfAnActivation", of_an_activation<copy_of>},
          {"AnActivationWritten", of_an_activation<written>},
          {"ViewAfterAWrite", after_a_write<view_of>},
          {"ItselfAfterAWrite", after_a_write<itself>},
          {"WrittenAfterAWrite", after_a_write<written>},
          {"ViewOfTheLoss", of_the_loss<view_of>},
          {"TheLossItself", of_the_loss<itself>},
          {"TheLossWritten", of_the_loss<written>},
          {"ViewOfAParameter", of_a_parameter<view_of>},
          {"AParameterItself", of_a_parameter<itself>},
          {"ViewReturned", of_what_is_returned<view_of>},
          {"ItselfReturned", of_what_is_returned<itself>},
          {"BaseOfAView", of_the_base_of_a_view},
          {"AView", of_a_view},
          {"SeveralResults", of_several}};
}

class CustomFunction : public testing::TestWithParam<Place> {};

// The second run that calls it is matched: its operators are those of the run before, which did not.
TEST_P(CustomFunction, IsRefusedInTheFirstStepAndInALaterOne) {
  Loop<SmallNet> loop{.ranks = 2, .steps = 6, .config = {.microbatches = 2}};
  loop.refusal = [](int step) {
    if (step % 2 == 1) return Texts();
    return Texts{"custom autograd function (torch::autograd::Function) has put it there", "smp::opaque"};
  };
  expect_as_in_a_loop<SmallNet>(loop,
                                [](const BodyRun<SmallNet>& run) { return GetParam().body(run, /*on=*/run.step % 2 == 0); });
}

INSTANTIATE_TEST_SUITE_P(Places, CustomFunction, testing::ValuesIn(places()),
                         [](const auto& test) { return test.param.name; });

/// Neither a custom function without gradients nor what LibTorch itself does to gradient functions is refused.
class Harmless : public testing::TestWithParam<std::pair<std::string, LoopBody<SmallNet>>> {};

TEST_P(Harmless, RunsAsInALoop) { expect_as_in_a_loop<SmallNet>({.ranks = 2}, GetParam().second); }

std::vector<std::pair<std::string, LoopBody<SmallNet>>> harmless() {
  using Run = BodyRun<SmallNet>;
  return {
      {"WithoutGradMode",
       [](const Run& run) {
         const at::Tensor hidden = run.forward(run.data);
         at::Tensor metric;
         {
           const at::NoGradGuard no_grad;
           metric = Reversed<itself>::apply(hidden).sum();
         }
         return run.trained(hidden.sum() + metric);
       }},
      {"OfWhatNeedsNoGradient",
       [](const Run& run) {
         const at::Tensor data = Reversed<written>::apply(Reversed<itself>::apply(run.data * 2));
         return run.trained(run.forward(Reversed<view_of>::apply(data)).sum());
       }},
      {"ViewsOfWhatIsWritten",
       [](const Run& run) {
         const at::Tensor hidden = run.forward(run.data);
         const at::Tensor row = hidden.select(0, 0), flat = hidden.view(-1);
         hidden.add_(row * 2);
         row.sub_(flat.slice(0, 0, 4));
         const std::string name = flat.grad_fn()->name();
         return run.trained((flat * row.repeat({2})).sum() + hidden.sum());
       }},
      {"PartsOfWhatIsWritten",
       [](const Run& run) {
         const at::Tensor hidden = run.forward(run.data);
         const auto parts = hidden.chunk(2, 1);
         hidden.add_(1);
         const at::NoGradGuard no_grad;
         const at::Tensor metric = parts[0].sum();
         const at::AutoGradMode grad(true);
         return run.trained(hidden.sum() + metric);
       }},
      {"SumsInPlace",
       [](const Run& run) {
         at::Tensor sums = torch::zeros({3, 4});
         const at::Tensor first = sums.select(0, 0);
         const at::Tensor hidden = run.forward(run.data);
         for (int64_t i = 0; i < 2; ++i) sums.select(0, i).add_(hidden.select(0, i));
         at::Tensor apart = hidden * 2;
         apart.detach_();
         return run.trained((sums.sum() + first.sum()) * apart.sum());
       }},
  };
}

INSTANTIATE_TEST_SUITE_P(Bodies, Harmless, testing::ValuesIn(harmless()), [](const auto& test) { return test.param.first; });

}  // namespace
}  // namespace smp
