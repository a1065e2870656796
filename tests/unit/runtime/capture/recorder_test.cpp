// A recorder alone: which values a body's tensors are, on whose memory they lie, and what names the place of a refusal.
#include "runtime/capture/recorder.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>

#include "runtime/capture/interceptor.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

using partitioner::Argument;
using partitioner::Graph;
using partitioner::Node;
using partitioner::NodeId;
using partitioner::Value;
using partitioner::ValueId;
using partitioner::ValueKind;
using partitioner::ValueRef;
using support::contains;

class RecordedBody : public ::testing::Test {
 protected:
  using Recorded = std::function<at::Tensor(const at::Tensor& argument)>;

  std::shared_ptr<Recording> recorded(const Recorded& body, std::vector<at::Tensor>* ghosts = nullptr) {
    Recorder recorder(bindings_, begin_ghost_run());
    const std::vector<at::Tensor> inputs = recorder.start({torch::ones({4, 8})});
    if (ghosts != nullptr) *ghosts = inputs;
    at::Tensor returned;
    {
      const InterceptScope scope(recorder);
      returned = body(inputs[0]);
    }
    return recorder.finish({recorder.value_of(returned, "the result")}, "key");
  }
  std::string refusal(const Recorded& body) {
    return support::message_of<c10::Error>([&] { recorded(body); });
  }

  at::Tensor weight_ = torch::ones({8, 8}).requires_grad_();
  at::Tensor mean_ = torch::zeros({8});
  at::Tensor scale_ = torch::ones({8}).requires_grad_();
  const Bindings bindings_{{{ValueKind::kParameter, "encoder.fc.weight", weight_},
                            {ValueKind::kBuffer, "encoder.norm.mean", mean_},
                            {ValueKind::kParameter, "scale", scale_}}};
};

std::vector<std::string> names_of_operators(const Graph& graph) {
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) names.push_back(node.op);
  return names;
}

ValueId argument_of(const Graph& graph, NodeId n, size_t position) {
  return std::get<ValueRef>(graph.nodes.at(static_cast<size_t>(n)).arguments.at(position)).id;
}
const Value& value_in(const Graph& graph, ValueId id) { return graph.values.at(static_cast<size_t>(id)); }

TEST_F(RecordedBody, ValuesAreNumberedInOrderOfAppearance) {
  const auto recording = recorded([&](const at::Tensor& x) { return x.mm(weight_).add(mean_); });
  const Graph& graph = recording->graph;
  EXPECT_EQ(names_of_operators(graph), (std::vector<std::string>{"aten::mm", "aten::add"}));
  std::vector<std::string> names;
  for (const Value& value : graph.values) names.push_back(value.name);
  EXPECT_EQ(names, (std::vector<std::string>{"input.0", "encoder.fc.weight", "", "encoder.norm.mean", ""}));
  EXPECT_EQ(graph.inputs, std::vector<ValueId>{0});
  EXPECT_EQ(graph.returned, std::vector<ValueId>{4});
  EXPECT_EQ(graph.key, "key");
  EXPECT_EQ(value_in(graph, 3).kind, ValueKind::kBuffer);
  EXPECT_TRUE(value_in(graph, 1).spec.requires_grad && value_in(graph, 4).spec.requires_grad &&
              !value_in(graph, 3).spec.requires_grad);
  EXPECT_TRUE(recording->tensors[1].is_same(weight_) && recording->tensors[3].is_same(mean_));
}

TEST_F(RecordedBody, OneTensorIsOneValueHoweverOftenItIsUsed) {
  const auto recording = recorded([&](const at::Tensor& x) { return x.mm(weight_).mm(weight_).mul(x); });
  EXPECT_EQ(argument_of(recording->graph, 0, 1), argument_of(recording->graph, 1, 1));
  EXPECT_EQ(argument_of(recording->graph, 2, 1), 0);
  EXPECT_EQ(recording->graph.values.size(), 5U);
}

