"""What Python does to tensors of a step body without calling an operator: autograd's engine, and looks at their values.

Imported once; outside of step bodies everything is as torch has it.
"""

import functools

import torch

from smdistributed.modelparallel import _engine


def _asking(run_backward):
    """Python runs an engine of its own, which no C++ can ask in its name."""

    def asking(*args, **kwargs):
        _engine.autograd_called()
        return run_backward(*args, **kwargs)

    return asking


for _module in (torch.autograd, torch.autograd.graph):  # each has the function under its own name
    _module._engine_run_backward = _asking(_module._engine_run_backward)


def _looking(name, look, reads=True):
    """Replaces a method of tensors: those without data of their own give look(their values, self, ...). reads: what it returns goes
    into what a script computes."""
    plain = getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def looking(self, *args, **kwargs):
        seen = []
        if _engine.look_at(self, lambda values: seen.append(look(values, self, *args, **kwargs))):
            return seen[0]
        if reads:
            _engine.values_read(self, name)
        return plain(self, *args, **kwargs)

    setattr(torch.Tensor, name, looking)


def _numpy(values, tensor, *, force=False):
    if tensor.requires_grad and torch.is_grad_enabled() and not force:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    array = values.numpy()
    array.flags.writeable = False  # a copy: what is written to it would be lost
    return array


def _repr(values, tensor, **kwargs):
    return values.requires_grad_(tensor.requires_grad and tensor.is_leaf).__repr__(**kwargs)


_looking("numpy", _numpy)
_looking("tolist", lambda values, _: values.tolist())
_looking("__repr__", _repr, reads=False)
_looking("is_shared", lambda _, __: False, reads=False)  # torch ends the process where it cannot tell
