// What captures, tapes and pipelines can get wrong, or refuse.
#include "smp/opaque.h"
#include "tests/support/autocast.h"
#include "tests/support/random_program.h"

namespace smp::support {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

/// Gradient reversal, in the forms in which it is written.
enum class Form { kView, kInput, kClone, kWrite };
template <Form form>
struct Reverse : torch::autograd::Function<Reverse<form>> {
  static at::Tensor forward(AutogradContext* context, at::Tensor x) {
    if constexpr (form == Form::kView) return x.view_as(x);
    if constexpr (form == Form::kInput) return x;
    if constexpr (form == Form::kClone) return x.clone();
    x.mul_(2);
    context->mark_dirty({x});
    return x;
  }
  static tensor_list backward(AutogradContext*, tensor_list gradients) { return {gradients[0] * -0.5}; }
};

/// Two results, of which one is the input.
struct Two : torch::autograd::Function<Two> {
  static tensor_list forward(AutogradContext*, at::Tensor x) { return {x, x * 2}; }
  static tensor_list backward(AutogradContext*, tensor_list gradients) { return {gradients[0] + gradients[1] * 3}; }
};

/// Beside the model, made before any program.
struct Teacher {
  at::Tensor mean = torch::linspace(-1, 1, kProgramWidth), variance = torch::linspace(1, 2, kProgramWidth);
  at::Tensor unfrozen =
      torch::linspace(-0.5, 0.5, kProgramWidth* kProgramWidth).view({kProgramWidth, kProgramWidth}).requires_grad_();
};
const Teacher teacher;

at::Tensor square_matrix(const at::Tensor& h) { return h.t().mm(h) * 0.1 + torch::eye(kProgramWidth, h.options()); }

}  // namespace

at::Tensor reverse_by_input(const at::Tensor& x) { return Reverse<Form::kInput>::apply(x); }

