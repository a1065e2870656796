// The module _engine: smp/engine/engine.h and the calls beside it, for the package around it and nobody else.
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "python_bindings/extension/handles.h"
#include "python_bindings/extension/interpreter.h"
#include "python_bindings/extension/opaque.h"
#include "python_bindings/extension/state.h"
#include "python_bindings/extension/step.h"
#include "python_bindings/extension/texts.h"
#include "python_bindings/extension/views.h"
#include "runtime/transport/error.h"
#include "smp/comm.h"
#include "smp/engine/engine.h"
#include "smp/init.h"
#include "smp/partition.h"

namespace smp::python {
namespace {

/// A function that takes and returns plain values, called without the lock.
template <class Result, class... Args>
auto without_lock(Result (*function)(Args...)) {
  return [function](Args... args) { return unlocked([&] { return function(args...); }); };
}

constexpr std::pair<const char*, int (*)()> kNumbers[] = {
    {"rank", &rank},         {"size", &size},        {"local_rank", &local_rank}, {"local_size", &local_size},
    {"pp_rank", &pp_rank},   {"pp_size", &pp_size},  {"dp_rank", &dp_rank},       {"dp_size", &dp_size},
    {"mp_rank", &mp_rank},   {"mp_size", &mp_size},  {"tp_rank", &tp_rank},       {"tp_size", &tp_size},
    {"rdp_rank", &rdp_rank}, {"rdp_size", &rdp_size}};

/// In a process that works for a rank, and is none itself: what that rank answers. Empty in all others.
using Numbers = std::map<std::string, int>;
Numbers& numbers_of_rank() {
  static Numbers numbers;
  return numbers;
}

void bind_job(py::module_& module) {
  module.def("init", [](const std::string& json) {
    // All errors at once; init lays the environment over it once more.
    const Config config = with_exit_code(ExitCode::kUsage, [&] { return Config::resolve_json(json); });
    unlocked([&] { init(config); });
    numbers_of_rank().clear();  // of a process that has run the top of the script as a worker, before it was told its rank
  });
  module.def("init_again", [](const std::string& json) { unlocked([&] { engine::init_again(json); }); });
  module.def("be_worker", [](Numbers of_rank, std::string refusal) {
    numbers_of_rank() = std::move(of_rank);
    engine::explain_absence(std::move(refusal));
  });
  module.def("shutdown", without_lock(&shutdown));
  module.def("is_initialized", &is_initialized);
  module.def("stop_requested", without_lock(&stop_requested));
  module.def("answer_with_stack", [](const py::function& add) { engine::answer_with_stack([&](int file) { add(file); }); });
  module.def("config", [] { return config().to_json(); });
  module.def("default_config", [] { return Config().to_json(); });
  // write(is_warning, message, file, line), kept as long as the process: at its end there is no interpreter to give it back
  // to.
  module.def("set_log_sink", [](py::function write) {
    engine::set_log_sink([kept = write.release()](LogLevel severity, std::string_view message, std::string_view file,
                                                  int line) {
      const py::gil_scoped_acquire lock;
      try {
        kept(severity == LogLevel::kWarning, in_python(std::string(message)), file, line);
      } catch (py::error_already_set& error) {  // a handler of the script; the engine goes on, as without anybody to read
        error.discard_as_unraisable("a log message of smp");
      }
    });
  });
  module.def("is_in_body", &engine::is_in_body);
  module.def("device_type", &engine::device_type);
  module.def("refuse_in_body", [](std::string_view caller) { engine::refuse_in_body(caller); });
  module.def("launched_local_size", &engine::launched_local_size);
  for (const auto& [name, function] : kNumbers) {
    module.def(name, [own = std::string(name), answer = function] {
      const auto known = numbers_of_rank().find(own);
      return known == numbers_of_rank().end() ? answer() : known->second;
    });
  }
  module.def("get_world_group", &get_world_group), module.def("get_mp_group", &get_mp_group);
  module.def("get_dp_group", &get_dp_group), module.def("get_pp_group", &get_pp_group);
  module.def("get_tp_group", &get_tp_group), module.def("get_rdp_group", &get_rdp_group);
}

void bind_comm(py::module_& module) {
  py::enum_<CommGroup>(module, "CommGroup")
      .value("WORLD", WORLD)
      .value("MP_GROUP", MP_GROUP)
      .value("DP_GROUP", DP_GROUP)
      .value("PP_GROUP", PP_GROUP)
      .value("TP_GROUP", TP_GROUP)
      .value("RDP_GROUP", RDP_GROUP);
  py::enum_<RankType>(module, "RankType")
      .value("WORLD_RANK", WORLD_RANK)
      .value("MP_RANK", MP_RANK)
      .value("DP_RANK", DP_RANK)
      .value("PP_RANK", PP_RANK)
      .value("TP_RANK", TP_RANK)
      .value("RDP_RANK", RDP_RANK);
  module.def("barrier", [](CommGroup group) { unlocked([&] { barrier(group); }); });
  // Objects travel pickled, as a type of their own: C++ ranks of the same job see that they cannot read them.
  static const std::string kPickled = "a Python object";
  module.def("send", [](const std::string& bytes, int dest, RankType type) {
    comm_internal::check_call("smp.send");
    unlocked([&] { comm_internal::send_bytes(bytes, kPickled, dest, type); });
  });
  module.def("recv_from", [](int source, RankType type) {
    comm_internal::check_call("smp.recv_from");
    return py::bytes(unlocked([&] { return comm_internal::receive_bytes(kPickled, source, type); }));
  });
  module.def("broadcast", [](const std::string& bytes, CommGroup group) {
    comm_internal::check_call("smp.broadcast");
    unlocked([&] { comm_internal::broadcast_bytes(bytes, kPickled, group); });
  });
  module.def("allgather", [](const std::string& bytes, CommGroup group, const std::string& call) {
    comm_internal::check_call("smp.allgather");
    py::list objects;
    for (const std::string& each : unlocked([&] { return comm_internal::all_gather_bytes(bytes, kPickled, group, call); })) {
      objects.append(py::bytes(each));
    }
    return objects;
  });
}

void bind_models(py::module_& module) {
  py::class_<ModelOptions>(module, "ModelOptions")
      .def(py::init<>())
      .def_readwrite("overlapping_allreduce", &ModelOptions::overlapping_allreduce)
      .def_readwrite("bucket_cap_mb", &ModelOptions::bucket_cap_mb)
      .def_readwrite("average_grads_across_microbatches", &ModelOptions::average_grads_across_microbatches)
      .def_readwrite("broadcast_buffers", &ModelOptions::broadcast_buffers)
      .def_readwrite("backward_passes_per_step", &ModelOptions::backward_passes_per_step);
  py::class_<ModelHandle>(module, "Model");
  module.def("add_model", [](py::object view, const ModelOptions& options) {
    return unlocked([&, model = model_view(std::move(view))] { return ModelHandle{engine::add_model(model, options)}; });
  });
  module.def("remove_model", [](const ModelHandle& own) { unlocked([&] { engine::remove_model(*own.model); }); });
  module.def("check_in_body", [](const ModelHandle& own) { engine::check_in_body(*own.model); });
  module.def("mark_backward", [](const at::Tensor& loss) { unlocked([&] { engine::mark_backward(loss); }); });
  module.def("look_at", [](const at::Tensor& tensor, const py::function& look) {
    const auto locked_look = [&](const at::Tensor& content) {
      const py::gil_scoped_acquire lock;
      look(content);
    };
    return unlocked([&] { return engine::look_at(tensor, locked_look); });
  });
  module.def("values_read", &engine::values_read);
  module.def("is_capturing", &engine::is_capturing);
  module.def("enter_recompute_region", &engine::enter_recompute_region);
  module.def("leave_recompute_region", &engine::leave_recompute_region);
  module.def("autograd_called", &engine::autograd_called);
  module.def("is_partitioned", [](const ModelHandle& own) { return engine::is_partitioned(*own.model); });
  module.def("local_named_parameters", [](const ModelHandle& own) {
    return engine::local_named_parameters("local_named_parameters", *own.model,
                                          "The body sees all parameters: use model.named_parameters().");
  });
  module.def("local_named_buffers", [](const ModelHandle& own) {
    return engine::local_named_buffers("local_named_buffers", *own.model,
                                       "The body sees all buffers: use model.named_buffers().");
  });
  module.def("clip_grad_norm", [](const ModelHandle& own, double max_norm, double norm_type) {
    return unlocked([&] { return engine::clip_grad_norm(*own.model, max_norm, norm_type); });
  });
  module.def("check_replicas", [](const ModelHandle& own) { unlocked([&] { engine::check_replicas(*own.model); }); });
  py::class_<PartitionGuard>(module, "PartitionGuard").def(py::init<int>());
  module.def("set_partition", &engine::set_partition);
  module.def("timeline_drawing", &engine::timeline_drawing);
  module.def("plan_text", [](const ModelHandle& own) { return in_python(engine::plan_text(*own.model)); });
  module.def("plan_json", [](const ModelHandle& own) { return engine::plan_json(*own.model); });
}

/// A `with` statement's scope; what it switches on is its thread's.
class Delay {
 public:
  ~Delay() {
    if (thread_ != std::this_thread::get_id()) static_cast<void>(construction_.release());  // it went with its thread
  }
  void end() {
    TORCH_CHECK(
        thread_ == std::this_thread::get_id(),
        "smp.delay_param_initialization: expected its end on the thread of its beginning, got another thread. Put the "
        "with statement into one function.");
    construction_.reset();
  }

