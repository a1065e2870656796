// The parts of random programs: ordinary ones, and those that captures, tapes and pipelines can get wrong.
#include "tests/support/random_program.h"

#include <random>

#include "smp/opaque.h"

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

torch::nn::Linear& next(ProgramNet& net) { return net.linears[net.next_linear++ % net.linears.size()]; }

at::Tensor square_matrix(const at::Tensor& h) { return h.t().mm(h) * 0.1 + torch::eye(kProgramWidth); }

const ForwardPart kPlainParts[] = {
    {"linear", [](ProgramNet& net, const at::Tensor& h) { return next(net)->forward(h); }},
    {"first linear again", [](ProgramNet& net, const at::Tensor& h) { return net.linears[0]->forward(h); }},
    {"relu_", [](ProgramNet& net, const at::Tensor& h) { return next(net)->forward(h).relu_(); }},
    {"tanh", [](ProgramNet&, const at::Tensor& h) { return h.tanh(); }},
    {"skip", [](ProgramNet& net, const at::Tensor& h) { return h + next(net)->forward(h).tanh(); }},
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
    {"cat with empty", [](ProgramNet&, const at::Tensor& h) { return torch::cat({torch::empty({0}), h}, 0); }},
    {"mean",
     [](ProgramNet&, const at::Tensor& h) {
       const at::NoGradGuard no_grad;
       const at::Tensor mean = h.mean(0);
       const at::AutoGradMode with_grad(true);
       return h - mean;
     }},
    {"module state", [](ProgramNet& net, const at::Tensor& h) { return h * (1 + 0.01 * net.calls); }},
};

const ForwardPart kUnusualParts[] = {
    {"reverse by view", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kView>::apply(h); }},
    {"reverse by input", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kInput>::apply(h); }},
    {"reverse by clone", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kClone>::apply(h); }},
    {"reverse by write", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kWrite>::apply(h * 1.0); }},
    {"reverse after relu_", [](ProgramNet&, const at::Tensor& h) { return Reverse<Form::kView>::apply((h * 1.0).relu_()); }},
    {"reverse of a parameter",
     [](ProgramNet& net, const at::Tensor& h) { return h.mm(Reverse<Form::kView>::apply(net.linears[0]->weight)) * 0.2; }},
    {"reverse of a constant", [](ProgramNet&, const at::Tensor& h) { return h + Reverse<Form::kView>::apply(h.detach()); }},
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
       torch::nn::Linear& linear = next(net);
       {
         const at::NoGradGuard no_grad;
         linear->weight.mul_(0.99);
       }
       return linear->forward(h);
     }},
    {"parameter read, then written",
     [](ProgramNet& net, const at::Tensor& h) {
       torch::nn::Linear& linear = next(net);
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
       if (!net.cached.defined()) net.cached = torch::arange(kProgramWidth, at::kFloat) / 8;
       return h * net.cached;
     }},
    {"hidden state",
     [](ProgramNet& net, const at::Tensor& h) {
       const at::Tensor sum = net.hidden.defined() ? h + net.hidden : h;
       net.hidden = sum.detach();
       return sum;
     }},
    {"cholesky", [](ProgramNet& net, const at::Tensor& h) { return h.mm(at::linalg_cholesky(square_matrix(net.x))) * 0.3; }},
    {"unused inverse",
     [](ProgramNet& net, const at::Tensor& h) {
       at::linalg_inv(square_matrix(net.x) - torch::eye(kProgramWidth));
       return h * 1.5;
     }},
    {"unused index_select",
     [](ProgramNet& net, const at::Tensor& h) {
       net.table.index_select(0, net.tokens);
       return h * 0.75;
     }},
    {"data", [](ProgramNet&, const at::Tensor& h) { return h + h.data(); }},
    {"detach_", [](ProgramNet&, const at::Tensor& h) { return h + (h * 2).detach_(); }},
    {"slices of a buffer", [](ProgramNet& net, const at::Tensor& h) { return (h * net.slices[0]).tanh() * net.slices[1]; }},
    {"a buffer of slices", [](ProgramNet& net, const at::Tensor& h) { return h + net.flat.sum() * 0.01; }},
    {"gradient of an activation",
     [](ProgramNet&, const at::Tensor& h) {
       if (!h.requires_grad()) return h;
       const at::Tensor square = h.square().sum();
       const auto gradients = torch::autograd::grad({square}, {h}, {}, true, false, true);
       return gradients[0].defined() ? h + gradients[0] * 0.01 : h;
     }},
};

const BodyPart kBodyParts[] = {
    {"loss read", [](const ProgramRun&, const at::Tensor&,
                     const at::Tensor& loss) { return loss.item<float>() > 1 ? loss * 0.5 : loss; }},
    {"output read",
     [](const ProgramRun&, const at::Tensor& output, const at::Tensor& loss) {
       return output.detach().cpu().select(0, 0).sum().item<float>() > 0 ? loss * 0.5 : loss;
     }},
    {"penalty", [](const ProgramRun& run, const at::Tensor&,
                   const at::Tensor& loss) { return loss + run.net.linears[0]->weight.square().sum() * 1e-3; }},
    {"loss reversed",
     [](const ProgramRun&, const at::Tensor&, const at::Tensor& loss) { return Reverse<Form::kInput>::apply(loss); }},
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
};

