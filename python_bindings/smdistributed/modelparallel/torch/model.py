"""DistributedModel: a module whose parameters are spread over the ranks by the first step."""

import gc
import weakref

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.comm import CommGroup, allgather
from smdistributed.modelparallel.torch.views import ModelView

_models = weakref.WeakSet()
_engine_models = {}  # what the engine has of models, by the order in which they were made
_gone = set()  # of them, those that nobody on this rank has any more


class DistributedModel(torch.nn.Module):
    """Wraps `module`. Within a step function it is called like the module, and `backward` takes the place of loss.backward().

    overlapping_allreduce, bucket_cap_mb, average_grads_across_microbatches, broadcast_buffers, backward_passes_per_step: as
    in C++ (smp/options.h). trace_device, trace_execution_times, trace_memory_usage, gradient_as_bucket_view: accepted, without
    effect, since the capture runs no operator.
    """

    def __init__(
        self,
        module,
        trace_device="gpu",
        trace_execution_times=False,
        trace_memory_usage=False,
        overlapping_allreduce=True,
        backward_passes_per_step=1,
        average_grads_across_microbatches=True,
        bucket_cap_mb=25,
        broadcast_buffers=True,
        gradient_as_bucket_view=False,
    ):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedModel: expected a torch.nn.Module, got {type(module).__name__}.")
        super().__init__()
        _remove_gone()
        options = _engine.ModelOptions()
        options.overlapping_allreduce = overlapping_allreduce
        options.bucket_cap_mb = bucket_cap_mb
        options.average_grads_across_microbatches = average_grads_across_microbatches
        options.broadcast_buffers = broadcast_buffers
        options.backward_passes_per_step = backward_passes_per_step
        self._engine_model = _engine.add_model(ModelView(module), options)
        self.module = module
        self.training = module.training
        _models.add(self)
        number = max(_engine_models, default=-1) + 1
        _engine_models[number] = self._engine_model
        weakref.finalize(self, _gone.add, number).atexit = False

    def forward(self, *args, **kwargs):
        _engine.check_in_body(self._engine_model)
        return self.module(*args, **kwargs)

    def backward(self, tensors, grad_tensors=None):
        """In a step function: `tensors` is the loss that the gradients are of."""
        if grad_tensors is not None or not isinstance(tensors, torch.Tensor):
            raise NotImplementedError(
                "backward: expected one loss and no grad_tensors, got "
                f"{type(tensors).__name__} and {type(grad_tensors).__name__}. Sum the losses, each times its gradient."
            )
        _engine.mark_backward(tensors)

    @property
    def partitioned(self):
        """Whether the first step has spread the parameters."""
        return _engine.is_partitioned(self._engine_model)

    def local_named_parameters(self):
        """(name, parameter) of those whose values are on this rank; after the first step."""
        return iter(_engine.local_named_parameters(self._engine_model))

    def local_parameters(self):
        return (parameter for _, parameter in self.local_named_parameters())

    def state_dict(self, *, gather_to_rank0=False):
        """Copies of all parameters and buffers under the module's own names. Collective over the pipeline."""
        tensors = dict(_engine.state_dict(self._engine_model))
        if gather_to_rank0 and _engine.mp_rank() != 0:
            return {}
        state = self.module.state_dict(keep_vars=True)  # its order, and what is in it beside tensors of the model
        for name in state:
            state[name] = tensors.get(name, state[name])
        return state

    def get_module(self):
        return self.module

    @property
    def plan(self):
        """What each stage runs, as a table; empty before the first step."""
        return _engine.plan_text(self._engine_model)


def _remove_gone():
    """When a model is made: those that are gone on all ranks. When an object goes is each interpreter's own affair."""
    gc.collect()
    for number in set.intersection(*allgather(_gone, CommGroup.WORLD)):
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
