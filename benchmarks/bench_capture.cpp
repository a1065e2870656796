// What capturing costs: a transformer of seven billion parameters on meta tensors, and recognising its second run.
#include <torch/torch.h>

#include "benchmarks/captured_step.h"
#include "benchmarks/measure.h"
#include "benchmarks/meta_construction.h"
#include "examples/common/resident_memory.h"
#include "examples/transformer_lm/model.h"

namespace {

using namespace smp;
using namespace smp::benchmarks;
using transformer_lm::TransformerLm;

constexpr int64_t kVocabulary = 32'000, kTokens = 512;
constexpr double kMib = 1024.0 * 1024.0;

std::shared_ptr<TransformerLm> seven_billion_parameters() {
  MetaConstruction construction;
  const runtime::InterceptScope scope(construction);
  return std::make_shared<TransformerLm>(
      transformer_lm::ModelOptions{.vocab = kVocabulary, .width = 4096, .heads = 32, .hidden = 16384, .layers = 34});
}

class Transformer {
 public:
  Transformer() : net_(seven_billion_parameters()), bindings_(bindings_of(*net_)) {
    double parameters = 0;
    for (const auto& parameter : net_->parameters()) {
      require(parameter.is_meta(), "expected parameters on meta");
      parameters += static_cast<double>(parameter.numel());
    }
    require(parameters > 7e9, "expected a model of seven billion parameters");
    tokens_ = torch::zeros({1, kTokens}, torch::kLong);
  }

  const runtime::Bindings& bindings() const { return bindings_; }

  runtime::CapturedBody capture(runtime::BodyCapture& into) {
    return capture_loss(into, {tokens_, tokens_.clone()}, [this](const auto& inputs) {
      const auto logits = net_->forward(inputs[0]);
      return torch::nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), inputs[1].reshape({-1}));
    });
  }

  // A capture that nothing recognises; the recording must name every parameter.
  size_t capture_anew() {
    runtime::BodyCapture fresh(bindings_);
    const auto captured = capture(fresh);
    size_t named = 0;
    for (const auto& value : captured.recording->graph.values) {
      named += value.kind == partitioner::ValueKind::kParameter ? 1 : 0;
    }
    require(named == net_->parameters().size(), "expected every parameter in the graph");
    return captured.recording->graph.nodes.size();
  }

 private:
  std::shared_ptr<TransformerLm> net_;
  runtime::Bindings bindings_;
  at::Tensor tokens_;
};

// The first capture of a process, with all that is set up once.
void measure_memory(Transformer& transformer) {
  examples::forget_resident_peak();
  const int64_t before = examples::resident_bytes();
  runtime::BodyCapture capture(transformer.bindings());
  const auto captured = transformer.capture(capture);
  const auto mib = [&](int64_t bytes) { return static_cast<double>(bytes - before) / kMib; };
  report("capture_7b_mib", mib(examples::peak_resident_bytes()), "MiB",
         {{"growth at the end", mib(examples::resident_bytes())},
          {"operators", static_cast<double>(captured.recording->graph.nodes.size())}});
}

void measure_time(Transformer& transformer) {
  constexpr int kRounds = 11;
  size_t num_operators = 0;
  std::vector<double> seconds;
  for (int i = 0; i < kRounds; ++i) {
    seconds.push_back(seconds_of([&] { num_operators = transformer.capture_anew(); }));
  }
  report("capture_7b_seconds", median(seconds), "s",
         {{"first", seconds.front()}, {"operators", static_cast<double>(num_operators)}});
}

void measure_match(Transformer& transformer) {
  constexpr int kRounds = 101;
  runtime::BodyCapture capture(transformer.bindings());
  transformer.capture(capture);
  std::vector<double> seconds;
  for (int i = 0; i < kRounds; ++i) {
    seconds.push_back(seconds_of([&] { transformer.capture(capture); }));
  }
  require(capture.num_recordings() == 1, "expected every later run to match the first");
  const double operators = static_cast<double>(capture.num_matched()) / kRounds;
  report("match_us_per_op", 1e6 * median(seconds) / operators, "us",
         {{"run ms", 1e3 * median(seconds)}, {"operators", operators}});
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  Transformer transformer;
  if (is_wanted(argc, argv, "capture_7b_mib")) measure_memory(transformer);
  if (is_wanted(argc, argv, "capture_7b_seconds")) measure_time(transformer);
  if (is_wanted(argc, argv, "match_us_per_op")) measure_match(transformer);
}
