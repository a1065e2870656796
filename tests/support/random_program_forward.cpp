// What programs write in a forward that a capture should take as it is.
#include <sstream>

#include "tests/support/random_program.h"

namespace smp::support {

const std::vector<ForwardPart>& plain_parts() {
  static const std::vector<ForwardPart> parts{
    {"linear", [](ProgramNet& net, const at::Tensor& h) { return net.next()->forward(h); }},
    {"first linear again", [](ProgramNet& net, const at::Tensor& h) { return net.linears[0]->forward(h); }},
    {"relu_", [](ProgramNet& net, const at::Tensor& h) { return net.next()->forward(h).relu_(); }},
    {"tanh", [](ProgramNet&, const at::Tensor& h) { return h.tanh(); }},
    {"skip", [](ProgramNet& net, const at::Tensor& h) { return h + net.next()->forward(h).tanh(); }},
    {"argument y", [](ProgramNet& net, const at::Tensor& h) { return h + net.y * 0.5; }},
    {"write through a view",
     [](ProgramNet&, const at::Tensor& h) {
       at::Tensor copy = h.clone();
       copy.narrow(1, 0, 4).mul_(0.5);
       return copy;
     }},
    {"embedding",
     [](ProgramNet& net, const at::Tensor& h) { return h + torch::embedding(net.table, net.tokens.clamp(0, 9)); }},
    {"index",
     [](ProgramNet&, const at::Tensor& h) {
       using torch::indexing::Slice;
       return h.index({Slice(), torch::tensor({7, 6, 5, 4, 3, 2, 1, 0})});
     }},
    {"cat with empty", [](ProgramNet&, const at::Tensor& h) { return torch::cat({torch::empty({0}, h.options()), h}, 0); }},
    {"mean",
     [](ProgramNet&, const at::Tensor& h) {
       const at::NoGradGuard no_grad;
       const at::Tensor mean = h.mean(0);
       const at::AutoGradMode with_grad(true);
       return h - mean;
     }},
    {"module state", [](ProgramNet& net, const at::Tensor& h) { return h * (1 + 0.01 * net.calls); }},
    {"chunks", [](ProgramNet&, const at::Tensor& h) { return torch::cat({h.chunk(2, 1)[1], h.chunk(2, 1)[0]}, 1); }},
    {"unbind", [](ProgramNet&, const at::Tensor& h) { return torch::stack(h.unbind(1), 1) * 0.75; }},
    {"write through a transpose",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor copy = h.clone();
       copy.t().select(0, 2).mul_(0.5);
       return copy;
     }},
    {"write, then an older view",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor copy = h.clone(), view = copy.view({-1});
       copy.mul_(0.5);
       return view.view_as(h) + h;
     }},
    {"write to a diagonal",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor square = h.t().mm(h).tanh();
       square.diagonal().zero_();
       return h.mm(square) * 0.2;
     }},
    {"index_put_",
     [](ProgramNet& net, const at::Tensor& h) {
       return h.clone().index_put_({net.tokens.remainder(3).abs()}, torch::ones_like(h), true) * 0.5;
     }},
    {"masked_fill_", [](ProgramNet&, const at::Tensor& h) { return h.clone().masked_fill_(h > 1, 0.5); }},
    {"copy_ to one row",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor copy = h.clone();
       copy[0].copy_(h[1]);
       return copy;
     }},
    {"float64 within", [](ProgramNet&, const at::Tensor& h) { return h.to(at::kDouble).sin().to(at::kFloat); }},
    {"bfloat16 within", [](ProgramNet&, const at::Tensor& h) { return h.to(at::kBFloat16).mul(0.5).to(h.dtype()); }},
    {"where", [](ProgramNet&, const at::Tensor& h) { return torch::where(h > 0, h, h * 0.1); }},
    {"largest of a row", [](ProgramNet&, const at::Tensor& h) { return h - std::get<0>(h.max(1, true)); }},
    {"sorted", [](ProgramNet&, const at::Tensor& h) { return h + std::get<0>(h.sort(1)) * 0.1; }},
    {"softmax", [](ProgramNet&, const at::Tensor& h) { return h + h.softmax(1); }},
    {"layer norm", [](ProgramNet&, const at::Tensor& h) { return torch::layer_norm(h, {kProgramWidth}); }},
    {"batch norm", [](ProgramNet& net, const at::Tensor& h) { return net.norm->forward(h); }},
    {"dropout of nothing", [](ProgramNet& net, const at::Tensor& h) { return torch::dropout(h, 0.0, net.is_training()); }},
    {"one hot",
     [](ProgramNet& net, const at::Tensor& h) {
       return h + torch::one_hot(net.tokens.clamp(0, 9), 10).to(h.dtype()).mm(net.table);
     }},
    {"complex",
     [](ProgramNet&, const at::Tensor& h) {
       return torch::view_as_real(torch::fft::rfft(h)).flatten(1).narrow(1, 0, kProgramWidth) * 0.5;
     }},
    {"foreach",
     [](ProgramNet&, const at::Tensor& h) {
       const auto halves = at::_foreach_mul(h.chunk(2, 1), 0.5);
       return torch::cat({halves[0], halves[1]}, 1);
     }},
    {"tokens as numbers", [](ProgramNet& net, const at::Tensor& h) { return h + net.tokens.unsqueeze(1) * 0.01; }},
    {"unused", [](ProgramNet&, const at::Tensor& h) { return h.exp(), h * 1.0; }},
    {"by the number of rows", [](ProgramNet&, const at::Tensor& h) { return h.size(0) > 3 ? h * 0.5 : h + 0.25; }},
    {"by the mode", [](ProgramNet& net, const at::Tensor& h) { return net.is_training() ? h * 0.5 : h; }},
    {"by the host", [](ProgramNet&, const at::Tensor& h) { return (h.cpu() * 0.5).sin().to(h.device()); }},
    {"number of the host", [](ProgramNet&, const at::Tensor& h) { return h * torch::tensor(0.75f); }},
    {"constant of the host", [](ProgramNet&, const at::Tensor& h) { return h + torch::arange(kProgramWidth).to(h) * 0.1; }},
    {"view without gradients",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor written = (h * 1.0).relu_();
       const at::NoGradGuard no_grad;
       const at::Tensor view = written.view_as(written);
       const at::AutoGradMode with_grad(true);
       return view * 0.5 + h;
     }},
    {"nothing but a view without gradients",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor written = (h * 1.0).tanh_();
       const at::NoGradGuard no_grad;
       return written.view_as(written);
     }},
    {"detached", [](ProgramNet&, const at::Tensor& h) { return h.detach(); }},
    {"half detached",
     [](ProgramNet&, const at::Tensor& h) { return torch::cat({h.narrow(1, 0, 4).detach(), h.narrow(1, 4, 4)}, 1); }},
    {"written without gradients",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor copy = h.clone();
       const at::NoGradGuard no_grad;
       copy.select(1, 3).mul_(0.5);
       return copy;
     }},
    {"written by its detach",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor copy = h * 1.0;
       copy.detach().mul_(0.5);
       return copy + h;
     }},
    {"written by the host",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor here = h.cpu().clone();
       here.select(0, 0).mul_(0.5);
       return here.to(h.device());
     }},
    {"view of the host, written",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor here = h.detach().cpu().clone(), view = here.t();
       here.select(0, 0).zero_();
       return h + view.t().to(h.device());
     }},
    {"host and device", [](ProgramNet&, const at::Tensor& h) { return h + (h.cpu() * 0.5).to(h.device()); }},
    {"argument by the host", [](ProgramNet& net, const at::Tensor& h) { return h + (net.y.cpu() * 0.5).to(h.device()); }},
    {"as many as there are",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor here = h.detach().cpu();
       return h * (1 + 0.01 * static_cast<double>(here.masked_select(here > 0).numel()));
     }},
    {"by a pointer", [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor here = h.detach().cpu().contiguous();
       return here.data_ptr<float>()[1] > 0 ? h * 0.5 : h + 0.5;
     }},
    {"mask of the host",
     [](ProgramNet&, const at::Tensor& h) { return torch::where((h.detach().cpu() > 0).to(h.device()), h, h * 0.25); }},
    {"buffer from the host",
     [](ProgramNet& net, const at::Tensor& h) {
       net.running.copy_(h.detach().cpu().mean(0));
       return h + net.running;
     }},
    {"weight by the host",
     [](ProgramNet& net, const at::Tensor& h) {
       const torch::nn::Linear& linear = net.next();
       return torch::linear(h.cpu(), linear->weight.cpu(), linear->bias.cpu()).to(h.device());
     }},
    {"weight read", [](ProgramNet& net, const at::Tensor& h) {
       return net.linears[1]->weight.sum().item<float>() > 0 ? h * 0.5 : h;
     }},
    {"buffer before its write",
     [](ProgramNet& net, const at::Tensor& h) {
       const at::Tensor before = net.running.clone();
       net.running.mul_(0.5).add_(h.detach().mean(0));
       return h + before;
     }},
    {"buffer written twice",
     [](ProgramNet& net, const at::Tensor& h) {
       net.scale.mul_(0.99);
       const at::Tensor once = h * net.scale.clone();
       net.scale.narrow(0, 2, 3).add_(0.01);
       return once + net.scale;
     }},
    {"deviation", [](ProgramNet&, const at::Tensor& h) { return h / (h.std(1, true, true) + 1); }},
    {"product of all", [](ProgramNet&, const at::Tensor& h) { return torch::einsum("ij,kj->ik", {h, h}).mm(h) * 0.05; }},
    {"rolled", [](ProgramNet&, const at::Tensor& h) { return h.roll(3, 1).flip(1).cumsum(1) * 0.3; }},
    {"gather", [](ProgramNet& net, const at::Tensor& h) {
       return h + h.gather(1, net.tokens.remainder(kProgramWidth).abs().unsqueeze(1)) * 0.1;
     }},
    {"scatter_add",
     [](ProgramNet& net, const at::Tensor& h) {
       return h.scatter_add(1, net.tokens.remainder(kProgramWidth).abs().unsqueeze(1), torch::ones_like(h)) * 0.5;
     }},
    {"convolution",
     [](ProgramNet& net, const at::Tensor& h) {
       return torch::conv1d(h.unsqueeze(1), net.table.narrow(0, 0, 3).narrow(1, 0, 3).unsqueeze(1), {}, 1, 1).sum(1) * 0.5;
     }},
    {"larger by half", [](ProgramNet&, const at::Tensor& h) { return h.repeat({2, 1}).unflatten(0, {2, -1}).mean(0); }},
    {"root", [](ProgramNet&, const at::Tensor& h) { return (h.square() + 1).sqrt_(); }},
    {"views of views",
     [](ProgramNet&, const at::Tensor& h) {
       const at::Tensor copy = h.clone(), part = copy.narrow(1, 1, 6), inner = part.narrow(1, 2, 2);
       inner.add_(1);
       part.mul_(0.5);
       return copy + inner.sum() * 0.01;
     }},
    {"out", [](ProgramNet&, const at::Tensor& h) {
       const at::NoGradGuard no_grad;
       at::Tensor out = torch::empty_like(h);
       at::mul_out(out, h, h);
       const at::AutoGradMode with_grad(true);
       return h + out * 0.1;
     }},
    {"print", [](ProgramNet&, const at::Tensor& h) {
       std::ostringstream text;
       text << h.select(0, 0);
       return h * (text.str().size() % 2 == 0 ? 0.5 : 0.75);
     }},
    {"looked at without gradients",
     [](ProgramNet&, const at::Tensor& h) {
       const at::NoGradGuard no_grad;
       (void)h.to(at::kFloat).contiguous().sum();
       return h;
     }},
    {"sum read without gradients",
     [](ProgramNet&, const at::Tensor& h) {
       const at::NoGradGuard no_grad;
       const double sum = h.to(at::kFloat).sum().item<double>();
       const at::AutoGradMode with_grad(true);
       return sum > 0 ? h * 0.5 : h;
     }},
    {"brought to the host without gradients",
     [](ProgramNet&, const at::Tensor& h) {
       const at::NoGradGuard no_grad;
       const bool is_large = h.cpu().sum().item<double>() > 0;
       const at::AutoGradMode with_grad(true);
       return is_large ? h * 0.5 : h;
     }},
    {"sum read in inference mode",
     [](ProgramNet&, const at::Tensor& h) {
       const c10::InferenceMode inference;
       const double sum = h.sum().item<double>();
       const c10::InferenceMode no_inference(false);
       return sum > 0 ? h * 0.5 : h;
     }},
  };
  return parts;
}

}  // namespace smp::support
