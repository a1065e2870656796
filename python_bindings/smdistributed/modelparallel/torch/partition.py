"""Placement by hand."""

import contextlib

import torch

from smdistributed.modelparallel import _engine

_stages = []  # of the partition blocks around, innermost last


@contextlib.contextmanager
def partition(stage):
    """Modules made within go to that stage; of several blocks the innermost counts.

    with smp.partition(1):
        self.head = nn.Linear(512, 10)
    """
    _stages.append(stage)
    handle = torch.nn.modules.module.register_module_parameter_registration_hook(_place)
    try:
        yield
    finally:
        handle.remove()
        _stages.pop()


def _place(module, name, parameter):
    if parameter is not None:
        _engine.set_partition([parameter], _stages[-1])


def set_partition(module, stage):
    """Before the first step: `module`, with everything in it, goes to that stage."""
    _engine.set_partition(list(module.parameters()) + list(module.buffers()), stage)