TEST_F(RecordedBody, ViewsLieOnTheMemoryOfTheirBaseAndNewTensorsOnTheirOwn) {
  const Graph graph = recorded([&](const at::Tensor& x) { return x.mm(weight_.t()).select(0, 1).mul(2); })->graph;
  const auto memory_of_result = [&](NodeId n) {
    return value_in(graph, graph.nodes.at(static_cast<size_t>(n)).outputs[0]).storage;
  };
  EXPECT_EQ(names_of_operators(graph), (std::vector<std::string>{"aten::t", "aten::mm", "aten::select", "aten::mul"}));
  EXPECT_EQ(memory_of_result(0), value_in(graph, argument_of(graph, 0, 0)).storage);
  EXPECT_NE(memory_of_result(1), memory_of_result(0));
  EXPECT_EQ(memory_of_result(2), memory_of_result(1));
  EXPECT_NE(memory_of_result(3), memory_of_result(2));
}

TEST_F(RecordedBody, AWriteInPlaceMakesANewValueOfTheSameTensorOnTheSameMemory) {
  const auto recording = recorded([&](const at::Tensor& x) {
    at::Tensor y = x.mul(2);
    const at::Tensor row = y.select(0, 0);
    y.add_(1);
    return y.mul(row);
  });
  const Graph& graph = recording->graph;
  const ValueId before = graph.nodes[0].outputs[0], row = graph.nodes[1].outputs[0], after = graph.nodes[2].outputs[0];
  EXPECT_NE(after, before);
  EXPECT_EQ(value_in(graph, after).storage, value_in(graph, before).storage);
  EXPECT_EQ(graph.nodes[2].written_storages, std::vector<int32_t>{value_in(graph, before).storage});
  EXPECT_EQ(recording->same_impl[static_cast<size_t>(after)], before);
  EXPECT_EQ(recording->same_impl[static_cast<size_t>(row)], row) << "a view is a tensor of its own";
  EXPECT_EQ(argument_of(graph, 3, 0), after);
  EXPECT_EQ(argument_of(graph, 3, 1), row);
}

TEST_F(RecordedBody, AWriteToABufferIsOneOfTheModel) {
  const Graph graph = recorded([&](const at::Tensor& x) {
                        const at::NoGradGuard no_grad;
                        mean_.add_(x.mean(0));
                        return x.add(mean_);
                      })->graph;
  EXPECT_EQ(graph.nodes[1].written_storages.size(), 1U);
  const ValueId read = argument_of(graph, 2, 1);
  EXPECT_EQ(read, graph.nodes[1].outputs[0]) << "what is read is the content after the write";
  EXPECT_FALSE(graph.nodes[1].grad_enabled);
  EXPECT_EQ(mean_.sum().item<float>(), 0) << "nothing has run";
}

TEST_F(RecordedBody, AliasesMadeBehindTheDispatcherBecomeOperators) {
  const auto recording = recorded([&](const at::Tensor& x) {
    const at::Tensor y = x.mul(2);
    return y.variable_data().mm(weight_.variable_data());
  });
  const Graph& graph = recording->graph;
  EXPECT_EQ(names_of_operators(graph), (std::vector<std::string>{"aten::mul", "aten::detach", "aten::as_strided",
                                                                 "aten::detach", "aten::as_strided", "aten::mm"}));
  std::vector<bool> synthesised;
  for (const RecordedCall& call : recording->calls) synthesised.push_back(call.synthesised);
  EXPECT_EQ(synthesised, (std::vector<bool>{false, true, true, true, true, false}));
  EXPECT_EQ(value_in(graph, argument_of(graph, 5, 0)).storage, value_in(graph, graph.nodes[0].outputs[0]).storage);
  const ValueId weight = argument_of(graph, 3, 0);
  EXPECT_EQ(value_in(graph, weight).name, "encoder.fc.weight");
  EXPECT_EQ(value_in(graph, argument_of(graph, 5, 1)).storage, value_in(graph, weight).storage);
  EXPECT_FALSE(value_in(graph, argument_of(graph, 5, 1)).spec.requires_grad);
}

