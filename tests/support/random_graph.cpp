// A random program over a pool of values, generated once and then run by a module's forward.
#include "tests/support/random_graph.h"

#include <torch/torch.h>

#include <random>

#include "tests/support/model_zoo_parts.h"

namespace smp::support {
namespace {

namespace nn = torch::nn;

// Shapes of values, without the batch dimension: [8], [4] and [4, 2].
enum class Shape { kFlat, kHalf, kTall };

enum class Kind {
  kLinear,       // over the last dimension, with layer `layer`
  kNorm,         // layer norm over the last dimension
  kTanh,         // saves its result
  kGelu,         // saves its argument
  kScale,        // x * 0.75
  kAdd,          // a + b
  kGate,         // a * sigmoid(b): saves both
  kDropout,      // dropout(x, 0.3)
  kChunk,        // flat -> two halves, views of one storage
  kJoin,         // two halves -> flat
  kTranspose,    // flat -> tall, a transposed view
  kFlatten,      // tall -> flat, a copy or a view
  kSelect,       // tall -> half, a strided view
  kExpand,       // half -> tall, an expanded view
  kReluInPlace,  // writes into a
  kAddInPlace,   // a += b
  kMulInPlace,   // a *= 1.25
};

struct Operation {
  Kind kind;
  int a = -1, b = -1;  // indices of pool values
  int layer = -1;
};

struct Program {
  std::vector<Operation> operations;
  std::vector<int64_t> layers;  // width of each linear layer
  std::vector<int> outputs;     // pool indices
};

// What may be done with a pool value. A storage is writable while no operator has saved a tensor on
// it for its backward and no view of several (chunk) or of one element many times (expand) exists;
// autograd refuses the rest.
struct PoolValue {
  Shape shape;
  int storage;
};

class Generator {
 public:
  Generator(uint64_t seed, RandomGraphOptions options) : engine_(seed), options_(options) {
    add_fresh(Shape::kFlat, /*writable=*/false);
  }

  Program generate() {
    for (int i = 0; i < options_.operations; ++i) add_operation();
    // A layer at the end, whose result is always returned: the loss depends on some parameter, whatever came before.
    add_layer(static_cast<int>(pool_.size()) - 1);
    program_.outputs.push_back(static_cast<int>(pool_.size()) - 1);
    for (int extra = pick(4); extra > 0; --extra) {
      program_.outputs.push_back(1 + pick(static_cast<int>(pool_.size()) - 1));
    }
    return program_;
  }

 private:
  int pick(int count) { return static_cast<int>(engine_() % static_cast<uint64_t>(count)); }

  // Mostly a recent value, so that the graph is long; sometimes an old one, so that it has skips.
  int pick_value() {
    const int size = static_cast<int>(pool_.size());
    return pick(3) == 0 ? pick(size) : size - 1 - pick(std::min(size, 4));
  }

  int pick_value_of(Shape shape) {
    std::vector<int> candidates;
    for (int i = 0; i < static_cast<int>(pool_.size()); ++i) {
      if (pool_[i].shape == shape) candidates.push_back(i);
    }
    return candidates[pick(static_cast<int>(candidates.size()))];
  }

  void add_fresh(Shape shape, bool writable) {
    pool_.push_back({shape, static_cast<int>(writable_.size())});
    writable_.push_back(writable);
  }

  void add_view(Shape shape, int of) { pool_.push_back({shape, pool_[of].storage}); }
  void saved(int value) { writable_[pool_[value].storage] = false; }

  void add_operation() {
    const int a = pick_value();
    if (options_.with_writes && writable_[pool_[a].storage] && pick(3) == 0) return add_write(a);
    switch (pick(4)) {
      case 0:
        return add_layer(a);
      case 1:
        return add_elementwise(a);
      case 2:
        return add_pair(a);
      default:
        return add_view_or_copy(a);
    }
  }

