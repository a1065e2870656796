// The C++ side of twins.py: one step of a model without smp, from weights that come in a file.
//
//   smp_peer_twin lm-small GIVEN MADE
//
// GIVEN is torch.save's list of the parameters, in their order, x and y; MADE becomes a tuple of the loss and the gradients.
#include <torch/torch.h>

#include <fstream>
#include <iterator>

#include "benchmarks/measure.h"
#include "benchmarks/peers/models.h"

namespace {

using namespace smp::benchmarks;

constexpr uint64_t kSeed = 7;  // of the dropouts, as in twins.py

std::vector<at::Tensor> read_tensors(const char* path) {
  std::ifstream file(path, std::ios::binary);
  require(file.is_open(), std::string("cannot read ") + path);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const c10::IValue list = torch::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& element : list.toListRef()) tensors.push_back(element.toTensor());
  return tensors;
}

// A tuple, since torch.load knows no typed lists.
void write_tensors(const char* path, const std::vector<at::Tensor>& tensors) {
  const std::vector<char> bytes = torch::pickle_save(c10::ivalue::Tuple::create({tensors.begin(), tensors.end()}));
  std::ofstream file(path, std::ios::binary);
  require(file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush().good(),
          std::string("cannot write ") + path);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  require(argc == 4, "expected a model, a file to read and a file to write");
  const PeerModel model = make_peer_model(argv[1]);
  const std::vector<at::Tensor> parameters = model.net->parameters(), given = read_tensors(argv[2]);
  require(given.size() == parameters.size() + 2, "models.cpp has " + std::to_string(parameters.size()) +
                                                     " parameters, models.py " + std::to_string(given.size() - 2));
  for (size_t i = 0; i < parameters.size(); ++i) {
    require(parameters[i].sizes() == given[i].sizes(), "the sizes of parameter " + std::to_string(i) + " differ");
    parameters[i].set_data(given[i].clone());
  }
  require(model.x.sizes() == given[parameters.size()].sizes(), "the batches differ");
  torch::manual_seed(kSeed);
  const at::Tensor loss = model.loss(model.net->forward(given[parameters.size()]), given.back());
  loss.backward();
  std::vector<at::Tensor> made = {loss.detach()};
  for (const at::Tensor& parameter : parameters) made.push_back(parameter.grad());
  write_tensors(argv[3], made);
}
