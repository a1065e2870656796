// One fallback for all operators that LibTorch does not make of others.
#include "tests/fake_gpu/operators.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace smp::fake_gpu {
namespace {

using torch::jit::Stack;

thread_local Recording* recording_of_thread = nullptr;

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override { return Gpu::the().allocate(static_cast<int64_t>(num_bytes)); }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    Gpu::the().start_copy(to, from, static_cast<int64_t>(num_bytes));
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &the_allocator);

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto impl = c10::make_intrusive<at::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  at::Tensor made(std::move(impl));
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// Does `visit` for each tensor of it, and returns it with what that returns in their place.
c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& visit) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(visit(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(each.defined() ? visit(each) : each);
    return list;
  }
  if (!value.isList()) return value;
  const auto from = value.toList();
  c10::impl::GenericList list(from.elementType());
  for (const c10::IValue& each : from) list.push_back(with_tensors(each, visit));
  return list;
}

bool writes_to(const c10::Argument& argument) {
  const c10::AliasInfo* alias = argument.alias_info();
  if (alias == nullptr) return false;
  const auto& inner = alias->containedTypes();
  return alias->isWrite() || std::any_of(inner.begin(), inner.end(), [](const auto& each) { return each.isWrite(); });
}

// Beside what schemas say: running means and variances.
bool writes_to(const c10::FunctionSchema& schema, const Stack& args, size_t argument) {
  constexpr size_t kMean = 3, kVariance = 4, kIsTraining = 5;
  const bool is_running = schema.name() == "aten::native_batch_norm" && (argument == kMean || argument == kVariance);
  return is_running ? args[kIsTraining].toBool() : writes_to(schema.arguments()[argument]);
}

bool is_view(const c10::FunctionSchema& schema) {
  const auto is_alias = [](const c10::Argument& each) { return each.alias_info() != nullptr && !writes_to(each); };
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), is_alias);
}

bool leaves_memory_as_it_is(const c10::FunctionSchema& schema) { return schema.name().starts_with("aten::empty"); }

bool is_read_later(const Stack& args_of_copy) {
  const at::Tensor& source = args_of_copy[1].toTensor();
  return !source.is_cuda() && args_of_copy[2].toBool() && source.is_pinned();
}

// The host needs a number of it, or its memory.
bool waits_for_device(const c10::OperatorHandle& op, const Stack& args) {
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) return true;
  if (op.schema().name() != "aten::copy_") return false;
  return !args[0].toTensor().is_cuda() || (!args[1].toTensor().is_cuda() && !is_read_later(args));
}

// As the tensor cores of a GPU read numbers; the switch as it is when the operator is given.
bool rounds_to_tf32(const c10::FunctionSchema& schema) {
  static const std::set<std::string> products = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  return products.contains(schema.name()) &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
}

// One operator on the host's tensors over the device's memory, of which it holds none.
struct Kernel {
  c10::OperatorHandle op;
  Stack args{};
  std::vector<size_t> rounded{};  // arguments

  Stack run() const {
    const auto round = [](const at::Tensor& tensor) {
      return tensor.scalar_type() == at::kFloat ? tensor.to(at::kBFloat16).to(at::kFloat) : tensor;
    };
    Stack stack = args;
    for (const size_t i : rounded) stack[i] = with_tensors(stack[i], round);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }
};

// What a kernel makes anew: the position among all tensors that it returns, and the memory.
using Made = std::vector<std::pair<size_t, BlockPtr>>;

