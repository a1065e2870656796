// What the body of a random program does between the model's call and the backward.
#include "tests/support/autocast.h"
#include "tests/support/random_program.h"

namespace smp::support {

const std::vector<BodyPart>& body_parts() {
  static const std::vector<BodyPart> parts{
      {"loss read", [](const ProgramRun&, const at::Tensor&,
                       const at::Tensor& loss) { return loss.item<float>() > 1 ? loss * 0.5 : loss; }},
      {"output read",
       [](const ProgramRun&, const at::Tensor& output, const at::Tensor& loss) {
         return output.detach().cpu().select(0, 0).sum().item<float>() > 0 ? loss * 0.5 : loss;
       }},
      {"penalty", [](const ProgramRun& run, const at::Tensor&,
                     const at::Tensor& loss) { return loss + run.net.linears[0]->weight.square().sum() * 1e-3; }},
      {"loss reversed", [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return reverse_by_input(loss); }},
      {"two losses",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         run.backward(output.mean());
         return loss;
       }},
      {"model called again",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         return loss + (run.forward({output.detach(), run.net.y, run.net.tokens}) - output).square().mean();
       }},
      {"retain_grad",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         output.retain_grad();
         run.backward(output.mean());
         return output.grad().defined() ? loss + output.grad().sum() : loss;
       }},
      {"gradient penalty",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         const auto gradients = torch::autograd::grad({output.sum()}, {run.net.linears[0]->weight}, {}, true, true, true);
         return gradients[0].defined() ? loss + gradients[0].square().sum() * 0.01 : loss;
       }},
      {"buffer read", [](const ProgramRun& run, const at::Tensor&,
                         const at::Tensor& loss) { return run.net.running.sum().item<float>() > 0 ? loss * 0.5 : loss; }},
      {"loss by the host",
       [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return (loss.cpu() * 0.5).to(loss.device()); }},
      {"loss on the host", [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return loss.cpu() * 0.5; }},
      {"metric read",
       [](const ProgramRun&, const at::Tensor& output, const at::Tensor& loss) {
         const at::NoGradGuard no_grad;
         const float metric = (output > 0).to(at::kFloat).mean().item<float>();
         const at::AutoGradMode with_grad(true);
         return loss * (1 + metric);
       }},
      {"cross entropy",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         return loss + torch::cross_entropy_loss(output, run.net.tokens.clamp(0, kProgramWidth - 1));
       }},
      {"weighted by tokens", [](const ProgramRun& run, const at::Tensor& output,
                                const at::Tensor& loss) { return loss + (output.mean(1) * run.net.tokens).mean() * 0.01; }},
      {"similarity under autocast",
       [](const ProgramRun&, const at::Tensor& output, const at::Tensor& loss) {
         const Autocast autocast(output.device().type());
         return loss + output.mm(output.t()).mean() * 0.01;
       }},
      {"output written",
       [](const ProgramRun&, const at::Tensor& output, const at::Tensor& loss) {
         const at::NoGradGuard no_grad;
         output.detach().mul_(0.5);
         return loss;
       }},
      {"losses added up by the program",
       [](const ProgramRun& run, const at::Tensor&, const at::Tensor& loss) {
         run.net.total += loss.item<double>();
         return loss * (1 + 0.001 * run.net.total);
       }},
      {"loss to a number and back",
       [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) {
         return loss * torch::tensor({loss.item<float>()}).to(loss.device()).sum();
       }},
      {"largest rows", [](const ProgramRun&, const at::Tensor& output,
                          const at::Tensor& loss) { return loss + std::get<0>(output.abs().sum(1).topk(2)).mean() * 0.1; }},
      {"backward twice",
       [](const ProgramRun& run, const at::Tensor&, const at::Tensor& loss) {
         run.backward(loss);
         return loss;
       }},
      {"noise of the host",
       [](const ProgramRun&, const at::Tensor& output, const at::Tensor& loss) {
         const at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(5);
         return loss + (output * torch::empty({kProgramWidth}).normal_(0, 0.1, numbers).to(output.device())).mean();
       }},
      {"output by the host",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         return loss + (output.cpu() - run.net.y.cpu()).abs().mean().to(loss.device());
       }},
      {"loss in place", [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return loss.clone().mul_(0.5); }},
      {"loss of one element", [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return loss.view({1}); }},
      {"loss in float64", [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return loss.to(at::kDouble); }},
      {"loss beside its detach",
       [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return loss.detach() + loss * 0.5; }},
      {"buffer written behind the loss",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         const at::NoGradGuard no_grad;
         run.net.running.mul_(0.9).add_(output.mean(0) * 0.1);
         return loss;
       }},
      {"model called on its output",
       [](const ProgramRun& run, const at::Tensor& output, const at::Tensor& loss) {
         return loss + run.forward({output, run.net.y, run.net.tokens}).square().mean() * 0.1;
       }},
  };
  return parts;
}

}  // namespace smp::support
