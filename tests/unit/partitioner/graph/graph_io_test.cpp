// Round trips, hash, equality, readable text and refusals of the graph's JSON form.
#include "partitioner/graph/graph_io.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "tests/support/graph_text.h"

namespace smp::partitioner {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// y = addmm(bias, x, weight, 1, 1) with one more node whose arguments the test chooses.
Graph small_graph(std::vector<Argument> arguments = {}) {
  const TensorSpec spec{{2, 3}, {3, 1}, 0, c10::ScalarType::Float, false};
  TensorSpec weight{{3, 3}, {1, 3}, 4, c10::ScalarType::Float, true};
  Graph graph;
  graph.key = "train; float32[2,3]";
  graph.values = {
      {ValueKind::kInput, "input.0", spec, kNoNode, 0, 0, false},
      {ValueKind::kParameter, "encoder.weight", weight, kNoNode, 0, 1, false},
      {ValueKind::kBuffer, "encoder.running_mean", {{3}, {1}, 0, c10::ScalarType::Double, false}, kNoNode, 0, 2, false},
      {ValueKind::kConstant, "constant.0", {{}, {}, 0, c10::ScalarType::Long, false}, kNoNode, 0, 3, true},
      {ValueKind::kResult, "", spec, 0, 0, 4, false},
      {ValueKind::kResult, "", spec, 1, 0, 5, false},
  };
  Node first;
  first.op = "aten::addmm";
  first.arguments = {ValueRef{2}, ValueRef{0}, ValueRef{1}, int64_t{1}, 1.0};
  first.outputs = {4};
  first.module = "encoder.layers.0";
  Node second;
  second.op = "aten::test";
  second.overload = "Scalar";
  second.arguments = std::move(arguments);
  second.outputs = {5, kNoValue};
  second.written_storages = {5, 2};
  second.grad_enabled = false;
  second.autocast = {true, c10::ScalarType::Half};
  second.random_ordinal = 7;
  graph.nodes = {first, second};
  graph.inputs = {0};
  graph.returned = {5, 4};
  graph.backward_roots = {5};
  return graph;
}

std::vector<Argument> every_alternative() {
  return {std::monostate{},
          UndefinedTensor{},
          ValueRef{4},
          ValueRefList{{0, 4}, false},
          ValueRefList{{0, kNoValue, 4}, true},
          ValueRefList{},
          true,
          false,
          int64_t{0},
          std::numeric_limits<int64_t>::min(),
          std::numeric_limits<int64_t>::max(),
          0.0,
          1.0,
          std::complex<double>(-0.0, kInfinity),
          std::string("mean \"quoted\" \n \xC3\xBC"),
          std::string("\xFF not utf-8"),
          std::string(),
          std::vector<int64_t>{-1, 0, 1},
          std::vector<int64_t>{},
          std::vector<double>{0.1, -kInfinity},
          std::vector<double>{},
          std::vector<bool>{true, false},
          std::vector<bool>{},
          ScalarList{{true, int64_t{1}, 1.0}},
          ScalarList{},
          StageDevice{},
          NamedDevice{"cpu"},
          NamedDevice{"stage_device"}};
}

void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
  try {
    deserialise_graph(text);
    FAIL() << "accepted: " << text;
  } catch (const c10::ValueError& error) {
    const std::string message = error.what_without_backtrace();
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
    }
  }
}

/// The good text with one change.
void expect_refused_after(const std::string& from, const std::string& to, const std::vector<std::string>& parts) {
  std::string text = serialise(small_graph());
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from << " is not in " << text;
  expect_refused(text.replace(at, from.size(), to), parts);
}

TEST(TensorSpec, BytesCountEveryRepetition) {
  const TensorSpec expanded{{4, 5}, {0, 1}, 0, c10::ScalarType::Double, false};
  EXPECT_EQ(expanded.num_elements(), 20);
  EXPECT_EQ(expanded.num_bytes(), 160);
  EXPECT_EQ((TensorSpec{{}, {}, 0, c10::ScalarType::Half, false}).num_bytes(), 2);
  EXPECT_EQ((TensorSpec{{3, 0}, {1, 1}, 0, c10::ScalarType::Half, false}).num_bytes(), 0);
}