template <class Part, size_t size>
const Part& pick(const Part (&parts)[size], std::mt19937_64& random) {
  return parts[random() % size];
}

}  // namespace

std::string Program::describe() const {
  std::string text;
  for (const ForwardPart& part : forward) text += std::string(text.empty() ? "" : ", ") + part.name;
  for (const BodyPart& part : body) text += std::string("; body: ") + part.name;
  if (aliasing == Aliasing::kSame) text += "; x and y are one tensor";
  if (aliasing == Aliasing::kOverlap) text += "; x and y overlap";
  if (writes_argument) text += "; x is written";
  if (bad_step >= 0) text += "; bad arguments in step " + std::to_string(bad_step);
  return text;
}

Program random_program(uint64_t seed) {
  std::mt19937_64 random(seed);
  Program program;
  program.forward.push_back(kPlainParts[0]);
  for (uint64_t left = 4 + random() % 5; left > 0; --left) program.forward.push_back(pick(kPlainParts, random));
  for (uint64_t left = random() % 3; left > 0; --left) {
    const auto at = static_cast<std::ptrdiff_t>(1 + random() % program.forward.size());
    program.forward.insert(program.forward.begin() + at, pick(kUnusualParts, random));
  }
  program.forward.push_back(kPlainParts[0]);
  if (random() % 2 == 0) program.body.push_back(pick(kBodyParts, random));
  if (random() % 8 == 0) program.aliasing = random() % 2 == 0 ? Aliasing::kSame : Aliasing::kOverlap;
  program.writes_argument = random() % 8 == 0;
  if (random() % 4 == 0) program.bad_step = static_cast<int>(random() % kProgramSteps);
  return program;
}

ProgramNet::ProgramNet(const Program& its_program, uint64_t seed) : program(its_program) {
  const at::NoGradGuard no_grad;
  const at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const char* name : {"first", "second", "third", "fourth"}) {
    linears.push_back(register_module(name, torch::nn::Linear(kProgramWidth, kProgramWidth)));
  }
  table = register_parameter("table", torch::empty({10, kProgramWidth}));
  running = register_buffer("running", torch::zeros({kProgramWidth}));
  scale = register_buffer("scale", torch::ones({kProgramWidth}));
  for (at::Tensor& parameter : parameters()) parameter.normal_(0, 0.4, numbers);
  bool has_slices = false;
  for (const ForwardPart& part : program.forward) has_slices |= std::string(part.name).find("slices") != std::string::npos;
  if (!has_slices) return;
  flat = register_buffer("flat", torch::empty({2 * kProgramWidth}).normal_(1, 0.1, numbers));
  for (int i : {0, 1}) {
    slices.push_back(
        register_parameter("slice" + std::to_string(i), flat.detach().narrow(0, i * kProgramWidth, kProgramWidth)));
  }
}

at::Tensor ProgramNet::forward(const std::vector<at::Tensor>& arguments) {
  x = arguments[0], y = arguments[1], tokens = arguments[2];
  ++calls;
  next_linear = 0;
  at::Tensor h = x;
  for (const ForwardPart& part : program.forward) h = part.apply(*this, h);
  return h;
}

std::vector<at::Tensor> program_arguments(const Program& program, int step, int microbatches) {
  const at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(100 + static_cast<uint64_t>(step));
  const int64_t rows = kProgramRows * microbatches;
  at::Tensor base = torch::empty({rows, kProgramWidth + 4}).normal_(0, 1, numbers);
  at::Tensor tokens = torch::empty({rows}).uniform_(0, 10, numbers).to(at::kLong);
  if (step == program.bad_step) {
    base.zero_();  // whose product with itself is singular
    tokens.fill_(99);
  }
  if (program.aliasing == Aliasing::kOverlap)
    return {base.narrow(1, 0, kProgramWidth), base.narrow(1, 4, kProgramWidth), tokens};
  const at::Tensor x = base.narrow(1, 0, kProgramWidth).clone();
  return {x, program.aliasing == Aliasing::kSame ? x : base.narrow(1, 4, kProgramWidth).clone(), tokens};
}

std::vector<at::Tensor> program_microbatch(const Program& program, const std::vector<at::Tensor>& whole, int64_t m) {
  const auto rows_of = [&](const at::Tensor& tensor) { return tensor.narrow(0, m * kProgramRows, kProgramRows); };
  const at::Tensor tokens = rows_of(whole[2]).clone();
  if (program.aliasing != Aliasing::kOverlap) {
    const at::Tensor x = rows_of(whole[0]).clone();
    return {x, program.aliasing == Aliasing::kSame ? x : rows_of(whole[1]).clone(), tokens};
  }
  const at::Tensor base = rows_of(torch::cat({whole[0], whole[1].narrow(1, 4, 4)}, 1)).clone();
  return {base.narrow(1, 0, kProgramWidth), base.narrow(1, 4, kProgramWidth), tokens};
}

std::vector<at::Tensor> run_body(const Program& program, const ProgramRun& run, const std::vector<at::Tensor>& arguments) {
  if (program.writes_argument) at::Tensor(arguments[0]).mul_(0.5);
  const at::Tensor output = run.forward(arguments);
  at::Tensor loss = (output - arguments[1]).square().mean();
  for (const BodyPart& part : program.body) loss = part.apply(run, output, loss);
  run.backward(loss);
  return {loss.detach(), output.detach()};
}

}  // namespace smp::support
