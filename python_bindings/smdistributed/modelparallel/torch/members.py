"""What a DistributedModel offers beside steps and state: the share of this rank, hooks, replicas, moves."""

import collections
import contextlib
import json
import traceback

import torch
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import logs
from smdistributed.modelparallel.torch.opaque import check_order


class Members:
    """Mixed into DistributedModel."""

    # The share of this rank: after the first step; before it, everything is here.

    def local_named_parameters(self):
        """(name, parameter) of those whose values are on this rank; after the first step."""
        return iter(_engine.local_named_parameters(self._engine_model))

    def local_parameters(self):
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self):
        """(name, buffer) of those whose values are on this rank. Stages that share one have a copy each."""
        return iter(_engine.local_named_buffers(self._engine_model))

    def local_buffers(self):
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self):
        """(name, module) of those with a parameter or buffer of their own on this rank. What has none is on no rank: plans place
        operators, not modules."""
        here = {id(tensor) for tensors in (self.local_parameters(), self.local_buffers()) for tensor in tensors}
        for name, module in self.get_module().named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if not self.partitioned or any(id(tensor) in here for tensor in own):
                yield name, module

    def local_modules(self):
        return (module for _, module in self.local_named_modules())

    # Hooks, called as hook(model, optimizer) on every rank, in the order of registration. The optimizer is the last one made for
    # the model, None if there is none yet. They may communicate, but not call a step. An exception in one ends the job.

    def register_post_partition_hook(self, hook):
        """Once, in the first step that uses the model: its parameters are placed, no forward has run. Returns a handle with
        remove()."""
        return self._add_hook("register_post_partition_hook", self._after_partition, hook, self.partitioned)

    def register_post_step_hook(self, hook):
        """Once, at the end of the first step that uses the model. Returns a handle with remove()."""
        return self._add_hook("register_post_step_hook", self._after_first_step, hook, self._has_stepped)

    def _make_hooks(self, weak_self, check):
        """weak_self: the engine keeps what it calls until all ranks have let the model go. check(caller) is called after hooks
        that come before a forward."""
        self._after_partition = collections.OrderedDict()
        self._after_first_step = collections.OrderedDict()
        self._has_stepped = False

        def after_partition():
            model = weak_self()  # None where another has taken its place before the first step
            check_order(model and model.get_module())
            if model is not None:
                logs.partitioned(model)
                _call(model, model._after_partition)
                check("register_post_partition_hook")

        def after_first_step():
            model = weak_self()
            if model is not None:
                _call(model, model._after_first_step)
                model._has_stepped = True

        _engine.add_hooks(self._engine_model, after_partition, after_first_step)

    def _add_hook(self, caller, hooks, hook, is_late):
        _engine.refuse_in_body(caller)
        if not callable(hook):
            raise TypeError(f"{caller}: expected a function, got {type(hook).__name__}.")
        if is_late:
            raise RuntimeError(f"{caller}: expected a call before the model's first step, got one after it. It would never run.")
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    # Replicas (docs/data_parallel.md).

    @contextlib.contextmanager
    def no_sync(self):
        """Steps within keep gradients to their replica; the next step outside averages what has added up. On every rank alike.

        with model.no_sync():
            train_step(model, first, labels)
        train_step(model, second, labels)
        """
        _engine.begin_no_sync(self._engine_model)
        try:
            yield
        finally:
            _engine.end_no_sync(self._engine_model)

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        """Around a loop whose number of batches differs between replicas. Those that have fewer keep up with the others, and at
        the end all have parameters, buffers and optimizers of the one with the most steps. Collective over all ranks.

        with model.join():
            for images, labels in loader: ...

        throw_on_early_termination: when the first replica runs out, all raise ValueError, within or from here.
        """
        if not enable:
            yield
            return
        _engine.begin_join(divide_by_initial_world_size, throw_on_early_termination)
        try:
            yield
        except BaseException as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            kept = (_engine.AbortedError, _engine.PeerLostError, _engine.HangError)
            _engine.abandon_join(text, isinstance(error, kept))
            raise
        _engine.end_join()

    def register_comm_hook(self, state, hook):
        """hook(state, bucket) takes the place of the mean over replicas, in steps from now on: it returns a tensor, or a future
        of one, in place of bucket.buffer(). That holds sums over microbatches, whatever average_grads_across_microbatches says:
        the hook divides by their number as well as by dp_size(). None: the mean again. On every rank alike; not called where
        there is one replica.
        """
        if hook is None:
            _engine.register_comm_hook(self._engine_model, None)
            return
        if not callable(hook):
            raise TypeError(f"register_comm_hook: expected a function hook(state, bucket), got {type(hook).__name__}.")
        microbatches = json.loads(_engine.config())["microbatches"] if self._averages_microbatches else 1
        if not isinstance(microbatches, int):
            raise ValueError(
                f"register_comm_hook: expected a number of microbatches, got {microbatches!r}, by which no hook could divide. "
                "Set the key microbatches."
            )

        def on_bucket(gradients, index, is_last):
            returned = hook(state, GradientBucket(gradients * microbatches, index, is_last))
            if isinstance(returned, torch._C.Future):
                returned = returned.wait()
            returned = returned[0] if isinstance(returned, (list, tuple)) else returned
            expected = (gradients.shape, gradients.dtype)
            if not isinstance(returned, torch.Tensor) or (returned.shape, returned.dtype) != expected:
                raise ValueError(
                    f"register_comm_hook: expected the hook to return a tensor of shape {tuple(gradients.shape)} and "
                    f"{gradients.dtype}, got {_kind(returned)}. Return what replaces bucket.buffer()."
                )
            return returned

        _engine.register_comm_hook(self._engine_model, on_bucket)

    def zero_grad(self, set_to_none=True):
        _engine.refuse_in_body("zero_grad")
        super().zero_grad(set_to_none)

    # Moves. smp chooses where ranks compute, and the types of tensors were fixed when the module was wrapped.

    def to(self, *args, **kwargs):
        """A device is accepted, without effect. Another dtype is refused: convert the module before DistributedModel."""
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if dtype is None else super().to(dtype)

    def cuda(self, device=None):
        """Without effect."""
        del device
        return self

    def cpu(self):
        """Without effect. state_dict() has the parameters of all ranks, for a module of your own."""
        return self

    def _apply(self, fn, recurse=True):
        del recurse
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            made = fn(torch.empty(0, dtype=tensor.dtype))
            if made.dtype != tensor.dtype or made.device != tensor.device:
                raise NotImplementedError(
                    f"DistributedModel: expected conversions of the module before it is wrapped, got one of {name} from "
                    f"{tensor.dtype} to {made.dtype} on {made.device} after. Write DistributedModel(module.to(dtype))."
                )
        return self

    # Of tensor parallelism, which there is not: a rank has whole parameters or none.

    def distributed_modules(self):
        return iter(())

    def is_distributed_parameter(self, parameter):
        del parameter
        return False

    is_distributed_buffer = is_scaled_batch_parameter = is_scaled_batch_buffer = is_distributed_parameter

    def default_reducer_named_parameters(self):
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self):
        return iter(())

    def virtual_named_parameters(self):
        return self.local_named_parameters()


class GradientBucket:
    """Gradients of several parameters on their way to the other replicas, as torch's hooks know them."""

    def __init__(self, gradients, index, is_last):
        self._gradients = gradients
        self._index = index
        self._is_last = is_last

    def buffer(self):
        """Flat; the hook's own. Zeros where a parameter has no gradient here."""
        return self._gradients

    def set_buffer(self, gradients):
        self._gradients = gradients

    def index(self):
        """Of the step's buckets, in the order in which they leave."""
        return self._index

    def is_last(self):
        return self._is_last


class Replicated(torch.nn.Module):
    """What stands between model and module under the key ddp, as scripts expect that reach through it: model.module.module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def _call(model, hooks):
    optimizer = model._last_optimizer()
    for number in list(hooks):
        if number in hooks:  # no earlier hook has removed it
            hooks[number](model, optimizer)


def _kind(value):
    return f"{tuple(value.shape)} and {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