TEST_F(RecordedBody, AnythingElseIsAConstantWithACopyOfItsContent) {
  const at::Tensor constant = torch::full({8}, 3.0), expanded = torch::ones({1}).expand({8});
  const auto recording = recorded([&](const at::Tensor& x) { return x.add(constant).mul(constant).add(expanded); });
  const Graph& graph = recording->graph;
  ASSERT_EQ(recording->constants.size(), 2U);
  EXPECT_EQ(argument_of(graph, 0, 1), argument_of(graph, 1, 1));
  EXPECT_EQ(value_in(graph, argument_of(graph, 0, 1)).name, "constant.0");
  EXPECT_EQ(value_in(graph, argument_of(graph, 0, 1)).kind, ValueKind::kConstant);
  EXPECT_TRUE(recording->constants[0].content.equal(constant) && !recording->constants[0].content.is_alias_of(constant));
  EXPECT_EQ(value_in(graph, argument_of(graph, 2, 1)).spec.strides, std::vector<int64_t>{1}) << "a dense copy travels";
}

TEST_F(RecordedBody, NumbersStayNumbersAndWrappedOnesStayWrapped) {
  at::Tensor wrapped = torch::scalar_tensor(0.5, torch::kDouble);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  const Graph graph = recorded([&](const at::Tensor& x) { return x.mul(wrapped).add(x, 3); })->graph;
  EXPECT_TRUE(value_in(graph, argument_of(graph, 0, 1)).is_wrapped_number);
  EXPECT_EQ(value_in(graph, graph.nodes[0].outputs[0]).spec.dtype, at::kFloat)
      << "a tensor of doubles would have made doubles";
  EXPECT_EQ(std::get<int64_t>(graph.nodes[1].arguments[2]), 3);
}

TEST_F(RecordedBody, RandomOperatorsAreCountedAndOthersAreNot) {
  const Graph graph =
      recorded([&](const at::Tensor& x) { return torch::dropout(torch::dropout(x, 0.5, true).mul(2), 0.5, true); })->graph;
  std::vector<int32_t> ordinals;
  for (const Node& node : graph.nodes) ordinals.push_back(node.random_ordinal);
  EXPECT_EQ(ordinals, (std::vector<int32_t>{0, -1, 1}));
}

TEST_F(RecordedBody, OperatorsAreOfTheModuleWhoseTensorWasUsedLast) {
  const Graph graph =
      recorded([&](const at::Tensor& x) { return x.relu().mm(weight_).relu().add(mean_).mul(scale_); })->graph;
  std::vector<std::string> modules;
  for (const Node& node : graph.nodes) modules.push_back(node.module);
  EXPECT_EQ(modules, (std::vector<std::string>{"", "encoder.fc", "encoder.fc", "encoder.norm", ""}));
}

TEST_F(RecordedBody, RefusalsNameOperatorAndModule) {
  EXPECT_TRUE(contains(refusal([&](const at::Tensor& x) { return x.mm(weight_).nonzero(); }),
                       "aten::nonzero, in or after module 'encoder.fc': the shape"));
  EXPECT_TRUE(contains(refusal([&](const at::Tensor& x) { return x.mul(scale_).masked_select(x); }),
                       "aten::masked_select, in or after the root module: "));
  EXPECT_TRUE(
      contains(refusal([](const at::Tensor& x) { return x.nonzero(); }), "aten::nonzero, before any parameter was used: "));
}

TEST_F(RecordedBody, WhatNoGraphHoldsIsRefusedBeforeLibTorchSaysSo) {
  const at::Tensor lengths = torch::tensor({8, 8, 8, 8});
  const std::string from_data = "the shape of its result depends on data";
  const std::tuple<Recorded, std::string, std::string> bodies[] = {
      {[&](const at::Tensor& x) { return torch::where(x.mm(weight_) > 0)[0]; }, "aten::where", from_data},
      {[&](const at::Tensor& x) { return std::get<0>(torch::_pack_padded_sequence(x.mm(weight_), lengths, true)); },
       "aten::_pack_padded_sequence", from_data},
      {[&](const at::Tensor& x) { return at::_nested_tensor_from_tensor_list({x.mm(weight_)[0], x[1]}); },
       "aten::_nested_tensor_from_tensor_list", "got a nested tensor, whose parts have sizes of their own. Pad the parts"},
      {[&](const at::Tensor& x) { return at::_make_dual(x.mm(weight_), x, 0); }, "aten::_make_dual",
       "got a dual tensor of forward-mode differentiation, whose level ends with the body"},
      {[&](const at::Tensor& x) { return x.mm(weight_).to(torch::kMeta); }, "aten::to",
       "got the meta device, whose tensors have no data to compute with or to send"}};
  for (const auto& [body, op, words] : bodies) {
    const std::string text = refusal(body);
    EXPECT_TRUE(contains(text, op + ", in or after module 'encoder.fc': ") && contains(text, words)) << text;
  }
}