  void add_write(int a) {
    Operation operation{.kind = Kind::kMulInPlace, .a = a};
    if (int which = pick(3); which == 0) {
      operation.kind = Kind::kReluInPlace;
      saved(a);
    } else if (which == 1) {
      const int b = pick_value_of(pool_[a].shape);
      // Writing a value into itself through another view of its storage is undefined.
      if (pool_[b].storage != pool_[a].storage) {
        operation.kind = Kind::kAddInPlace;
        operation.b = b;
      }
    }
    program_.operations.push_back(operation);
  }

  void add_layer(int a) {
    const int64_t width = pool_[a].shape == Shape::kTall ? 2 : pool_[a].shape == Shape::kHalf ? 4 : 8;
    Operation operation{.kind = Kind::kLinear, .a = a};
    for (int i = 0; options_.with_tied_weights && i < static_cast<int>(program_.layers.size()); ++i) {
      if (program_.layers[i] == width && pick(2) == 0) operation.layer = i;
    }
    if (operation.layer < 0) {
      operation.layer = static_cast<int>(program_.layers.size());
      program_.layers.push_back(width);
    }
    program_.operations.push_back(operation);
    saved(a);
    add_fresh(pool_[a].shape, true);
  }

  void add_elementwise(int a) {
    static constexpr Kind kKinds[] = {Kind::kTanh, Kind::kGelu, Kind::kNorm, Kind::kScale, Kind::kDropout};
    const Kind kind = kKinds[pick(options_.with_dropout ? 5 : 4)];
    program_.operations.push_back({.kind = kind, .a = a});
    if (kind == Kind::kGelu || kind == Kind::kNorm) saved(a);
    // In evaluation mode dropout returns its argument itself.
    if (kind == Kind::kDropout) saved(a);
    add_fresh(pool_[a].shape, kind == Kind::kScale || kind == Kind::kGelu);
  }

  void add_pair(int a) {
    const int b = pick_value_of(pool_[a].shape);
    const Kind kind = pick(3) == 0 ? Kind::kGate : Kind::kAdd;
    program_.operations.push_back({.kind = kind, .a = a, .b = b});
    if (kind == Kind::kGate) saved(a);
    add_fresh(pool_[a].shape, true);
  }

  void add_view_or_copy(int a) {
    if (pool_[a].shape == Shape::kFlat) return add_view_of_flat(a);
    if (pool_[a].shape == Shape::kHalf) return add_view_of_half(a);
    if (pick(2) == 0) {
      program_.operations.push_back({.kind = Kind::kSelect, .a = a, .layer = pick(2)});
      return add_view(Shape::kHalf, a);
    }
    program_.operations.push_back({.kind = Kind::kFlatten, .a = a});
    saved(a);  // may be a view
    add_view(Shape::kFlat, a);
  }

  void add_view_of_flat(int a) {
    if (pick(2) == 0) {
      program_.operations.push_back({.kind = Kind::kTranspose, .a = a});
      return add_view(Shape::kTall, a);
    }
    program_.operations.push_back({.kind = Kind::kChunk, .a = a});
    saved(a);
    add_view(Shape::kHalf, a);
    add_view(Shape::kHalf, a);
  }

  void add_view_of_half(int a) {
    if (pick(2) == 0) {
      program_.operations.push_back({.kind = Kind::kExpand, .a = a});
      saved(a);
      return add_view(Shape::kTall, a);
    }
    program_.operations.push_back({.kind = Kind::kJoin, .a = a, .b = pick_value_of(Shape::kHalf)});
    add_fresh(Shape::kFlat, true);
  }

  std::mt19937_64 engine_;
  RandomGraphOptions options_;
  Program program_;
  std::vector<PoolValue> pool_;
  std::vector<bool> writable_;  // by storage
};

struct RandomNet : nn::Module {
  Program program;
  std::function<at::Tensor(const at::Tensor&)> tanh;
  std::vector<nn::Linear> layers;
  nn::Dropout dropout{0.3};

  RandomNet(Program structure, std::function<at::Tensor(const at::Tensor&)> own_tanh)
      : program(std::move(structure)), tanh(std::move(own_tanh)) {
    for (size_t i = 0; i < program.layers.size(); ++i) {
      const auto width = program.layers[i];
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(width, width)));
    }
    register_module("dropout", dropout);
  }

