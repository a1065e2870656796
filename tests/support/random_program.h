// Seeded random training programs of unusual parts: what people write that a capture can get wrong.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp::support {

inline constexpr int64_t kProgramWidth = 8, kProgramRows = 4;  // of one microbatch
inline constexpr int kProgramSteps = 5;                        // of which the last runs from tapes

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
  int bad_step = -1;  // whose arguments make operators throw that look at values

  std::string describe() const;
};
Program random_program(uint64_t seed);

struct ProgramNet : torch::nn::Module {
  explicit ProgramNet(const Program& program, uint64_t seed);
  /// arguments: x and y [rows, 8], tokens [rows] of integers.
  at::Tensor forward(const std::vector<at::Tensor>& arguments);

  const Program& program;
  std::vector<torch::nn::Linear> linears;
  at::Tensor table;                 // [10, 8], a parameter
  at::Tensor running, scale, flat;  // buffers
  std::vector<at::Tensor> slices;   // parameters that lie in `flat`
  at::Tensor x, y, tokens;          // of this run
  at::Tensor cached, hidden;        // kept from run to run, neither parameter nor buffer
  int calls = 0;
  size_t next_linear = 0;
};

/// The arguments of a whole step of `microbatches`, which may share memory.
std::vector<at::Tensor> program_arguments(const Program& program, int step, int microbatches);
/// Those of one microbatch, copied, sharing what the whole ones share.
std::vector<at::Tensor> program_microbatch(const Program& program, const std::vector<at::Tensor>& whole, int64_t m);

/// The body of a step: the model's call, a loss, what the program does with both, the backward. Returns loss and output.
std::vector<at::Tensor> run_body(const Program& program, const ProgramRun& run, const std::vector<at::Tensor>& arguments);

}  // namespace smp::support
