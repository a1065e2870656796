"""Activation checkpointing: what runs again in the backward, in place of keeping what it makes. Numbers keep every bit, dropout
included, whatever `preserve_rng_state` says."""

import contextlib
import itertools
import re
import warnings

import torch

from smdistributed.modelparallel import _engine


@contextlib.contextmanager
def recomputed():
    """A recompute region of the step's body."""
    _engine.enter_recompute_region(0, True)
    try:
        yield
    finally:
        _engine.leave_recompute_region()


class _Mark:
    """Puts a region around each call of a module, by hooks, so that copies of the module have it as well."""

    running = ()  # marked modules whose calls are under way, innermost last
    groups = itertools.count(1)

    def __init__(self, group, is_first):
        self.group, self.is_first = group, is_first  # what follows the first of a group is part of its region

    def enter(self, module, args):
        del args
        _engine.enter_recompute_region(self.group, self.is_first)
        _Mark.running += (module,)

    def leave(self, module, args, output):
        del args, output
        if not _Mark.running or _Mark.running[-1] is not module:
            return  # a hook before ours has thrown
        _Mark.running = _Mark.running[:-1]
        _engine.leave_recompute_region()


def _mark(modules):
    group = next(_Mark.groups)
    for position, module in enumerate(dict.fromkeys(modules)):
        mark = _Mark(group, position == 0)
        module._smp_recomputation = (
            module.register_forward_pre_hook(mark.enter, prepend=True),
            module.register_forward_hook(mark.leave, always_call=True),
        )


def _groups(caller, layers, strategy):
    """Layers that are recomputed together, as `strategy` says."""
    group = re.fullmatch(r"group_([1-9]\d*)", strategy) if isinstance(strategy, str) else None
    if strategy not in ("each", "contiguous") and group is None:
        raise ValueError(f"{caller}: expected strategy 'each', 'contiguous' or 'group_<n>' as in 'group_2', got {strategy!r}.")
    size = {"each": 1, "contiguous": max(len(layers), 1)}.get(strategy) or int(group[1])
    return [layers[first : first + size] for first in range(0, len(layers), size)]


def _warn_of_packing(caller, pack_args_as_tuple):
    if pack_args_as_tuple:
        warnings.warn(f"{caller}: pack_args_as_tuple has no effect: layers are called with what they are given.", stacklevel=3)


def set_activation_checkpointing(module, preserve_rng_state=True, pack_args_as_tuple=False, strategy="each"):
    """Each call of `module` in a step runs again before its backward. Of a Sequential, ModuleList or ModuleDict its layers do: each by itself,
    all together (`contiguous`; a stage's part of them), or every n of them (`group_<n>`). Before or after DistributedModel."""
    del preserve_rng_state
    caller = "set_activation_checkpointing"
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{caller}: expected a module, got {type(module).__name__}. Pass the layer itself, as model.get_module().layers[0].")
    _warn_of_packing(caller, pack_args_as_tuple)
    for layers in _groups(caller, _layers(module, torch.nn.Sequential), strategy):
        _remove_marks(layers)
        _mark(layers)


def _layers(module, *kinds):
    """Those of a list, and of lists within, which nobody calls."""
    if isinstance(module, torch.nn.ModuleDict):
        layers = module.values()
    elif isinstance(module, (torch.nn.ModuleList, *kinds)):
        layers = module
    else:
        return [module]
    return [layer for each in layers for layer in _layers(each)]


def _remove_marks(layers):
    """The last call counts."""
    for layer in layers:
        for hook in vars(layer).pop("_smp_recomputation", ()):
            hook.remove()


def checkpoint(module, *args, preserve_rng_state=True, **kwargs):
    """module(*args, **kwargs), which runs again before its backward."""
    del preserve_rng_state
    with recomputed():
        return module(*args, **kwargs)


def checkpoint_sequential(sequential, input, strategy="each", preserve_rng_state=True, pack_args_as_tuple=False):  # noqa: A002
    """sequential(input), whose layers run again before their backward, together as set_activation_checkpointing has it."""
    del preserve_rng_state
    _warn_of_packing("checkpoint_sequential", pack_args_as_tuple)
    for layers in _groups("checkpoint_sequential", list(sequential), strategy):
        with recomputed():
            for layer in layers:
                input = layer(input)  # noqa: A001
    return input
