"""Placement by hand."""

import contextlib
import threading

from smdistributed.modelparallel import _engine

_open = threading.local()


@contextlib.contextmanager
def partition(stage):
    """Modules made within go to that stage; of several blocks the innermost counts.

    with smp.partition(1):
        self.head = nn.Linear(512, 10)
    """
    guards = vars(_open).setdefault("guards", [])
    mine = len(guards)
    guards.append(_engine.PartitionGuard(stage))
    try:
        yield
    finally:
        is_mine = vars(_open).get("guards") is guards
        is_last = is_mine and len(guards) == mine + 1
        while is_mine and len(guards) > mine:
            guards.pop()  # its end is that of the block
        if not is_last:
            raise RuntimeError(
                f"smp.partition({stage}): expected blocks to end in the opposite order of their beginnings, in the thread that began "
                "them, got one that did not, as where a generator with a block is not run to its end. Make the modules in a function "
                "that returns them."
            )


def set_partition(module, stage):
    """Before the first step: `module`, with everything in it, goes to that stage."""
    _engine.set_partition(list(module.parameters()) + list(module.buffers()), stage)
