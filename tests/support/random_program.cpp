// Which parts a random program has, its net and its arguments.
#include "tests/support/random_program.h"

#include <algorithm>
#include <optional>
#include <random>

#include "runtime/device/device.h"
#include "smp/activation_checkpointing.h"

namespace smp::support {
namespace {

template <class Part>
const Part& pick(const std::vector<Part>& parts, std::mt19937_64& random) {
  return parts[random() % parts.size()];
}

}  // namespace

std::string Program::describe() const {
  std::string text;
  for (const ForwardPart& part : forward) text += std::string(text.empty() ? "" : ", ") + part.name;
  for (const BodyPart& part : body) text += std::string("; body: ") + part.name;
  if (aliasing == Aliasing::kSame) text += "; x and y are one tensor";
  if (aliasing == Aliasing::kOverlap) text += "; x and y overlap";
  if (writes_argument) text += "; x is written";
  if (arguments_on_host) text += "; arguments on the host";
  if (changes_rows) text += "; changes its rows";
  if (accumulates) text += "; accumulates";
  if (evaluates) text += "; evaluates";
  if (has_momentum) text += "; momentum";
  for (size_t i = 0; i < forward.size(); ++i) {
    if (runs_again(i)) text += std::string("; runs again: ") + forward[i].name;
  }
  if (bad_step >= 0) text += "; bad arguments in step " + std::to_string(bad_step);
  return text;
}

Program random_program(uint64_t seed) {
  std::mt19937_64 random(seed);
  Program program;
  program.forward.push_back(plain_parts()[0]);
  for (uint64_t left = 4 + random() % 5; left > 0; --left) program.forward.push_back(pick(plain_parts(), random));
  for (uint64_t left = random() % 3; left > 0; --left) {
    const auto at = static_cast<std::ptrdiff_t>(1 + random() % program.forward.size());
    program.forward.insert(program.forward.begin() + at, pick(unusual_parts(), random));
  }
  program.forward.push_back(plain_parts()[0]);
  if (random() % 2 == 0) program.body.push_back(pick(body_parts(), random));
  if (random() % 8 == 0) program.aliasing = random() % 2 == 0 ? Aliasing::kSame : Aliasing::kOverlap;
  program.writes_argument = random() % 8 == 0;
  if (random() % 4 == 0) program.bad_step = static_cast<int>(random() % kProgramSteps);
  program.arguments_on_host = random() % 2 == 0;
  program.changes_rows = random() % 4 == 0;
  program.accumulates = random() % 3 == 0;
  program.evaluates = random() % 4 == 0;
  program.has_momentum = random() % 2 == 0;
  program.run_again = random() % 2 == 0 ? random() : 0;
  return program;
}

ProgramNet::ProgramNet(const Program& its_program, uint64_t seed, const at::Device& device) : program(its_program) {
  const at::NoGradGuard no_grad;
  const at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const char* name : {"first", "second", "third", "fourth"}) {
    linears.push_back(register_module(name, torch::nn::Linear(kProgramWidth, kProgramWidth)));
  }
  table = register_parameter("table", torch::empty({10, kProgramWidth}));
  running = register_buffer("running", torch::zeros({kProgramWidth}));
  scale = register_buffer("scale", torch::ones({kProgramWidth}));
  for (at::Tensor& parameter : parameters()) parameter.normal_(0, 0.4, numbers);
  to(device);
  running = named_buffers()["running"], scale = named_buffers()["scale"];
  if (std::none_of(program.forward.begin(), program.forward.end(),
                   [](const ForwardPart& part) { return std::string(part.name).find("slices") != std::string::npos; })) {
    return;
  }
  flat = register_buffer("flat", torch::empty({2 * kProgramWidth}).normal_(1, 0.1, numbers).to(device));
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
  for (size_t i = 0; i < program.forward.size(); ++i) {
    std::optional<ActivationCheckpointingGuard> again;
    if (program.runs_again(i)) again.emplace();
    h = program.forward[i].apply(*this, h);
  }
  return h;
}

std::vector<at::Tensor> program_arguments(const Program& program, int step, int64_t microbatches, const at::Device& device) {
  const at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(100 + static_cast<uint64_t>(step));
  const int64_t rows = (program.changes_rows && step % 3 == 1 ? 3 : 4) * microbatches;
  at::Tensor base = torch::empty({rows, kProgramWidth + 4}).normal_(0, 1, numbers);
  at::Tensor tokens = torch::empty({rows}).uniform_(0, 10, numbers).to(at::kLong);
  if (step == program.bad_step) {
    base.zero_();  // whose product with itself is singular
    // A GPU computes nothing more behind an index out of range.
    if (runtime::this_ranks_device().type == runtime::host().type) tokens.fill_(99);
  }
  base = base.to(device), tokens = tokens.to(device);
  if (program.aliasing == Aliasing::kOverlap)
    return {base.narrow(1, 0, kProgramWidth), base.narrow(1, 4, kProgramWidth), tokens};
  const at::Tensor x = base.narrow(1, 0, kProgramWidth).clone();
  return {x, program.aliasing == Aliasing::kSame ? x : base.narrow(1, 4, kProgramWidth).clone(), tokens};
}

std::vector<at::Tensor> program_microbatch(const Program& program, const std::vector<at::Tensor>& whole, int64_t m,
                                           int64_t microbatches) {
  const auto rows_of = [&](const at::Tensor& tensor) { return tensor.chunk(microbatches)[static_cast<size_t>(m)]; };
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

std::vector<at::Tensor> evaluate_body(const ProgramRun& run, const std::vector<at::Tensor>& arguments) {
  const at::NoGradGuard no_grad;
  const at::Tensor output = run.forward(arguments);
  return {(output - arguments[1]).square().mean(), output};
}

}  // namespace smp::support
