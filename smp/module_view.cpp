// Module by module.
#include "smp/module_view.h"

#include <torch/nn/module.h>

namespace smp {
namespace {

class ModuleView : public engine::ModelView {
 public:
  explicit ModuleView(std::shared_ptr<const torch::nn::Module> module) : module_(std::move(module)) {}

  std::vector<engine::ModelTensor> tensors() const override {
    std::vector<engine::ModelTensor> tensors;
    for (const auto& item : module_->named_parameters()) tensors.push_back({item.key(), item.value()});
    for (const auto& item : module_->named_buffers()) tensors.push_back({item.key(), item.value(), /*is_buffer=*/true});
    return tensors;
  }
  std::vector<std::string> module_paths() const override { return module_->named_modules().keys(); }
  bool is_training() const override { return module_->is_training(); }

 private:
  std::shared_ptr<const torch::nn::Module> module_;
};

}  // namespace

std::shared_ptr<const engine::ModelView> view_of(std::shared_ptr<const torch::nn::Module> module) {
  return std::make_shared<ModuleView>(std::move(module));
}

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

}  // namespace smp
