// The list of all models, and the seeded construction that they share.
#include "tests/support/model_zoo.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>

#include "runtime/device/random.h"
#include "tests/support/model_zoo_parts.h"

namespace smp::support {

std::shared_ptr<torch::nn::Module> build_seeded(uint64_t seed,
                                                const std::function<std::shared_ptr<torch::nn::Module>()>& build) {
  runtime::UserRandomStateScope user;
  // Held while building: an initialiser that draws between another thread's reseed and its operator
  // would change that operator's numbers.
  runtime::GeneratorHold guard(static_cast<uint32_t>(seed));
  return build();
}

InputSource::InputSource(uint64_t seed) : generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

at::Tensor InputSource::normal(at::IntArrayRef sizes) { return at::randn(sizes, generator_, at::TensorOptions(at::kFloat)); }

at::Tensor InputSource::uniform(at::IntArrayRef sizes) { return at::rand(sizes, generator_, at::TensorOptions(at::kFloat)); }

at::Tensor InputSource::integers(int64_t high, at::IntArrayRef sizes) {
  return at::randint(high, sizes, generator_, at::TensorOptions(at::kLong));
}

const std::vector<ZooModel>& model_zoo() {
  static const std::vector<ZooModel> zoo = [] {
    std::vector<ZooModel> models;
    add_dense_models(models);
    add_tower_models(models);
    add_conv_models(models);
    add_vision_models(models);
    add_text_models(models);
    return models;
  }();
  return zoo;
}

const ZooModel& zoo_model(const std::string& name) {
  std::string names;
  for (const auto& model : model_zoo()) {
    if (model.name == name) return model;
    names += " " + model.name;
  }
  TORCH_CHECK_VALUE(false, "model zoo: expected one of", names, ", got ", name);
}

}  // namespace smp::support
