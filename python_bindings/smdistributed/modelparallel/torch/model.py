"""DistributedModel: a module whose parameters are spread over the ranks by the first step."""

import gc
import json
import sys
import weakref

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import loss_of_trainer, ranks_of_accelerate, state_dicts, state_mod, workers
from smdistributed.modelparallel.torch.comm import gathered
from smdistributed.modelparallel.torch.delayed import initialize_parameters
from smdistributed.modelparallel.torch.members import Members, Replicated
from smdistributed.modelparallel.torch.plan import Plan
from smdistributed.modelparallel.torch.registered import SharedMemory, changed_in, put_back, registered_in
from smdistributed.modelparallel.torch.views import ModelView

_models = weakref.WeakSet()
_engine_models = {}  # what the engine has of models, by the order in which they were made
_gone = set()  # of them, those that nobody on this rank has any more


class DistributedModel(Members, torch.nn.Module):
    """Wraps `module`. Within a step function it is called like the module, and `backward` takes the place of loss.backward().
    Made on all ranks, after smp.init.

    overlapping_allreduce, bucket_cap_mb, average_grads_across_microbatches, broadcast_buffers, backward_passes_per_step: as
    in C++ (smp/options.h); bucket_cap_mb 0 is the configuration's. The others are accepted, without effect: the capture runs no
    operator, and parameters may be unused.
    """

    _uneven_rows = None  # of the microbatches of the step whose body runs, where they differ
    _hooked = ()  # the parameters with gradient hooks when that step began: (name, parameter, hooks)

    def __init__(
        self,
        module,
        trace_device="gpu",
        trace_execution_times=False,
        trace_memory_usage=False,
        overlapping_allreduce=True,
        backward_passes_per_step=1,
        average_grads_across_microbatches=True,
        bucket_cap_mb=0,
        broadcast_buffers=True,
        gradient_as_bucket_view=False,
        find_unused_parameters=False,
    ):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedModel: expected a torch.nn.Module, got {type(module).__name__}.")
        compiled, module = module, _uncompiled(module)
        super().__init__()
        self._compiled = () if compiled is module else (compiled,)  # in a tuple, it is no submodule
        if not _engine.is_initialized():
            raise RuntimeError(f"DistributedModel: expected smp.init() to have been called, got no context. {workers.how_to_begin()}")
        ranks_of_accelerate.check()
        loss_of_trainer.check()
        _remove_gone()
        options = _engine.ModelOptions()
        options.overlapping_allreduce = overlapping_allreduce
        options.bucket_cap_mb = bucket_cap_mb
        options.average_grads_across_microbatches = average_grads_across_microbatches
        options.broadcast_buffers = broadcast_buffers
        options.backward_passes_per_step = backward_passes_per_step
        self._engine_model = _engine.add_model(ModelView(module), options)
        config = json.loads(_engine.config())
        if config["parallelism"] == "manual" and _engine.pp_size() == 1:  # where it may be called outside of steps
            initialize_parameters(module)
        self.module = Replicated(module) if config["ddp"] else module
        self.training = module.training
        self._averages_microbatches = average_grads_across_microbatches
        self._optimizers = []  # weak references to those that were made for it
        self._make_hooks(weakref.ref(self), check_registered)
        self._registered = registered_in(module)
        self._shared_memory = SharedMemory(module)
        _models.add(self)
        state_mod.state.note_model(self)
        number = max(_engine_models, default=-1) + 1
        _engine_models[number] = self._engine_model
        weakref.finalize(self, _gone.add, number).atexit = False

    def forward(self, *args, **kwargs):
        if self._runs_bare():
            return self.module(*args, **kwargs)
        _engine.check_in_body(self._engine_model)
        return self.module(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = None if name.startswith("_") or "module" not in self._modules else self.get_module()
            if module is None or not hasattr(module, name):
                raise
            raise AttributeError(f"{error}; the module that it wraps has: write model.get_module().{name}") from None

    def _runs_bare(self):
        """Outside of steps a module that is whole here is an ordinary one, as far as no replica has to hear of its gradients."""
        if _engine.is_in_body() or _engine.pp_size() > 1:
            return False
        return _engine.dp_size() == 1 or (self.partitioned and not torch.is_grad_enabled())

    def backward(self, tensors, grad_tensors=None):
        """In a step function, what torch.autograd.backward(tensors, grad_tensors) does: `tensors` is the loss that the gradients
        are of, or several tensors, each with its gradient of the same shape (None for one of one element). The sum of all tensors
        times their gradients is the step's loss, and finite."""
        if self._uneven_rows is not None:
            raise ValueError(
                f"DistributedModel.backward: expected microbatches of as many rows each, whose mean the gradients are, got "
                f"{self._uneven_rows} rows. Leave the last batch out of training (drop_last=True), or pad it."
            )
        check_gradient_hooks()
        _engine.mark_backward(_loss_of(tensors, grad_tensors))

    @property
    def partitioned(self):
        """Whether the first step has spread the parameters."""
        return _engine.is_partitioned(self._engine_model)

    def state_dict(self, gather_to_rank0=False):
        """Copies of all parameters and buffers under the module's own names. Collective over the pipeline."""
        check_registered("state_dict")
        tensors, steps = _engine.state_dict(self._engine_model)
        return {} if gather_to_rank0 and _engine.mp_rank() != 0 else state_dicts.whole(self.get_module(), tensors, steps)

    def local_state_dict(self):
        """What is on this rank of it, with `_smp_is_partial`."""
        check_registered("local_state_dict")
        return state_dicts.part(self.get_module(), *_engine.local_state_dict(self._engine_model))

    def load_state_dict(self, state_dict, strict=True, same_partition_load=False):
        """What state_dict() returns, or local_state_dict() on each rank, under the module's own names. Collective over all ranks:
        what those of dp_rank() 0 pass is put together. same_partition_load is without effect: values move only where their
        rank did not bring them."""
        return state_dicts.load(self, state_dict, strict, check_registered)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scales the gradients of all ranks down to one global norm of at most `max_norm`; returns what it was. Collective over
        the pipeline. torch.nn.utils.clip_grad_norm_ does the same for model.parameters()."""
        return _engine.clip_grad_norm(self._engine_model, max_norm, norm_type)

    def check_replicas(self):
        """Compares the parameters of all replicas, bit by bit, and raises RuntimeError on every rank with the first that differs.
        Collective over all ranks; after the first step."""
        _engine.check_replicas(self._engine_model)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "DistributedModel: expected neither copies nor pickles of one, whose parameters are on several ranks. Copy the module "
            "before it is wrapped; what it has learned since is model.state_dict(), which the copy loads, and smp.save_checkpoint."
        )

    def _last_optimizer(self):
        return self._optimizers[-1]() if self._optimizers else None

    def get_module(self):
        """The module that was wrapped."""
        return self.module.module if isinstance(self.module, Replicated) else self.module

    @property
    def plan(self):
        """What each stage runs, as a table; empty before the first step."""
        return Plan(_engine.plan_text(self._engine_model), _engine.plan_json(self._engine_model))


def _uncompiled(module):
    """Of torch.compile the original: that is captured, and names its parameters."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    if compiler is None or not isinstance(module, compiler.OptimizedModule):
        return module
    _refuse_hooks("DistributedModel", module)
    return module._orig_mod


def _refuse_hooks(caller, compiled):
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    own = [name for name in hooks if vars(compiled)[name]]
    forward = vars(compiled).get("_forward", compiled.forward)  # the former where the original was lazy
    if not hasattr(forward, "_torchdynamo_orig_callable"):
        own.append("forward")
    if own:
        raise ValueError(
            f"{caller}: expected hooks on the module that torch.compile was given, got {', '.join(own)} of the compiled one, which "
            "no step calls. Put them on the module itself, before or after that."
        )


def check_hooks():
    """Before a step, as when models were wrapped."""
    for model in _models:
        for compiled in model._compiled:
            _refuse_hooks("step", compiled)


def note_gradient_hooks():
    """Before the bodies of a step: the engine sees the first hook on a tensor alone, Python's others are within that."""
    named = (pair for model in _models for pair in model.get_module().named_parameters())
    DistributedModel._hooked = [(name, each, _gradient_hooks(each)) for name, each in named if _gradient_hooks(each)]


def check_gradient_hooks():
    for name, parameter, before in DistributedModel._hooked:
        if _gradient_hooks(parameter) != before:
            raise NotImplementedError(
                f"step: expected the body to leave the gradient hooks of '{name}' as they are, got a change. The backward runs after the body, "
                "on the rank where the parameter is. Hook it outside of the step, on every rank."
            )


def _gradient_hooks(parameter):
    """By the numbers that torch gives them."""
    return [*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())]