TEST(NodeInputs, AreInArgumentOrderWithoutDuplicatesOrGaps) {
  Node node;
  node.arguments = {ValueRef{7}, int64_t{3},         ValueRefList{{2, kNoValue, 7}, true},
                    ValueRef{0}, ValueRef{kNoValue}, ValueRef{2}};
  EXPECT_EQ(node_inputs(node), (std::vector<ValueId>{7, 2, 0}));
}

TEST(GraphIo, EveryFieldAndAlternativeSurvives) {
  const Graph graph = small_graph(every_alternative());
  const std::string text = serialise(graph);
  const Graph back = deserialise_graph(text);
  EXPECT_EQ(back, graph);  // no NaN in it, so plain equality says all
  EXPECT_TRUE(same_graph(back, graph));
  EXPECT_EQ(serialise(back), text);
  EXPECT_EQ(hash(back), hash(graph));
}

TEST(GraphIo, EveryDtypeSurvives) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::Undefined); ++i) {
    Graph graph = small_graph();
    graph.values[0].spec.dtype = static_cast<c10::ScalarType>(i);
    EXPECT_EQ(deserialise_graph(serialise(graph)), graph) << c10::toString(graph.values[0].spec.dtype);
  }
}

TEST(GraphIo, EmptyGraphSurvives) { EXPECT_EQ(deserialise_graph(serialise(Graph{})), Graph{}); }

TEST(GraphIo, DoublesSurviveBitByBit) {
  std::mt19937_64 random(3);
  std::vector<double> doubles{0.0,
                              -0.0,
                              kInfinity,
                              -kInfinity,
                              std::numeric_limits<double>::denorm_min(),
                              std::numeric_limits<double>::max(),
                              std::nextafter(1.0, 2.0),
                              std::bit_cast<double>(0x7FF8000000000001u),   // NaN with a payload
                              std::bit_cast<double>(0xFFF0000000000001u)};  // signalling, negative
  for (int i = 0; i < 10000; ++i) doubles.push_back(std::bit_cast<double>(random()));
  std::vector<Argument> arguments{doubles};
  for (double number : doubles) arguments.emplace_back(number);
  for (double number : doubles) arguments.emplace_back(ScalarList{{number}});
  for (double number : doubles) arguments.emplace_back(std::complex<double>(number, -number));
  const Graph graph = small_graph(arguments);
  const Graph back = deserialise_graph(serialise(graph));
  EXPECT_TRUE(same_graph(back, graph));
  const auto& list = std::get<std::vector<double>>(back.nodes[1].arguments[0]);
  for (size_t i = 0; i < doubles.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint64_t>(list[i]), std::bit_cast<uint64_t>(doubles[i]));
  }
}

TEST(GraphIo, EqualityIsByBitsAndByType) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto graph_of = [](Argument argument) { return small_graph({std::move(argument)}); };
  const std::vector<std::function<Argument(double)>> wraps = {
      [](double x) { return x; }, [](double x) { return std::vector<double>{x}; }, [](double x) { return ScalarList{{x}}; },
      [](double x) { return std::complex<double>(1, x); }};
  for (const auto& wrap : wraps) {
    EXPECT_TRUE(same_graph(graph_of(wrap(nan)), graph_of(wrap(nan))));
    EXPECT_FALSE(same_graph(graph_of(wrap(0.0)), graph_of(wrap(-0.0))));
    EXPECT_NE(hash(graph_of(wrap(0.0))), hash(graph_of(wrap(-0.0))));
  }
  EXPECT_FALSE(same_argument(int64_t{1}, 1.0));
  EXPECT_FALSE(same_argument(int64_t{1}, true));
  EXPECT_FALSE(same_argument(std::monostate{}, UndefinedTensor{}));
  EXPECT_FALSE(same_argument(ScalarList{{int64_t{1}}}, ScalarList{{1.0}}));
  EXPECT_FALSE(same_argument(std::vector<double>{1}, std::vector<double>{1, 1}));
}

