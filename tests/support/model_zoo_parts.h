// What the files of the zoo share: seeded construction and seeded inputs. For model_zoo_*.cpp only.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace smp::support {

struct ZooModel;

/// Each adds the models of one file.
void add_dense_models(std::vector<ZooModel>& zoo);
void add_tower_models(std::vector<ZooModel>& zoo);
void add_conv_models(std::vector<ZooModel>& zoo);
void add_text_models(std::vector<ZooModel>& zoo);
void add_vision_models(std::vector<ZooModel>& zoo);

/// Runs `build` with the default CPU generator seeded and held.
std::shared_ptr<torch::nn::Module> build_seeded(uint64_t seed,
                                                const std::function<std::shared_ptr<torch::nn::Module>()>& build);

template <class Net>
std::function<std::shared_ptr<torch::nn::Module>(uint64_t)> maker() {
  return [](uint64_t seed) {
    return build_seeded(seed, []() -> std::shared_ptr<torch::nn::Module> { return std::make_shared<Net>(); });
  };
}

/// The module by its own type, as a user's body sees it.
template <class Net>
Net& as(torch::nn::Module& module) {
  return dynamic_cast<Net&>(module);
}

/// Inputs from a generator that nobody else uses.
class InputSource {
 public:
  explicit InputSource(uint64_t seed);
  at::Tensor normal(at::IntArrayRef sizes);                  // float32
  at::Tensor uniform(at::IntArrayRef sizes);                 // float32 in [0, 1)
  at::Tensor integers(int64_t high, at::IntArrayRef sizes);  // int64 in [0, high)

 private:
  at::Generator generator_;
};

/// [batch, 3, 8, 8], and one of six classes for each.
inline std::vector<at::Tensor> images_and_classes(int64_t batch, uint64_t seed) {
  InputSource from(seed);
  return {from.normal({batch, 3, 8, 8}), from.integers(6, {batch})};
}

}  // namespace smp::support