def _loss_of(tensors, gradients):
    """The scalar that has these gradients."""
    tensors = tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)
    if gradients is None:
        gradients = (None,) * len(tensors)
    gradients = tuple(gradients) if isinstance(gradients, (list, tuple)) else (gradients,)
    for each in (*tensors, *(gradient for gradient in gradients if gradient is not None)):
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"backward: expected tensors, got {type(each).__name__}. A model without labels returns no loss.")
    if not tensors or len(gradients) != len(tensors):
        raise ValueError(
            f"backward: expected a gradient for each tensor, got {len(tensors)} tensors and {len(gradients)} gradients. Pass None "
            "as that of a scalar."
        )
    if len(tensors) == 1 and gradients[0] is None:
        return tensors[0]
    loss = 0
    for number, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        if gradient is None:
            gradient = torch.ones_like(tensor) if tensor.numel() == 1 else torch.ones(())
        if tensor.shape != gradient.shape or tensor.is_complex() != gradient.is_complex() or not tensor.requires_grad:
            raise ValueError(
                f"backward: expected tensor {number} to require a gradient, and to be of its gradient's shape and as complex, got "
                f"{_kind(tensor)}, with requires_grad={tensor.requires_grad}, and {_kind(gradient)}."
            )
        product = (tensor * gradient.detach().conj()).sum()
        loss = loss + (product.real if product.is_complex() else product)
    return loss


