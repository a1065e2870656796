// Seeded random training programs of unusual parts: what people write that a capture can get wrong.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp::support {

inline constexpr int64_t kProgramWidth = 8;
inline constexpr int kProgramSteps = 8;  // of which the last run from tapes, and those from CUDA graphs

struct ProgramNet;

/// One microbatch of a step, in a plain loop or in a step body.
struct ProgramRun {
  ProgramNet& net;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> forward;  // the net, or the model around it
  std::function<void(const at::Tensor&)> backward;
};

/// What the two arguments x and y of a step have in common.
enum class Aliasing { kNone, kSame, kOverlap };

struct ForwardPart {
  const char* name;
  at::Tensor (*apply)(ProgramNet&, const at::Tensor& h);
};
struct BodyPart {
  const char* name;
  at::Tensor (*apply)(const ProgramRun&, const at::Tensor& output, const at::Tensor& loss);  // before the backward
};

/// Decided by its seed alone.
struct Program {
  std::vector<ForwardPart> forward;
  std::vector<BodyPart> body;
  Aliasing aliasing = Aliasing::kNone;
  bool writes_argument = false;
  bool arguments_on_host = false;  // what the step is given; a plain loop has them on the device
  bool changes_rows = false;       // from step to step
  bool accumulates = false;        // the gradients of two steps
  bool evaluates = false;          // between steps, by a body of its own
  bool has_momentum = false;
  uint64_t run_again = 0;  // by bit: parts of the forward that are activation checkpoints
  bool runs_again(size_t part) const { return ((run_again >> (part % 64)) & 1) != 0; }
  int bad_step = -1;  // whose arguments make operators throw that look at values

  std::string describe() const;
};
Program random_program(uint64_t seed);

// What programs are made of: what a capture should take as it is, and what it may refuse.
const std::vector<ForwardPart>& plain_parts();
const std::vector<ForwardPart>& unusual_parts();
const std::vector<BodyPart>& body_parts();
/// Reverses the gradient.
at::Tensor reverse_by_input(const at::Tensor& x);

struct ProgramNet : torch::nn::Module {
  ProgramNet(const Program& program, uint64_t seed, const at::Device& device = at::kCPU);
  /// arguments: x and y [rows, 8], tokens [rows] of integers.
  at::Tensor forward(const std::vector<at::Tensor>& arguments);

  torch::nn::Linear& next() { return linears[next_linear++ % linears.size()]; }

  const Program& program;
  std::vector<torch::nn::Linear> linears;
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(kProgramWidth));
  at::Tensor table;                 // [10, 8], a parameter
  at::Tensor running, scale, flat;  // buffers
  std::vector<at::Tensor> slices;   // parameters that lie in `flat`
  at::Tensor x, y, tokens;          // of this run
  at::Tensor cached, hidden;        // kept from run to run, neither parameter nor buffer
  at::Tensor kept_on_host;
  at::Tensor cached_activation;  // kept, and never used
  int calls = 0;
  double total = 0;  // of what the body has read
  size_t next_linear = 0;
};

/// The arguments of a whole step of `microbatches`, which may share memory.
std::vector<at::Tensor> program_arguments(const Program& program, int step, int64_t microbatches, const at::Device& device);
/// Those of one microbatch, copied, sharing what the whole ones share.
std::vector<at::Tensor> program_microbatch(const Program& program, const std::vector<at::Tensor>& whole, int64_t m,
                                           int64_t microbatches);

/// The body of a step in training: the model's call, a loss, what the program does with both, the backward. Returns loss and
/// output.
std::vector<at::Tensor> run_body(const Program& program, const ProgramRun& run, const std::vector<at::Tensor>& arguments);
/// In evaluation mode, without gradients. Returns loss and output.
std::vector<at::Tensor> evaluate_body(const ProgramRun& run, const std::vector<at::Tensor>& arguments);

}  // namespace smp::support
