// What encoders of the runtime write, and how it is read.
#include "tests/support/runtime_decoders.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>

#include <memory>

#include "partitioner/cost/measured_costs.h"
#include "partitioner/graph/graph_io.h"
#include "partitioner/partition/partition.h"
#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/plan_io.h"
#include "runtime/exchange/boundary.h"
#include "runtime/exchange/state_exchange.h"
#include "runtime/exchange/step_protocol.h"
#include "runtime/exchange/wire.h"
#include "runtime/launch/launch.h"
#include "runtime/stage/stage_values.h"
#include "runtime/watch/peer_processes.h"
#include "tests/support/graph_text.h"
#include "tests/support/plan_cases.h"

namespace smp::support {

using namespace runtime;
using partitioner::Graph;

namespace {

NewProgram new_program() {
  return {.hash = 7, .graph = "graph", .plan = "plan", .constants = {{3, at::ones({2})}, {4, at::scalar_tensor(1.5)}}};
}

/// What a follower does with a program: `graph` and `plan` may come from anywhere.
void take_in(const Graph& graph, std::string_view plan_text) {
  const partitioner::Plan plan = partitioner::deserialise_plan(plan_text, graph);
  check(graph, plan);
  for (int s = 0; s < static_cast<int>(plan.stages.size()); ++s) stage_values(graph, plan, s);
}

// "KEY=VALUE", line by line.
std::optional<std::string> variable_in(std::string_view environment, const std::string& key) {
  const std::string lines = "\n" + std::string(environment) + "\n";
  const size_t at = lines.find("\n" + key + "=");
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + key.size() + 2;
  return lines.substr(begin, lines.find('\n', begin) - begin);
}

}  // namespace

std::string encoded(const at::Tensor& tensor) {
  WireWriter out;
  out.put(tensor);
  return out.take();
}

Decoder tensors() {
  const at::Tensor numbers = at::arange(24, at::kFloat).reshape({2, 3, 4});
  at::Tensor wrapped = at::scalar_tensor(0.1, at::kDouble);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  return {"tensor",
          {encoded(numbers), encoded(numbers.transpose(0, 2)), encoded(numbers.slice(1, 0, 2)), encoded(wrapped),
           encoded(numbers.to(at::kBFloat16)), encoded(numbers.gt(3)), encoded(at::empty({0, 3})),
           encoded(at::ones({1, 5}).t()), encoded(numbers.to(at::kComplexDouble))},
          [](std::string_view bytes) { read_tensor(bytes, "test"); }};
}

Decoder step_messages() {
  StepMessage message{.step_function = 3, .step = 11, .evaluation_step = 12, .num_microbatches = 5};
  message.reduced = {Averaging::kAverages, Averaging::kMakesNone};
  message.settings = {{.prefix = "a.", .num_trainable = 1, .num_parameters = 2}, {.prefix = "b.", .has_hook = true}};
  message.values = {"", "1"};
  message.trains = true;
  message.forgotten = {5, 6};
  message.new_programs = {new_program(), {.hash = 8, .graph = {}, .plan = {}, .constants = {}}};
  message.microbatches.assign(4, {.hash = 7});
  message.microbatches.push_back(
      {.hash = 8,
       .scalars = {{1, 2, true}, {1, 3, int64_t{4}}, {2, 0, 0.5}, {2, 1, std::complex<double>(1, 2)}},
       .constants = {{4, at::scalar_tensor(2.5)}}});
  StepMessage refused{.error = "a batch that microbatches do not divide", .is_value_error = true, .round = Round::kJoined};
  return {"step message", {encode(message), encode(refused), encode(StepMessage{})}, [](std::string_view bytes) {
            decode_step_message(bytes);
          }};
}

Decoder boundaries() {
  const partitioner::TensorSpec spec{.sizes = {4, 3}, .strides = {3, 1}};
  Decoder decoder{"boundary", {}, [spec](std::string_view bytes) {
                    const auto buffer = std::make_shared<MessageBuffer>(static_cast<int64_t>(bytes.size()));
                    bytes.copy(buffer->data(), bytes.size());
                    announced_bytes(*buffer, static_cast<int64_t>(bytes.size()));
                    const at::Tensor tensor = unpack(buffer, static_cast<int64_t>(bytes.size()), spec);
                    if (tensor.defined()) tensor.clone();  // reads all of it
                  }};
  const at::Tensor numbers = at::arange(12, at::kFloat).reshape({4, 3});
  for (const at::Tensor& tensor :
       {numbers, at::arange(12, at::kFloat).reshape({3, 4}).t(), at::ones({3}).expand({4, 3}), at::Tensor()}) {
    BufferPool pool;
    const PackedTensor packed = pack(tensor, max_message_bytes(spec), pool);
    decoder.corpus.emplace_back(packed.buffer->data(), static_cast<size_t>(packed.num_bytes));
  }
  return decoder;
}

Decoder offers() {
  const std::map<std::string, at::Tensor> own{
      {"fc.weight", at::ones({2, 3})}, {"fc.bias", at::ones({3})}, {"steps", at::ones({}, at::kLong)}};
  return {"offers", {StateExchange::encode(own, ""), StateExchange::encode({}, "no file")}, [](std::string_view bytes) {
            StateExchange::decode(bytes);
          }};
}

Decoder graphs() {
  const Graph graph = testing::mlp(2);
  return {"graph", {serialise(graph)}, [plan = serialise(partition(graph, testing::on_ranks(2)))](std::string_view text) {
            const Graph read = partitioner::deserialise_graph(text);
            support::to_text(read);
            take_in(read, plan);
          }};
}

Decoder plans() {
  const auto graph = std::make_shared<const Graph>(testing::mlp(2));
  return {"plan", {serialise(partition(*graph, testing::on_ranks(2)))}, [graph](std::string_view text) {
            take_in(*graph, text);
          }};
}

Decoder costs() {
  return {"costs", {R"({"aten::relu Float[2|1]":[1.5,2.5],"averaging":3.5})", "{}"}, [](std::string_view text) {
            partitioner::MeasuredCosts().add_json(text);
          }};
}

Decoder processes() {
  return {
      "process", {this_process().serialised()}, [](std::string_view text) { ProcessIdentity::parse(std::string(text)); }};
}

Decoder launches() {
  return {"launch",
          {"OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2",
           "MASTER_ADDR=a\nRANK=1\nWORLD_SIZE=2\nLOCAL_RANK=0\nLOCAL_WORLD_SIZE=1\nMASTER_PORT=29500",
           "PMIX_RANK=1\nSLURM_NODEID=1\nSLURM_STEP_TASKS_PER_NODE=2(x3),1\nSLURM_LOCALID=0\nSLURM_STEP_NUM_TASKS=7\n"
           "SLURM_PROCID=2"},
          [](std::string_view text) { detect_launch([&](const char* name) { return variable_in(text, name); }); }};
}

std::vector<Decoder> runtime_decoders() {
  return {tensors(), step_messages(), boundaries(), offers(), graphs(), plans(), costs(), processes(), launches()};
}

}  // namespace smp::support