TEST_F(RecordedBody, ErrorsOfOperatorsNameTheirPlace) {
  const std::string text = refusal([&](const at::Tensor& x) { return x.mm(weight_).mm(x); });
  EXPECT_TRUE(contains(text, "while capturing aten::mm, in or after module 'encoder.fc'")) << text;
}

TEST_F(RecordedBody, WritesToConstantsAreRefused) {
  at::Tensor calls = torch::zeros({1});
  const std::string text = refusal([&](const at::Tensor& x) { return x.mm(weight_).add(calls.add_(1)); });
  EXPECT_TRUE(contains(text, "in or after module 'encoder.fc': aten::add_ writes to a tensor of sizes [1]")) << text;
}

TEST_F(RecordedBody, WritesToViewsOfConstantsAreRefused) {
  at::Tensor table = torch::zeros({4, 8});
  const std::vector<std::function<void()>> writes = {[&] { table[0] = 2; }, [&] { table.slice(0, 0, 2).add_(1); },
                                                     [&] { table.detach().add_(1); }, [&] { table.cpu().add_(1); },
                                                     [&] { table.variable_data().add_(1); }};
  for (size_t n = 0; n < writes.size(); ++n) {
    const std::string text = refusal([&](const at::Tensor& x) {
      writes[n]();
      return x.mm(weight_).add(table);
    });
    EXPECT_TRUE(contains(text, "writes to a tensor of sizes [4, 8] that is neither parameter, buffer nor argument"))
        << "form " << n << ": " << text;
  }
  EXPECT_TRUE(table.equal(torch::zeros({4, 8})));
}

TEST_F(RecordedBody, ConstantsMayBeUsedWhileAGradientIsSparse) {
  scale_.mutable_grad() = torch::ones({8}).to_sparse();
  EXPECT_EQ(refusal([](const at::Tensor& x) { return x.add(torch::eye(8).narrow(0, 0, 4)); }), "");
  const at::Tensor constant = torch::ones({8});
  EXPECT_EQ(refusal([&](const at::Tensor& x) { return x.add(constant); }), "");
}

TEST_F(RecordedBody, ConstantsRewrittenWhileTheBodyRunsAreRefused) {
  const at::Tensor constant = torch::zeros({8});
  const std::string text = refusal([&](const at::Tensor& x) {
    const at::Tensor y = x.add(constant);
    constant.data_ptr<float>()[3] = 1;
    return y;
  });
  EXPECT_TRUE(contains(text, "one of sizes [8] that was rewritten after its first use")) << text;
}

TEST_F(RecordedBody, MemoryThatNoOperatorHasWrittenIsNotRead) {
  const std::string text = refusal([&](const at::Tensor& x) { return x.mm(weight_).add(torch::empty({8})); });
  EXPECT_TRUE(contains(text, "aten::add reads the result of empty() before any operator has written it")) << text;
  EXPECT_EQ(refusal([&](const at::Tensor& x) { return x.add(torch::empty({8}).fill_(1)); }), "");
}

TEST_F(RecordedBody, GhostsOfAnotherRunAreRefused) {
  std::vector<at::Tensor> earlier;
  recorded([](const at::Tensor& x) { return x.mul(2); }, &earlier);
  const std::string text = refusal([&](const at::Tensor& x) { return x.mm(weight_).add(earlier[0]); });
  EXPECT_TRUE(contains(text, "in or after module 'encoder.fc': got a ghost of an earlier run of the body")) << text;
}

TEST_F(RecordedBody, ParametersFrozenWhileTheBodyRunsAreRefusedByName) {
  const std::string text = refusal([&](const at::Tensor& x) {
    const at::Tensor y = x.mm(weight_);
    weight_.requires_grad_(false);
    return y;
  });
  EXPECT_TRUE(
      contains(text, "expected 'encoder.fc.weight' to keep requires_grad=true while the body runs, got a change to false"))
      << text;
}

}  // namespace
}  // namespace smp::runtime