void run_again(const Kernel& kernel, const Made& made) {
  size_t position = 0;
  for (const c10::IValue& value : kernel.run()) {
    with_tensors(value, [&](const at::Tensor& tensor) {
      for (const auto& [at_position, block] : made) {
        if (at_position == position) std::memcpy(block->data, tensor.storage().data(), tensor.storage().nbytes());
      }
      ++position;
      return tensor;
    });
  }
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& args) : kernel_{op} {
    const bool rounds = rounds_to_tf32(op.schema());
    for (size_t i = 0; i < args.size(); ++i) {
      const bool is_written = writes_to(op.schema(), args, i);
      if (rounds && !is_written) kernel_.rounded.push_back(i);
      const auto twin = [&](const at::Tensor& tensor) { return twin_of(tensor, is_written); };
      kernel_.args.push_back(args[i].isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : with_tensors(args[i], twin));
    }
  }

  /// Returns what the operator does, with tensors of the device.
  Stack run(Recording* recording) {
    const c10::FunctionSchema& schema = kernel_.op.schema();
    if (recording != nullptr) recording->keep(writes_);
    Stack results = kernel_.run();
    take_resized();
    for (c10::IValue& value : results) value = with_tensors(value, [&](const at::Tensor& made) { return result_of(made); });
    if (is_view(schema) || leaves_memory_as_it_is(schema)) return results;
    std::vector<Range> writes = writes_;
    for (const auto& [position, block] : made_) writes.push_back({block, 0, block->bytes});
    if (recording == nullptr) {
      Gpu::the().launch(schema.name(), reads_, writes);
    } else {
      for (const auto& [position, block] : made_) recording->made.insert(block);
      recording->launches.push_back(
          {schema.name(), reads_, writes, [kernel = kernel_, made = made_] { run_again(kernel, made); }});
    }
    return results;
  }

 private:
  struct Twin {
    c10::Storage of_device, of_host;
  };

  at::Tensor twin_of(const at::Tensor& tensor, bool is_written) {
    if (!tensor.is_cuda()) return tensor;
    const c10::Storage& storage = tensor.storage();
    const auto item = static_cast<int64_t>(tensor.itemsize()), begin = tensor.storage_offset() * item;
    const auto end = static_cast<int64_t>(
        at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset()));
    for (const Range& range : Gpu::the().ranges(static_cast<const char*>(storage.data()) + begin, end - begin)) {
      (is_written ? writes_ : reads_).push_back(range);
    }
    auto twin =
        std::find_if(twins_.begin(), twins_.end(), [&](const Twin& each) { return each.of_device.is_alias_of(storage); });
    if (twin == twins_.end()) {
      const c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(),
                              c10::DataPtr(const_cast<void*>(storage.data()), c10::kCPU), c10::GetAllocator(c10::kCPU),
                              /*resizable=*/true);
      twin = twins_.insert(twins_.end(), {storage, host});
    }
    const at::Tensor on_host = tensor_over(twin->of_host, c10::DispatchKey::CPU, tensor);
    tensors_.emplace_back(tensor, on_host);
    return on_host;
  }

  // The CPU's allocator has given more memory to a result.
  void take_resized() {
    for (const Twin& twin : twins_) {
      if (twin.of_host.nbytes() == twin.of_device.nbytes()) continue;
      const size_t num_bytes = twin.of_host.nbytes();
      c10::DataPtr memory = Gpu::the().allocate(static_cast<int64_t>(num_bytes));
      if (num_bytes > 0) std::memcpy(memory.get(), twin.of_host.data(), num_bytes);
      for (const Range& range : Gpu::the().ranges(memory.get(), static_cast<int64_t>(num_bytes))) writes_.push_back(range);
      twin.of_host.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(memory.get(), c10::kCPU));
      twin.of_device.unsafeGetStorageImpl()->set_data_ptr(std::move(memory));
      twin.of_device.unsafeGetStorageImpl()->set_nbytes(num_bytes);
    }
  }

  at::Tensor result_of(const at::Tensor& made) {
    const size_t position = position_++;
    for (const auto& [of_device, of_host] : tensors_) {
      if (!made.is_same(of_host)) continue;
      of_device.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
      return of_device;
    }
    for (const c10::IValue& given : kernel_.args) {
      if (given.isTensor() && given.toTensor().is_same(made)) return made;  // of the host
    }
    for (const Twin& twin : twins_) {
      if (twin.of_host.is_alias_of(made.storage())) return tensor_over(twin.of_device, c10::DispatchKey::CUDA, made);
    }
    const size_t num_bytes = made.storage().nbytes();
    const c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, the_allocator.allocate(num_bytes), &the_allocator,
                               /*resizable=*/true);
    if (num_bytes > 0 && !leaves_memory_as_it_is(kernel_.op.schema())) {
      std::memcpy(storage.mutable_data(), made.storage().data(), num_bytes);
    }
    if (BlockPtr block = Gpu::the().find(storage.data())) made_.emplace_back(position, std::move(block));
    twins_.push_back({storage, made.storage()});  // for others of the results that share it
    return tensor_over(storage, c10::DispatchKey::CUDA, made);
  }

  Kernel kernel_;
  std::vector<Twin> twins_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // of the device, of the host
  std::vector<Range> reads_, writes_;
  Made made_;
  size_t position_ = 0;
};

void on_fake_gpu(const c10::OperatorHandle& op, Stack* stack) {
  const size_t num_args = op.schema().arguments().size();
  const Stack args(stack->end() - static_cast<int64_t>(num_args), stack->end());
  const bool waits = waits_for_device(op, args);
  Recording* const recording = Recording::of_thread();
  TORCH_CHECK(!waits || recording == nullptr, op.schema().name(), " waits for the device, which no recording holds");
  Stack results = Call(op, args).run(recording);
  stack->erase(stack->end() - static_cast<int64_t>(num_args), stack->end());
  for (c10::IValue& result : results) stack->push_back(std::move(result));
  if (waits) Gpu::the().wait(Gpu::the().record(Gpu::current()));
  if (op.schema().name() == "aten::copy_" && is_read_later(args)) Gpu::the().reads_later(args[1].toTensor().storage());
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_fake_gpu>()); }

// Which LibTorch makes of kernels that it looks for by the device, and not of operators.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("set_.source_Storage", [](at::Tensor& self, c10::Storage source) -> at::Tensor& {
    const auto num_elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
    self.unsafeGetTensorImpl()->set_sizes_contiguous({num_elements});
    return self;
  });
  for (const char* name : {"copy_", "convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_fake_gpu>());
  }
}

}  // namespace

Recording::Recording() { recording_of_thread = this; }

Recording::~Recording() {
  recording_of_thread = nullptr;
  for (const auto& [block, bytes] : kept_) std::memcpy(block->data, bytes.data(), bytes.size());
  for (const BlockPtr& block : made) std::memset(block->data, kGarbage, static_cast<size_t>(block->bytes));
}

Recording* Recording::of_thread() { return recording_of_thread; }

void Recording::keep(const std::vector<Range>& ranges) {
  for (const auto& [block, begin, end] : ranges) kept_.try_emplace(block, block->data, static_cast<size_t>(block->bytes));
}

}  // namespace smp::fake_gpu
