// What is recorded of a body on ghosts against what its run on real tensors calls, operator by operator.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/arguments.h"
#include "runtime/capture/body_capture.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/places.h"
#include "runtime/device/random.h"
#include "runtime/libtorch/boxed_tensors.h"
#include "runtime/libtorch/tensor_spec.h"
#include "tests/support/model_zoo.h"

namespace smp::runtime {
namespace {

using partitioner::Graph;
using partitioner::Node;
using partitioner::TensorSpec;
using partitioner::Value;
using partitioner::ValueId;
using partitioner::ValueKind;

Bindings names_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> named;
  for (const auto& item : module.named_parameters()) named.push_back({ValueKind::kParameter, item.key(), item.value()});
  for (const auto& item : module.named_buffers()) named.push_back({ValueKind::kBuffer, item.key(), item.value()});
  return Bindings(std::move(named));
}

/// The graph of a run on real tensors: a value for each tensor, numbered as they appear. Knows no rules and refuses nothing.
class RealRun : public Interceptor {
 public:
  RealRun(const Bindings& bindings, const std::vector<at::Tensor>& inputs) : bindings_(bindings) {
    for (const at::Tensor& input : inputs) {
      const std::string name = "input." + std::to_string(graph.inputs.size());
      graph.inputs.push_back(add(input, {.kind = ValueKind::kInput, .name = name}));
    }
  }

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const OperatorInfo& info = operator_info(op);
    // Whether two names are of one tensor: a question, and no operator of a graph.
    if (info.name == "aten::equal") return pass_on(*this, op, stack);
    Node node{.op = info.name, .overload = info.overload, .grad_enabled = at::GradMode::is_enabled()};
    node.autocast = current_autocast();
    if (info.is_random) node.random_ordinal = num_random_++;
    const auto* arguments = &stack.end()[-info.num_arguments];
    for (int64_t i = 0; i < info.num_arguments; ++i) {
      node.arguments.push_back(to_argument(arguments[i], [this](const at::Tensor& x) { return value_of(x); }, info.name));
    }
    pass_on(*this, op, stack);
    const auto producer = static_cast<partitioner::NodeId>(graph.nodes.size());
    for (auto result = stack.end() - static_cast<ptrdiff_t>(info.returned_argument.size()); result != stack.end();
         ++result) {
      map_tensors(*result, [&](const at::Tensor& made) {
        node.outputs.push_back(add(made, {.producer = producer}));
        return made;
      });
    }
    graph.nodes.push_back(std::move(node));
  }

  Graph graph;

 private:
  ValueId value_of(const at::Tensor& tensor) {
    if (const auto known = values_.find(tensor.unsafeGetTensorImpl()); known != values_.end()) return known->second;
    if (const NamedTensor* named = bindings_.find(tensor)) return add(tensor, {.kind = named->kind, .name = named->name});
    return add(tensor, {.kind = ValueKind::kConstant});
  }
  ValueId add(const at::Tensor& tensor, Value value) {
    const auto id = static_cast<ValueId>(graph.values.size());
    value.spec = spec_of(tensor);
    value.storage = storages_.emplace(storage_of(tensor), id).first->second;
    graph.values.push_back(std::move(value));
    values_.insert_or_assign(tensor.unsafeGetTensorImpl(), id);
    addresses_.push_back(weak(tensor));
    held_.push_back(tensor.storage());
    return id;
  }

  const Bindings& bindings_;
  std::unordered_map<const c10::TensorImpl*, ValueId> values_;
  std::unordered_map<const c10::StorageImpl*, ValueId> storages_;
  // No address comes twice. Only weakly: LibTorch goes on with a tensor that nobody else holds, and copies others.
  std::vector<WeakTensor> addresses_;
  std::vector<c10::Storage> held_;
  int32_t num_random_ = 0;
};

Graph real_graph(const support::ZooModel& model, torch::nn::Module& module, const std::vector<at::Tensor>& inputs) {
  const Bindings bindings = names_of(module);
  RealRun run(bindings, inputs);
  const InterceptScope scope(run);
  model.body(module, inputs);
  return run.graph;
}

Graph ghost_graph(const support::ZooModel& model, torch::nn::Module& module, const std::vector<at::Tensor>& inputs) {
  const Bindings bindings = names_of(module);
  BodyCapture capture(bindings);
  const std::vector<at::Tensor> ghosts = capture.begin(inputs, "");
  support::BodyResult result;
  {
    const InterceptScope scope(capture);
    result = model.body(module, ghosts);
  }
  return capture.finish({result.loss}).recording->graph;
}

/// The first value on the same memory: two graphs number memory in ways of their own.
std::vector<ValueId> aliases_of(const Graph& graph) {
  std::map<int32_t, ValueId> first;
  std::vector<ValueId> aliases;
  for (size_t id = 0; id < graph.values.size(); ++id) {
    aliases.push_back(first.emplace(graph.values[id].storage, static_cast<ValueId>(id)).first->second);
  }
  return aliases;
}

void expect_same(const Graph& ghosts, const Graph& real) {
  for (size_t n = 0; n < std::min(ghosts.nodes.size(), real.nodes.size()); ++n) {
    const Node& got = ghosts.nodes[n];
    const Node& want = real.nodes[n];
    const std::string place = "operator " + std::to_string(n) + ", " + want.op;
    ASSERT_EQ(got.op + "." + got.overload, want.op + "." + want.overload) << place;
    ASSERT_EQ(got.arguments.size(), want.arguments.size()) << place;
    for (size_t i = 0; i < got.arguments.size(); ++i) {
      ASSERT_TRUE(partitioner::same_argument(got.arguments[i], want.arguments[i])) << place << ", argument " << i;
    }
    ASSERT_EQ(got.outputs, want.outputs) << place;
    ASSERT_EQ(got.grad_enabled, want.grad_enabled) << place;
    ASSERT_EQ(got.autocast, want.autocast) << place;
    ASSERT_EQ(got.random_ordinal, want.random_ordinal) << place;
  }
  EXPECT_EQ(ghosts.nodes.size(), real.nodes.size());
  ASSERT_EQ(ghosts.values.size(), real.values.size());
  for (size_t id = 0; id < real.values.size(); ++id) {
    const Value& got = ghosts.values[id];
    const Value& want = real.values[id];
    const std::string place = "value " + std::to_string(id) + " " + got.name;
    EXPECT_EQ(got.kind, want.kind) << place;
    EXPECT_EQ(got.spec, want.spec) << place;
    EXPECT_EQ(got.producer, want.producer) << place;
    if (partitioner::is_named(want)) {
      EXPECT_EQ(got.name, want.name);
    }
  }
  EXPECT_EQ(aliases_of(ghosts), aliases_of(real));
}

class ZooRecording : public ::testing::TestWithParam<support::ZooModel> {};

TEST_P(ZooRecording, EqualsTheRealRunOperatorByOperator) {
  for (const bool training : {true, false}) {
    SCOPED_TRACE(training ? "training" : "evaluation");
    const auto module = GetParam().make(1);
    module->train(training);
    const at::AutoGradMode grad_mode(training);
    const UserRandomStateScope user;
    const std::vector<at::Tensor> inputs = GetParam().make_inputs(5, 1);
    const Graph real = real_graph(GetParam(), *module, inputs);
    expect_same(ghost_graph(GetParam(), *module, inputs), real);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ZooRecording, ::testing::ValuesIn(support::model_zoo()),
                         [](const auto& model) { return model.param.name; });

}  // namespace
}  // namespace smp::runtime
