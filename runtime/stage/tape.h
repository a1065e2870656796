// A stage's forward and backwards as flat lists of leaf operators, run without autograd: the same kernels in the same
// order as autograd ran them when the tape was recorded. Knows the graph for the texts of errors only; TapeRecorder fills it.
#pragma once

#include <c10/util/SmallVector.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/device/random.h"
#include "runtime/stage/flat_call.h"
#include "runtime/kernels/cpu/dropout.h"
#include "runtime/stage/stage.h"

namespace smp::runtime {

/// What a view, or an input, must look like.
struct TapeGeometry {
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t storage_offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;

  static TapeGeometry of(const at::Tensor& tensor);
  bool fits(const at::Tensor& tensor) const;
  bool operator==(const TapeGeometry&) const = default;
};

struct TapeCall : FlatCall {
  enum class Kind : uint8_t {
    kOperator,
    kView,      // outputs[0] = the memory of tensors[0] with another geometry, past the dispatcher
    kGradient,  // tensors[0] is the gradient of a parameter, whole
  };
  Kind kind = Kind::kOperator;
  OwnKernel kernel = nullptr;     // kOperator: in the place of the dispatcher's
  bool has_effect = false;        // writes or draws
  bool grad_enabled = false;      // as it was recorded: mkldnn_rnn_layer looks at it, although nothing is recorded for it
  bool ends_random = false;       // the last of the operators that draw under one seed
  int32_t random_ordinal = -1;    // >= 0: the first of them
  TapeGeometry geometry{};        // kView
  int32_t parameter = -1;         // among the own tensors. kGradient: whose; kOperator: whose this product is, and nothing else
  partitioner::NodeId node = partitioner::kNoNode;  // the operator of the graph that this is part of, or of its backward
};

/// A tensor that is there before the tape runs.
struct TapeBinding {
  partitioner::ValueId value = partitioner::kNoValue;
  int32_t slot = -1;  // -1: not read
  TapeGeometry geometry{};
  bool is_written = false;
};

struct TapeOwn : TapeBinding {
  at::Tensor tensor;      // as it is outside of autograd
  bool is_fixed = false;  // a parameter or buffer: the same tensor in every microbatch
};

struct TapeBackward {
  size_t end = 0;                // behind its last call
  size_t results_end = 0;        // behind the last one on which the results depend
  std::vector<int32_t> roots;    // slots of the gradients that enter; -1: not read
  std::vector<TapeGeometry> root_geometries;
  std::vector<bool> has_root;    // whether that gradient is defined
  std::vector<int32_t> results;  // slots; -1: undefined
  std::vector<int32_t> left;     // results that no later call reads
};

/// The lists, as recorded or ready to run.
struct TapeLists {
  std::vector<TapeCall> calls;  // the forward, then the backwards in their order
  size_t forward_end = 0;
  size_t num_slots = 0;
  std::vector<TapeBinding> inputs;
  std::vector<TapeOwn> own;
  std::vector<int32_t> outputs;  // slots
  std::vector<TapeBackward> backwards;
  std::vector<TapeGeometry> slot_geometries;
  std::vector<int32_t> slot_memories;  // slots of one number lie on the same memory
  bool has_random = false;
  bool changes_geometry_in_place = false;  // then two slots may start as one tensor and differ later
};

/// Receives the gradient of a parameter (by its position among the own tensors) as soon as it is whole.
using GradientSink = std::function<void(size_t own, at::Tensor gradient)>;

class Tape {
 public:
  /// Drops what nobody uses and cannot throw, folds views of fixed tensors into arguments, plans when tensors die.
  Tape(TapeLists recorded, const partitioner::Graph& graph);

  struct RunContext {
    RandomState random;
    int microbatch = 0;
    const std::function<void()>& progress;  // called between operators; may be empty
    const OperatorTimer& timer;             // called behind each of them; may be empty
    bool adds_products = false;             // to gradients that are there, past the sink
  };

  const TapeLists& lists() const { return lists_; }
  /// Fills the slots of one microbatch, runs the forward and returns the outputs. `own`: by position in lists().own.
  std::vector<at::Tensor> forward(Slots& slots, std::vector<at::Tensor> inputs, const std::vector<at::Tensor>& own,
                                  const RunContext& context);
  /// Runs one backward until its results are there. Slots that later calls need stay filled. A gradient that enters
  /// in another geometry than was recorded is copied; throws c10::Error where that cannot be, or one is undefined that was not.
  std::vector<at::Tensor> backward(Slots& slots, size_t index, std::vector<at::Tensor> gradients,
                                   const RunContext& context, const GradientSink& sink);
  /// Versions of the parameters and buffers that backwards read where they are. Throws c10::Error, as autograd does, if they
  /// are not those of its forward any more.
  std::vector<int64_t> versions() const;
  void check_versions(const std::vector<int64_t>& of_forward) const;
  /// Whether the last backward leaves gradients of parameters to weight_gradients().
  bool leaves_weights() const { return !lists_.backwards.empty() && lists_.backwards.back().results_end < lists_.backwards.back().end; }
  void weight_gradients(Slots& slots, const RunContext& context, const GradientSink& sink);

 private:
  void find_products();
  void find_saved();
  void plan_frees();
  void run(Slots& slots, size_t begin, size_t end, const RunContext& context, const GradientSink* sink);
  void run_calls(Slots& slots, size_t& n, size_t end, const RunContext& context, const GradientSink* sink);
  void fit_roots(size_t index, std::vector<at::Tensor>& gradients) const;
  bool add_product(const TapeCall& call, Slots& slots) const;
  const at::Tensor& at(const Slots& slots, int32_t slot) const;

  const partitioner::Graph& graph_;
  TapeLists lists_;
  Slots fixed_;                       // by slot: fixed tensors and their views, undefined elsewhere
  std::vector<int32_t> fixed_in_lists_;
  std::vector<size_t> saved_own_;  // fixed tensors that a backward reads, by position
  std::vector<int32_t> forward_freed_;  // behind the forward: inputs and outputs that no backward reads
  int num_threads_ = 0;  // for which it is known what products add up alike; 0: not yet, since a trial takes memory
  torch::jit::Stack stack_;
};

/// A tensor on the same memory, past the dispatcher: 5 times cheaper than a view operator.
at::Tensor view_of(const at::Tensor& base, const TapeGeometry& geometry);

}  // namespace smp::runtime