 private:
  std::thread::id thread_ = std::this_thread::get_id();
  std::unique_ptr<engine::DelayedConstruction> construction_ = std::make_unique<engine::DelayedConstruction>();
};

void bind_delay(py::module_& module) {
  py::class_<Delay>(module, "Delay").def(py::init<>()).def("end", &Delay::end);
  module.def("in_python", &in_python);
  module.def("has_values", &engine::has_values);
  module.def("make_values", [](const std::vector<at::Tensor>& tensors) { unlocked([&] { engine::make_values(tensors); }); });
}

/// What the program does around steps: hooks, and replicas.
void bind_hooks(py::module_& module) {
  module.def("add_hooks", [](const ModelHandle& own, py::object after_partition, py::object after_first_step) {
    const auto add = [&](engine::Moment moment, py::object function) {
      engine::add_hook("DistributedModel", *own.model, moment, [kept = keep(std::move(function))] {
        const py::gil_scoped_acquire lock;
        (*kept)();
      });
    };
    add(engine::Moment::kAfterPartition, std::move(after_partition));
    add(engine::Moment::kAfterFirstStep, std::move(after_first_step));
  });
  // hook(gradients, index, is_last), or None
  module.def("register_comm_hook", [](const ModelHandle& own, py::object function) {
    CommHook hook;
    if (!function.is_none()) {
      hook = [kept = keep(std::move(function))](const GradientBucket& bucket) {
        const py::gil_scoped_acquire lock;
        return (*kept)(bucket.gradients, bucket.index, bucket.is_last).cast<at::Tensor>();
      };
    }
    unlocked([&] { engine::register_comm_hook(*own.model, std::move(hook)); });
  });
  module.def("begin_no_sync", [](const ModelHandle& own) { engine::begin_no_sync(*own.model); });
  module.def("end_no_sync", [](const ModelHandle& own) { engine::end_no_sync(*own.model); });
  module.def("begin_join", [](bool divide_by_initial_world_size, bool throw_on_early_termination) {
    const JoinOptions options{.divide_by_initial_world_size = divide_by_initial_world_size,
                              .throw_on_early_termination = throw_on_early_termination};
    unlocked([&] { engine::begin_join(options); });
  });
  module.def("end_join", without_lock(&engine::end_join));
}

void bind_optimizers(py::module_& module) {
  py::class_<OptimizerHandle>(module, "Optimizer");
  module.def("add_optimizer", [](py::object view, const ModelHandle& own) {
    auto seen = optimizer_view(std::move(view));
    return unlocked([&] { return OptimizerHandle{engine::add_optimizer(std::move(seen), own.model)}; });
  });
  module.def("gathered_entries", [](const engine::OptimizerEntries& entries) {
    return unlocked([&] { return engine::gathered_entries(entries); });
  });
  module.def("forget_state_of_others",
             [](const OptimizerHandle& own) { unlocked([&] { engine::forget_state_of_others(*own.optimizer); }); });
  module.def("begin_update", [](const OptimizerHandle& own, bool has_finite_gradients) {
    return unlocked([&] { return engine::begin_update(*own.optimizer, has_finite_gradients); });
  });
  module.def("run_update", [](const OptimizerHandle& own, const py::function& update) {
    py::object returned;
    unlocked([&] {
      engine::run_update(*own.optimizer, [&] {
        const py::gil_scoped_acquire lock;
        returned = update();
      });
    });
    return returned;
  });
}

// Errors of C++ are those that torch makes of its own; failures of others keep their type, since report_failure asks for it.
void bind_errors(py::module_& module) {
  static const py::exception<CommError> comm(module, "CommError", PyExc_RuntimeError);
  static const py::exception<AbortedError> aborted(module, "AbortedError", comm.ptr());
  static const py::exception<PeerLostError> lost(module, "PeerLostError", comm.ptr());
  static const py::exception<HangError> hang(module, "HangError", comm.ptr());
  static thread_local std::exception_ptr failure;  // the last of another rank or a wait, for report_failure
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (!error) return;
    try {
      std::rethrow_exception(error);
    } catch (const AbortedError& e) {
      failure = error;
      py::set_error(aborted, in_python(e.what()).c_str());
    } catch (const PeerLostError& e) {
      failure = error;
      py::set_error(lost, in_python(e.what()).c_str());
    } catch (const HangError& e) {
      failure = error;
      py::set_error(hang, in_python(e.what()).c_str());
    } catch (const CommError& e) {
      py::set_error(comm, in_python(e.what()).c_str());
    } catch (py::error_already_set&) {
      throw;
    } catch (...) {
      torch::translate_exception_to_python(std::current_exception());
      py::error_already_set raised;
      put_in_python(raised);
      if (const ExitCode code = exit_code_of(error); code != ExitCode::kFailed) {
        raised.value().attr("_smp_exit_code") = static_cast<int>(code);
      }
      raised.restore();
    }
  });
  const auto cause_of = [](const std::string& message, bool is_kept) {
    return is_kept && failure ? failure : std::make_exception_ptr(std::runtime_error(message));
  };
  module.def("report_failure", [cause_of](const std::string& message, bool is_kept, std::optional<int> code) {
    const auto cause = code && !is_kept ? std::make_exception_ptr(Coded(std::runtime_error(message), ExitCode{*code}))
                                        : cause_of(message, is_kept);
    return unlocked([&] { return engine::report_failure(cause); });
  });
  module.def("abandon_join", [cause_of](const std::string& message, bool is_of_other_rank) {
    unlocked([&] { engine::abandon_join(cause_of(message, is_of_other_rank)); });
  });
}

}  // namespace

PYBIND11_MODULE(_engine, module) {
  bind_errors(module);
  bind_job(module);
  bind_comm(module);
  bind_models(module);
  bind_state(module);
  bind_delay(module);
  bind_hooks(module);
  bind_optimizers(module);
  bind_step(module);
  bind_opaque(module);
}

}  // namespace smp::python
