"""Placement by hand."""

import contextlib

from smdistributed.modelparallel import _engine


@contextlib.contextmanager
def partition(stage):
    """Modules made within go to that stage; of several blocks the innermost counts.

    with smp.partition(1):
        self.head = nn.Linear(512, 10)
    """
    guard = _engine.PartitionGuard(stage)
    try:
        yield
    finally:
        del guard  # its end is that of the block


def set_partition(module, stage):
    """Before the first step: `module`, with everything in it, goes to that stage."""
    _engine.set_partition(list(module.parameters()) + list(module.buffers()), stage)