TEST(GraphIo, EveryFieldChangesEqualityAndHash) {
  const Graph graph = small_graph({int64_t{1}});
  const std::vector<std::function<void(Graph&)>> changes = {
      [](Graph& g) { g.key += "x"; },
      [](Graph& g) { g.inputs.clear(); },
      [](Graph& g) { g.returned.pop_back(); },
      [](Graph& g) { g.backward_roots.clear(); },
      [](Graph& g) { g.values[1].kind = ValueKind::kBuffer; },
      [](Graph& g) { g.values[1].name += "x"; },
      [](Graph& g) { g.values[1].spec.sizes[0] = 4; },
      [](Graph& g) { g.values[1].spec.strides[0] = 4; },
      [](Graph& g) { g.values[1].spec.storage_offset = 0; },
      [](Graph& g) { g.values[1].spec.dtype = c10::ScalarType::Half; },
      [](Graph& g) { g.values[1].spec.requires_grad = false; },
      [](Graph& g) { g.values[5].producer = 0; },
      [](Graph& g) { g.values[5].output_index = 1; },
      [](Graph& g) { g.values[5].storage = 4; },
      [](Graph& g) { g.values[3].is_wrapped_number = false; },
      [](Graph& g) { g.nodes[1].op = "aten::other"; },
      [](Graph& g) { g.nodes[1].overload.clear(); },
      [](Graph& g) { g.nodes[1].arguments[0] = int64_t{2}; },
      [](Graph& g) { g.nodes[1].arguments.emplace_back(true); },
      [](Graph& g) { g.nodes[1].outputs.pop_back(); },
      [](Graph& g) { g.nodes[1].written_storages.pop_back(); },
      [](Graph& g) { g.nodes[1].grad_enabled = true; },
      [](Graph& g) { g.nodes[1].autocast.enabled = false; },
      [](Graph& g) { g.nodes[1].autocast.dtype = c10::ScalarType::BFloat16; },
      [](Graph& g) { g.nodes[1].random_ordinal = 8; },
      [](Graph& g) { g.nodes[1].module = "decoder"; },
      [](Graph& g) { g.nodes.pop_back(); },
  };
  std::set<uint64_t> hashes{hash(graph)};
  for (size_t i = 0; i < changes.size(); ++i) {
    Graph changed = graph;
    changes[i](changed);
    EXPECT_FALSE(same_graph(graph, changed)) << "change " << i;
    hashes.insert(hash(changed));
  }
  EXPECT_EQ(hashes.size(), changes.size() + 1);
}

TEST(GraphIo, HashIsTheSameInEveryProcess) {
  // FNV-1a of the text below; a change of the format must change kFormatVersion and this test.
  const std::string text =
      R"({"format":1,"key":"","inputs":[],"returned":[],"read":[],"backward_roots":[],"values":[],"nodes":[]})";
  EXPECT_EQ(serialise(Graph{}), text);
  uint64_t expected = 14695981039346656037u;
  for (unsigned char byte : text) expected = (expected ^ byte) * 1099511628211u;
  EXPECT_EQ(hash(Graph{}), expected);
}

