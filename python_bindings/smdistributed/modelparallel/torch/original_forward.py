"""`super()._orig_forward(x)`: how scripts for SageMaker's library, which replaces forward, spell super().forward(x)."""

import inspect

import torch


class _Forward:
    """A class's forward, found by super() only: scripts ask with hasattr(module, "_orig_forward") whether they have patched it."""

    def __init__(self, forward):
        self.forward = forward

    def __get__(self, module, owner=None):
        if inspect.getattr_static(owner, "_orig_forward", None) is self:
            raise AttributeError("_orig_forward")
        return self.forward.__get__(module, owner)


def _note(cls):
    known = inspect.getattr_static(cls, "_orig_forward", None)
    forward = inspect.getattr_static(cls, "forward", None)
    if known is None or isinstance(known, _Forward) and known.forward is not forward:  # else it is the script's, or inherited
        cls._orig_forward = _Forward(forward)


def _note_subclass(cls, **kwargs):
    super(torch.nn.Module, cls).__init_subclass__(**kwargs)
    _note(cls)


def provide():
    """For all classes of modules, those that are there and those to come."""
    waiting = [torch.nn.Module]
    while waiting:
        cls = waiting.pop()
        _note(cls)
        waiting += type.__subclasses__(cls)
    torch.nn.Module.__init_subclass__ = classmethod(_note_subclass)