const std::vector<ForwardPart>& unusual_parts() {
  static const std::vector<ForwardPart> parts{
      {"reverse by view", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kView>::apply(h); }},
      {"reverse by input", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kInput>::apply(h); }},
      {"reverse by clone", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kClone>::apply(h); }},
      {"reverse by write", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kWrite>::apply(h * 1.0); }},
      {"reverse after relu_",
       [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kView>::apply((h * 1.0).relu_()); }},
      {"reverse of a parameter",
       [](ProgramNet& net, const at::Tensor& h) { return h.mm(Reverse<Form::kView>::apply(net.linears[0]->weight)) * 0.2; }},
      {"reverse of a constant",
       [](ProgramNet&, const at::Tensor& h) { return h + Reverse<Form::kView>::apply(h.detach()); }},
      {"reverse without gradients",
       [](ProgramNet&, const at::Tensor& h) {
         const at::NoGradGuard no_grad;
         const at::Tensor reversed = Reverse<Form::kInput>::apply(h);
         const at::AutoGradMode with_grad(true);
         return h + reversed;
       }},
      {"two results",
       [](ProgramNet&, const at::Tensor& h) {
         const tensor_list two = Two::apply(h);
         return two[0] + two[1] * 0.1;
       }},
      {"opaque reverse",
       [](ProgramNet&, const at::Tensor& h) {
         return opaque([](at::Tensor t) { return Reverse<Form::kClone>::apply(t); }, h);
       }},
      {"buffer written, then read",
       [](ProgramNet& net, const at::Tensor& h) {
         net.running.mul_(0.9).add_(h.detach().mean(0), 0.1);
         return h * (net.running + 1);
       }},
      {"buffer read, then written",
       [](ProgramNet& net, const at::Tensor& h) {
         const at::Tensor scaled = h * net.scale;
         net.scale.mul_(1.01);
         return scaled;
       }},
      {"parameter written, then read",
       [](ProgramNet& net, const at::Tensor& h) {
         torch::nn::Linear& linear = net.next();
         {
           const at::NoGradGuard no_grad;
           linear->weight.mul_(0.99);
         }
         return linear->forward(h);
       }},
      {"parameter read, then written",
       [](ProgramNet& net, const at::Tensor& h) {
         torch::nn::Linear& linear = net.next();
         const at::Tensor output = linear->forward(h);
         const at::NoGradGuard no_grad;
         linear->weight.clamp_(-0.4, 0.4);
         return output;
       }},
      {"embedding with a largest norm",
       [](ProgramNet& net, const at::Tensor& h) {
         namespace F = torch::nn::functional;
         return h + F::embedding(net.tokens.clamp(0, 9), net.table, F::EmbeddingFuncOptions().max_norm(0.5));
       }},
      {"tied output", [](ProgramNet& net, const at::Tensor& h) { return h.mm(net.table.t()).mm(net.table) * 0.1; }},
      {"argument read", [](ProgramNet& net, const at::Tensor& h) { return net.x.sum().item<float>() > 0 ? h * 0.5 : h; }},
      {"activation read", [](ProgramNet&, const at::Tensor& h) { return h.abs().max().item<float>() > 1 ? h * 0.5 : h; }},
      {"cache",
       [](ProgramNet& net, const at::Tensor& h) {
         if (!net.cached.defined()) net.cached = torch::arange(kProgramWidth, h.options()) / 8;
         return h * net.cached;
       }},
      {"hidden state",
       [](ProgramNet& net, const at::Tensor& h) {
         const at::Tensor sum = net.hidden.defined() ? h + net.hidden : h;
         net.hidden = sum.detach();
         return sum;
       }},
      {"cholesky",
       [](ProgramNet& net, const at::Tensor& h) { return h.mm(at::linalg_cholesky(square_matrix(net.x))) * 0.3; }},
      {"unused inverse",
       [](ProgramNet& net, const at::Tensor& h) {
         at::linalg_inv(square_matrix(net.x) - torch::eye(kProgramWidth, h.options()));
         return h * 1.5;
       }},
      {"unused index_select",
       [](ProgramNet& net, const at::Tensor& h) {
         net.table.index_select(0, net.tokens);
         return h * 0.75;
       }},
      {"data", [](ProgramNet&, const at::Tensor& h) { return h + h.data(); }},
      {"detach_", [](ProgramNet&, const at::Tensor& h) { return h + (h * 2).detach_(); }},
      {"slices of a buffer",
       [](ProgramNet& net, const at::Tensor& h) { return (h * net.slices[0]).tanh() * net.slices[1]; }},
      {"a buffer of slices", [](ProgramNet& net, const at::Tensor& h) { return h + net.flat.sum() * 0.01; }},
      {"gradient of an activation",
       [](ProgramNet&, const at::Tensor& h) {
         if (!h.requires_grad()) return h;
         const at::Tensor square = h.square().sum();
         const auto gradients = torch::autograd::grad({square}, {h}, {}, true, false, true);
         return gradients[0].defined() ? h + gradients[0] * 0.01 : h;
       }},
      {"under autocast",
       [](ProgramNet& net, const at::Tensor& h) {
         const Autocast autocast(h.device().type());
         return net.next()->forward(h).to(at::kFloat);
       }},
      {"activation read under autocast",
       [](ProgramNet& net, const at::Tensor& h) {
         const Autocast autocast(h.device().type());
         const at::Tensor product = net.next()->forward(h);
         return (product.abs().max().item<float>() > 1 ? product * 0.5 : product).to(at::kFloat);
       }},
      {"tokens read",
       [](ProgramNet& net, const at::Tensor& h) {
         return h * (1 + 0.1 * static_cast<double>(net.tokens[0].item<int64_t>() % 3));
       }},
      {"buffer read by the host",
       [](ProgramNet& net, const at::Tensor& h) { return h * (1 + 0.1 * net.running.cpu().mean().item<float>()); }},
      {"hook on an activation",
       [](ProgramNet&, const at::Tensor& h) {
         const at::Tensor twice = h * 2;
         if (twice.requires_grad()) twice.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
         return twice;
       }},
      {"activation kept",
       [](ProgramNet& net, const at::Tensor& h) {
         net.cached_activation = h;
         return h * 0.5;
       }},
      {"parameter written, used as a matrix",
       [](ProgramNet& net, const at::Tensor& h) {
         const at::Tensor weight = net.linears[1]->weight;
         {
           const at::NoGradGuard no_grad;
           weight.copy_(weight * 0.99);
         }
         return h.mm(weight) * 0.3;
       }},
      {"overlapping write",
       [](ProgramNet&, const at::Tensor& h) {
         const at::Tensor copy = h.clone();
         copy.narrow(1, 0, 5).add_(copy.narrow(1, 3, 5));
         return copy;
       }},
      {"written behind its use",
       [](ProgramNet&, const at::Tensor& h) {
         const at::Tensor copy = h * 1.0, product = copy * copy;
         copy.add_(1);
         return product + copy;
       }},
      {"inference mode",
       [](ProgramNet&, const at::Tensor& h) {
         at::Tensor mean;
         {
           const c10::InferenceMode inference;
           mean = h.mean();
         }
         return h - mean.clone();
       }},
      {"masked select", [](ProgramNet&, const at::Tensor& h) { return h - h.masked_select(h > 0).sum() * 0.01; }},
      {"as strided",
       [](ProgramNet&, const at::Tensor& h) {
         return torch::cat({h, h}, 1).as_strided({h.size(0), kProgramWidth}, {2 * kProgramWidth, 1}, 4);
       }},
      {"a leaf of its own", [](ProgramNet&, const at::Tensor& h) { return h + h.detach().requires_grad_() * 0.5; }},
      {"detach_ of the host", [](ProgramNet&, const at::Tensor& h) { return h + (h.cpu() * 2).detach_().to(h.device()); }},
      {"hook on the host",
       [](ProgramNet&, const at::Tensor& h) {
         const at::Tensor here = h.cpu() * 2;
         if (here.requires_grad()) here.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
         return here.to(h.device());
       }},
      {"reverse on the host",
       [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kClone>::apply(h.cpu()).to(h.device()); }},
      {"reverse by input on the host",
       [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kInput>::apply(h.cpu()).to(h.device()); }},
      {"reverse by write on the host",
       [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kWrite>::apply(h.cpu() * 1.0).to(h.device()); }},
      {"opaque on the host",
       [](ProgramNet&, const at::Tensor& h) {
         return opaque([](at::Tensor t, at::Tensor there) { return Reverse<Form::kClone>::apply(t).to(there.device()); },
                       h.cpu(), h);
       }},
      {"opaque with gradients of its own",
       [](ProgramNet& net, const at::Tensor& h) {
         return h + opaque(
                        [](at::Tensor t, at::Tensor weight) {
                          const at::Tensor x = t.detach().requires_grad_(), score = torch::linear(x, weight).tanh().sum();
                          return torch::autograd::grad({score}, {x}, {}, true, /*create_graph=*/true)[0] * 0.1;
                        },
                        h, net.linears[1]->weight);
       }},
      {"opaque of what is not zero",
       [](ProgramNet& net, const at::Tensor& h) {
         return opaque(
             [](at::Tensor t, at::Tensor by) {
               TORCH_CHECK((by > 0).all().item<bool>(), "expected positive numbers. Give others");
               return t / by.unsqueeze(1);
             },
             h, net.tokens.abs() + 1);
       }},
      {"teacher in evaluation",
       [](ProgramNet&, const at::Tensor& h) {
         return torch::batch_norm(h, {}, {}, teacher.mean.to(h.device()), teacher.variance.to(h.device()), false, 0.1, 1e-5,
                                  false);
       }},
      {"teacher that is not frozen",
       [](ProgramNet&, const at::Tensor& h) {
         const at::NoGradGuard no_grad;
         const at::Tensor target = h.mm(teacher.unfrozen.to(h.device()));
         const at::AutoGradMode with_grad(true);
         return h - target;
       }},
      {"data of a buffer",
       [](ProgramNet& net, const at::Tensor& h) {
         net.running.set_data(net.running * 0.9 + h.detach().mean(0) * 0.1);
         return h - net.running;
       }},
      {"data of a weight",
       [](ProgramNet& net, const at::Tensor& h) {
         at::Tensor& weight = net.next()->weight;
         weight.set_data(weight.detach().clamp(-0.3, 0.3));
         return h.mm(weight);
       }},
      {"tensor of the host kept",
       [](ProgramNet& net, const at::Tensor& h) {
         const at::Tensor last = net.kept_on_host;
         net.kept_on_host = h.detach().cpu().mean(0);
         return last.defined() ? h + last.to(h.device()) : h;
       }},
      {"tensor of the host with gradients kept",
       [](ProgramNet& net, const at::Tensor& h) {
         const at::Tensor last = net.kept_on_host;
         net.kept_on_host = h.cpu().mean(0);
         return last.defined() ? h + last.to(h.device()) : h;
       }},
      {"foreach in place",
       [](ProgramNet&, const at::Tensor& h) {
         const at::Tensor a = h * 1.0, b = h.tanh();
         at::_foreach_mul_({a, b}, 0.5);
         return a + b;
       }},
      {"foreach on both devices",
       [](ProgramNet&, const at::Tensor& h) {
         const auto twice = at::_foreach_mul({h, h.cpu()}, 0.5);
         return twice[0] + twice[1].to(h.device());
       }},
  };
  return parts;
}

}  // namespace smp::support