  std::vector<at::Tensor> forward(const at::Tensor& x) {
    std::vector<at::Tensor> pool{x};
    for (const auto& operation : program.operations) run(operation, pool);
    std::vector<at::Tensor> outputs;
    for (int i : program.outputs) outputs.push_back(pool[i]);
    return outputs;
  }

 private:
  void run(const Operation& operation, std::vector<at::Tensor>& pool) {
    // A copy of the handle: push_back below may move the pool.
    at::Tensor a = pool[operation.a];
    const at::Tensor b = operation.b < 0 ? at::Tensor() : pool[operation.b];
    switch (operation.kind) {
      case Kind::kReluInPlace:
        a.relu_();
        return;
      case Kind::kAddInPlace:
        a.add_(b);
        return;
      case Kind::kMulInPlace:
        a.mul_(1.25);
        return;
      case Kind::kChunk:
        for (auto& half : a.chunk(2, 1)) pool.push_back(half);
        return;
      default:
        pool.push_back(result_of(operation, a, b));
    }
  }

  at::Tensor result_of(const Operation& operation, const at::Tensor& a, const at::Tensor& b) {
    switch (operation.kind) {
      case Kind::kLinear:
        return layers[operation.layer](a);
      case Kind::kNorm:
        return torch::layer_norm(a, {a.size(-1)});
      case Kind::kTanh:
        return tanh ? tanh(a) : a.tanh();
      case Kind::kGelu:
        return torch::gelu(a);
      case Kind::kScale:
        return a * 0.75;
      case Kind::kAdd:
        return a + b;
      case Kind::kGate:
        return a * torch::sigmoid(b);
      case Kind::kDropout:
        return dropout(a);
      case Kind::kJoin:
        return torch::cat({a, b}, 1);
      case Kind::kTranspose:
        return a.reshape({-1, 2, 4}).transpose(1, 2);
      case Kind::kFlatten:
        return a.reshape({-1, 8});
      case Kind::kSelect:
        return a.select(2, operation.layer);
      case Kind::kExpand:
        return a.unsqueeze(2).expand({-1, -1, 2});
      default:
        TORCH_INTERNAL_ASSERT(false, "not an operation with one result");
    }
  }
};

// The first output comes from a layer; others may be the input.
BodyResult loss_of_each(const std::vector<at::Tensor>& outputs) {
  BodyResult result{.loss = {}, .outputs = outputs};
  for (const auto& output : outputs) {
    const auto loss = torch::log1p(output.square()).mean();
    if (!result.loss.defined()) {
      result.loss = loss;
    } else if (loss.requires_grad()) {
      result.more_losses.push_back(loss);
    }
  }
  return result;
}

}  // namespace

ZooModel random_graph(uint64_t graph_seed, RandomGraphOptions options) {
  auto program = Generator(graph_seed, options).generate();
  bool has_dropout = false;
  for (const auto& operation : program.operations) has_dropout |= operation.kind == Kind::kDropout;
  return {
      .name = "random_graph_" + std::to_string(graph_seed),
      .make =
          [program, tanh = options.tanh](uint64_t seed) {
            return build_seeded(seed,
                                [&]() -> std::shared_ptr<nn::Module> { return std::make_shared<RandomNet>(program, tanh); });
          },
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        InputSource from(seed);
        return {from.normal({batch, 8})};
      },
      .forward = [](nn::Module& net, const auto& in) { return as<RandomNet>(net).forward(in[0]); },
      .loss = [options](const auto& out, const auto&) -> BodyResult {
        if (options.with_more_losses) return loss_of_each(out);
        auto loss = torch::zeros({});
        for (const auto& output : out) loss = loss + torch::log1p(output.square()).mean();
        return {loss, out};
      },
      .has_random = has_dropout,
      .has_tied_weights = options.with_tied_weights,
  };
}

}  // namespace smp::support
