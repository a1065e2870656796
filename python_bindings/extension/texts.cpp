// A table of words: the engine names what its callers in C++ would write. Operators ("aten::add") are the same in both.
#include "python_bindings/extension/texts.h"

#include <regex>
#include <utility>
#include <vector>

namespace smp::python {
namespace {

using Word = std::pair<std::regex, const char*>;

// In this order: whole phrases before what they are made of. Repetitions are bounded: std::regex recurses at each, and the
// texts of a script may be long.
const std::vector<Word>& words() {
  static const std::vector<Word> table{
      {std::regex(R"((at the top of|first in) main\(\))"), "$1 the script"},
      {std::regex(R"(smp::DistributedModel model\(net\);)"), "model = smp.DistributedModel(net)."},
      {std::regex(R"(Wrap the code that calls the model: auto train_step = smp::step\(.{0,400}?\}\);)"),
       "Put the code that calls the model into a function under @smp.step."},
      {std::regex(R"(: auto train_step = smp::step\(.{0,400}?\}\);)"), ", in a function under @smp.step."},
      {std::regex(R"(torch::jit::setFusionStrategy\(\{\}\) at the start of the program)"),
       "torch.jit.set_fusion_strategy([]) at the top of the script"},
      {std::regex("torch::NoGradGuard"), "torch.no_grad()"},
      {std::regex("a std::vector"), "a list"},
      {std::regex(R"(bring what you want to look at to the CPU first: tensor\.cpu\(\))"),
       "look at values by item(), tolist() or numpy(), and put tensors together by torch.stack in place of torch.tensor"},
      {std::regex(R"(smp::clip_grad_norm_\(model, INFINITY\))"), "model.clip_grad_norm_(math.inf)"},
      {std::regex("smp::DelayParamInitialization"), "smp.delay_param_initialization"},
      {std::regex("DataLoaderOptions::drop_last"), "drop_last=True of the DataLoader"},
      {std::regex(R"(sparse=true \(EmbeddingOptions::sparse\(false\)\))"), "sparse=True"},
      {std::regex(R"(StepOptions::(\w{1,64}))"), "$1 of smp.step"},
      {std::regex(R"(Config::(?=\w))"), "the key "},
      {std::regex(R"(\b(DistributedModel|DistributedOptimizer|StepOutput)::)"), "$1."},
      {std::regex("torch::autograd::"), "torch.autograd."},
      {std::regex(R"(\b(smp|torch)::(?=\w))"), "$1."},
      {std::regex("net->"), "net."},
  };
  return table;
}

}  // namespace

std::string in_python(std::string text) {
  if (text.find("::") == std::string::npos && text.find("->") == std::string::npos) return text;
  for (const auto& [cpp, python] : words()) text = std::regex_replace(text, cpp, python);
  return text;
}

void put_in_python(const py::error_already_set& error) {
  const py::object value = error.value();
  const py::tuple args = value.attr("args");
  if (args.size() != 1 || !py::isinstance<py::str>(args[0])) return;
  const std::string own = escaped_text(args[0]), text = in_python(own);
  if (text != own) value.attr("args") = py::make_tuple(text);
}

std::string escaped_text(const py::handle& value) {
  return py::str(value).attr("encode")("utf-8", "backslashreplace").cast<py::bytes>();
}

}  // namespace smp::python