TEST(GraphIo, TextHasOneLinePerLeafAndNode) {
  const Graph graph =
      small_graph({ValueRefList{{0, kNoValue}, true}, 2.0, 0.1, int64_t{2}, std::monostate{}, true, std::string("none"),
                   std::vector<int64_t>{1, 2}, ScalarList{{int64_t{1}, 1.5}}, std::vector<bool>{false},
                   std::complex<double>(1, -2), StageDevice{}, NamedDevice{"cpu"}, UndefinedTensor{}});
  EXPECT_EQ(
      support::to_text(graph),
      "# train; float32[2,3]\n"
      "input %0 input.0: float32[2,3]\n"
      "parameter %1 encoder.weight: float32[3,3]{1,3} requires_grad\n"
      "buffer %2 encoder.running_mean: float64[3]\n"
      "constant %3 constant.0: int64[]\n"
      "%4: float32[2,3] = aten::addmm(%2 encoder.running_mean, %0 input.0, %1 encoder.weight, 1, 1.0)   # encoder.layers.0\n"
      "%5: float32[2,3], undefined = aten::test.Scalar([%0 input.0, None], 2.0, 0.1, 2, None, true, \"none\", [1, 2], [1, "
      "1.5], [false], (1.0, -2.0j), device, device(cpu), undefined)   # no_grad, autocast float16, random 7, writes storage "
      "5, writes storage 2\n"
      "return %5, %4\n"
      "backward %5\n");
}

TEST(GraphIo, TextThatIsNoGraphIsRefused) {
  expect_refused("", {"graph data: the text", "JSON"});
  expect_refused("{", {"graph data: the text", "JSON"});
  expect_refused("[]", {"the text: expected an object, got []"});
  expect_refused(serialise(small_graph()) + "x", {"the text"});
  expect_refused(std::string(100000, '['), {"at most 8 deep"});
}

TEST(GraphIo, EveryTruncationIsRefused) {
  const std::string text = serialise(small_graph(every_alternative()));
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_THROW(deserialise_graph(text.substr(0, length)), c10::ValueError) << length;
  }
}