def _kind(tensor):
    return f"{tensor.dtype} of sizes {tuple(tensor.shape)}"


def check_registered(caller=""):
    """Before a step, and where state is asked for: the engine knows the tensors that models had when they were wrapped."""
    replaced = [name for model in _models for names, _, _ in _replaced_in(model) for name in names]
    if replaced:
        raise ValueError(
            f"{caller and caller + ': '}expected the parameters and buffers that the models had when they were wrapped, got "
            f"others for {', '.join(replaced)}. Write to them in place (self.mean.copy_(new)), and convert modules before "
            "DistributedModel."
        )
    shared = [name for model in _models for name in model._shared_memory.shared_since(model.partitioned)]
    if shared:
        raise ValueError(
            f"{caller and caller + ': '}expected parameters and buffers with memory of their own, unless they shared it in the first "
            f"step, which puts those on the same ranks, got {', '.join(shared)} on the same. Tie them before that (head.weight = "
            "embedding.weight), or give each its own (head.weight.data = new.clone())."
        )


def put_back_registered():
    """After bodies: what they put in place of parameters and buffers holds no data. Returns the names."""
    found = [each for model in _models for each in _replaced_in(model)]
    for _, registered, before in found:
        put_back(registered, before)
    return [name for names, _, _ in found for name in names]


def all_models():
    """Those that are in use."""
    return list(_models)


def only_model():
    """The one model that there is."""
    if len(_models) != 1:
        raise ValueError(
            f"expected one DistributedModel in this process, got {len(_models)}. Pass the one that is meant: model=..."
        )
    return next(iter(_models))


def _replaced_in(model):
    """(names of tensors, the dictionary of a module that they are in, what that had when the model was wrapped)"""
    for changed, registered, before in changed_in(model._registered):
        names = [other for name, (had, has) in changed.items() for other in _others(name, had, has)]
        if names:
            yield names, registered, before


def _others(name, before, now):
    """What is there now under names of tensors. Modules without tensors come and go: a body runs their code as it is."""
    if not isinstance(before, torch.nn.Module) and not isinstance(now, torch.nn.Module):
        return [name]
    had, has = (_tensors_of(each) if isinstance(each, torch.nn.Module) else {} for each in (before, now))
    return [f"{name}.{own}" for own, tensor in has.items() if had.get(own) is not tensor]


def _tensors_of(module):
    return {name: tensor for name, tensor, *_ in ModelView(module).tensors()}


def _remove_gone():
    """When a model is made: those that are gone on all ranks. When an object goes is each interpreter's own affair."""
    gc.collect()
    for number in set.intersection(*gathered("DistributedModel", _gone)):
        _engine.remove_model(_engine_models.pop(number))
        _gone.discard(number)


def model_of(parameters):
    """The model that has these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    for model in _models:
        if wanted <= {id(parameter) for parameter in model.parameters()}:
            return model
    raise ValueError(
        f"DistributedOptimizer: expected parameters of one DistributedModel, got {len(wanted)} of which no model has all. Wrap "
        "the module first, and give each model an optimizer of its own."
    )
