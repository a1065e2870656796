// The list of them.
#include "runtime/libtorch/arithmetic.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>

#include "runtime/device/device.h"
#include "runtime/libtorch/deterministic.h"

namespace smp::runtime {

ArithmeticSwitches arithmetic_switches() {
  using at::Float32Backend, at::Float32Op;
  auto& context = at::globalContext();
  const auto precision = [&](Float32Backend backend, Float32Op op) {
    const at::Float32Precision found = context.float32Precision(backend, op);
    return static_cast<int64_t>(found == at::Float32Precision::NONE ? at::Float32Precision::IEEE : found);  // the same
  };
  int64_t attention_order = 0;
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
    attention_order = attention_order * 16 + static_cast<int64_t>(backend);
  }
  ArithmeticSwitches switches{
      {"set_default_dtype", static_cast<int64_t>(c10::typeMetaToScalarType(c10::get_default_dtype()))},
      {"backends.mkldnn.matmul.fp32_precision", precision(Float32Backend::MKLDNN, Float32Op::MATMUL)},
      {"backends.mkldnn.conv.fp32_precision", precision(Float32Backend::MKLDNN, Float32Op::CONV)},
      {"backends.mkldnn.rnn.fp32_precision", precision(Float32Backend::MKLDNN, Float32Op::RNN)},
      {"backends.mkldnn.enabled", context.userEnabledMkldnn()},
      {"backends.mkldnn.deterministic", context.deterministicMkldnn()},
      {"backends.nnpack.enabled", context.userEnabledNNPACK()},
      {"use_deterministic_algorithms", DeterministicScope::is_on_without()},
      {"backends.cuda.enable_flash_sdp", context.userEnabledFlashSDP()},
      {"backends.cuda.enable_math_sdp", context.userEnabledMathSDP()},
      {"backends.cuda.allow_fp16_bf16_reduction_math_sdp", context.allowFP16BF16ReductionMathSDP()},
      {"nn.attention.sdpa_kernel(set_priority=True)", attention_order},
  };
  if (this_ranks_device().type == host().type) return switches;
  const ArithmeticSwitches of_gpu{
      {"backends.cuda.matmul.fp32_precision", precision(Float32Backend::CUDA, Float32Op::MATMUL)},
      {"backends.cudnn.conv.fp32_precision", precision(Float32Backend::CUDA, Float32Op::CONV)},
      {"backends.cudnn.rnn.fp32_precision", precision(Float32Backend::CUDA, Float32Op::RNN)},
      {"backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
       static_cast<int64_t>(context.allowFP16ReductionCuBLAS())},
      {"backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
       static_cast<int64_t>(context.allowBF16ReductionCuBLAS())},
      {"backends.cuda.matmul.allow_fp16_accumulation", context.allowFP16AccumulationCuBLAS()},
      {"backends.cuda.preferred_blas_library", static_cast<int64_t>(context.blasPreferredBackend())},
      {"backends.cuda.preferred_linalg_library", static_cast<int64_t>(context.linalgPreferredBackend())},
      {"backends.cudnn.enabled", context.userEnabledCuDNN()},
      {"backends.cudnn.benchmark", context.benchmarkCuDNN()},
      {"backends.cudnn.deterministic", DeterministicScope::is_on_in_cudnn_without()},
      {"backends.cuda.enable_mem_efficient_sdp", context.userEnabledMemEfficientSDP()},
      {"backends.cuda.enable_cudnn_sdp", context.userEnabledCuDNNSDP()},
  };
  switches.insert(switches.end(), of_gpu.begin(), of_gpu.end());
  return switches;
}

std::string differing(const ArithmeticSwitches& one, const ArithmeticSwitches& other) {
  std::string names;
  for (size_t i = 0; i < one.size(); ++i) {
    if (one[i] == other[i]) continue;
    names.append(names.empty() ? "torch." : ", torch.").append(one[i].name);
  }
  return names;
}

}  // namespace smp::runtime