TEST(GraphIo, DamagedTextIsRefusedOrStillAGraph) {
  const std::string text = serialise(small_graph(every_alternative()));
  std::mt19937_64 random(5);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = text;
    damaged[random() % damaged.size()] = static_cast<char>(random() % 256);
    try {
      support::to_text(deserialise_graph(damaged));  // walks every id
    } catch (const c10::ValueError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
}

TEST(GraphIo, WrongFieldsAreNamed) {
  expect_refused_after("\"format\":1", "\"format\":2", {"format: expected", "got 2"});
  expect_refused_after("\"key\":", "\"kay\":", {"expected a field \"key\""});
  expect_refused_after("\"format\":1", "\"format\":1,\"extra\":0", {"no other fields", "\"extra\""});
  expect_refused_after("\"module\":\"\"", "\"module\":\"\",\"hook\":1", {"nodes[1]: expected no other fields", "\"hook\""});
  expect_refused_after("\"grad_enabled\":false", "\"grad_enabled\":0",
                       {"nodes[1].grad_enabled: expected true or false, got 0"});
  expect_refused_after("\"kind\":\"buffer\"", "\"kind\":\"tensor\"", {"values[2].kind", "\"tensor\""});
  expect_refused_after("\"dtype\":\"Double\"", "\"dtype\":\"Single\"", {"values[2].dtype", "\"Single\""});
  expect_refused_after("\"op\":\"aten::addmm\"", "\"op\":null", {"nodes[0].op", "a string"});
  expect_refused_after("\"random_ordinal\":7", "\"random_ordinal\":2147483648", {"nodes[1].random_ordinal", "2147483648"});
  expect_refused_after("\"random_ordinal\":7", "\"random_ordinal\":7.0", {"an integer"});
}

TEST(GraphIo, IdsOutOfRangeAreNamed) {
  expect_refused_after("\"inputs\":[0]", "\"inputs\":[6]", {"inputs[0]", "from 0 to 5", "got 6"});
  expect_refused_after("\"inputs\":[0]", "\"inputs\":[-1]", {"inputs[0]", "got -1"});
  expect_refused_after("\"returned\":[5,4]", "\"returned\":[5,-1]", {"returned[1]", "from 0 to 5"});
  expect_refused_after("\"backward_roots\":[5]", "\"backward_roots\":[6]", {"backward_roots"});
  expect_refused_after("\"outputs\":[4]", "\"outputs\":[6]", {"nodes[0].outputs[0]"});
  expect_refused_after("{\"value\":2}", "{\"value\":6}", {"nodes[0].arguments[0].value", "got 6"});
  expect_refused_after("{\"value\":2}", "{\"values\":[0,-1]}", {"nodes[0].arguments[0].values[1]"});
  expect_refused_after("{\"value\":2}", "{\"optional_values\":[-1,-2]}", {"nodes[0].arguments[0].optional_values[1]"});
  expect_refused_after("\"written_storages\":[5,2]", "\"written_storages\":[-1]", {"nodes[1].written_storages[0]"});
  expect_refused_after("\"producer\":1", "\"producer\":2", {"values[5].producer"});
  expect_refused_after("\"producer\":-1", "\"producer\":0", {"values[0].producer"});
}

TEST(GraphIo, ResultReadBeforeItIsMadeIsNamed) {
  expect_refused_after("{\"value\":2}", "{\"value\":4}",
                       {"nodes[0].arguments: expected values made before, got %4 of node 0"});
}

TEST(GraphIo, BadArgumentsAreNamed) {
  const auto expect = [](const std::string& argument, const std::string& part) {
    expect_refused_after("{\"value\":2}", argument, {"nodes[0].arguments[0]", part});
  };
  expect("1.5", "an object with one field");
  expect("{}", "one field");
  expect("{\"value\":0,\"values\":[]}", "one field");
  expect("{\"tensor\":0}", "\"tensor\"");
  expect("{\"double\":1.5}", "16 hex digits");
  expect("{\"double\":\"3FF0000000000000\"}", "16 hex digits");
  expect("{\"double\":\"3ff000000000000\"}", "16 hex digits");
  expect("{\"complex\":[\"3ff0000000000000\"]}", "real and imaginary");
  expect("{\"bools\":[1]}", "bools[0]");
  expect("{\"scalars\":[{\"value\":1}]}", "a bool, an integer or a double");
  expect("{\"ints\":[9223372036854775808]}", "ints[0]");
  expect("{\"stage_device\":\"cuda:0\"}", "stage_device: expected null");
}

TEST(GraphIo, BadSizesAreNamed) {
  expect_refused_after("\"sizes\":[2,3]", "\"sizes\":[2]", {"values[0].strides: expected 1 strides"});
  expect_refused_after("\"sizes\":[2,3]", "\"sizes\":[-2,3]", {"values[0].sizes[0]"});
  expect_refused_after("\"sizes\":[2,3]", "\"sizes\":[4611686018427387904,3]", {"values[0].sizes", "2^63"});
  expect_refused_after("\"sizes\":[2,3]", "\"sizes\":[0,9223372036854775807]", {"values[0].sizes", "2^63"});
  expect_refused_after("\"strides\":[1,3],\"storage_offset\":4", "\"strides\":[1,4611686018427387904],\"storage_offset\":4",
                       {"values[1].strides", "2^63"});
  expect_refused_after("\"storage_offset\":4", "\"storage_offset\":9223372036854775807", {"values[1].strides", "2^63"});
}

// Tables are as long as the largest number of an alias set.
TEST(GraphIo, AliasSetsThatNoValueCanHaveAreNamed) {
  expect_refused_after("\"storage\":5", "\"storage\":2147483647", {"values[5].storage", "from -1 to 5", "2147483647"});
  expect_refused_after("\"written_storages\":[5,2]", "\"written_storages\":[5,6]",
                       {"nodes[1].written_storages[1]", "got 6"});
}

TEST(GraphIo, OutputsOfAnotherNodeAreNamed) {
  expect_refused_after("\"outputs\":[4]", "\"outputs\":[5]", {"nodes[0].outputs[0]", "a result of this node", "got %5"});
  expect_refused_after("\"outputs\":[4]", "\"outputs\":[0]", {"got %0"});
  expect_refused_after("\"outputs\":[5,-1]", "\"outputs\":[-1,5]", {"nodes[1].outputs[1]"});
}

}  // namespace
}  // namespace smp::partitioner
