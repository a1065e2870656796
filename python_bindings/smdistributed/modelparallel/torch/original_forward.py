"""`super()._orig_forward(x)`: how scripts for SageMaker's library, which replaces forward, spell super().forward(x)."""

import torch


def _note(cls):
    if "forward" in vars(cls):
        cls._orig_forward = vars(cls)["forward"]


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
