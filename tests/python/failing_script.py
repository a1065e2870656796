"""Fails on one of two ranks, where its argument says: outside of steps, in the body of one, in a hook or by what one has
replaced, in the order of calls, because a parameter is another one there, or an opaque module gives one other data; in other
ways that have an exit code of their own; or where MPI is initialised by the script, nowhere."""

import ctypes
import os
import signal
import sys

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import _engine

mpi = ctypes.CDLL(_engine.__file__)  # the one that smp uses
if sys.argv[1] == "mpi":  # as mpi4py has done when a script begins
    assert mpi.MPI_Init(None, None) == 0
soon = 2 * int(os.environ.get("SMP_TEST_SLOWNESS", 1))
smp.init({"microbatches": 2, "log_level": "off", "timeout_s": soon if sys.argv[1].startswith("hangs") else 120})


class Doubling(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.bias.data = self.bias.data * 2
        return y


class Waits(nn.Linear):
    hangs = False

    def forward(self, x):
        while self.hangs:
            pass
        return super().forward(x)


net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU())
if sys.argv[1] == "hangs_inside":
    with smp.partition(1):
        middle = smp.opaque(Waits(4, 4))
    with smp.partition(0):
        net = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4))
if sys.argv[1] == "doubled":
    net[0] = smp.opaque(Doubling(4, 4))
if sys.argv[1] == "order":
    for layer in (net[1], net[2]) if smp.rank() == 0 else (net[2], net[1]):
        smp.opaque(layer)
model = smp.DistributedModel(net)


@smp.step
def body(model, x):
    if sys.argv[1] == "body":
        raise KeyError("in the body")
    return model(x)


if sys.argv[1] == "outside" and smp.rank() == 1:
    raise ValueError("on rank 1")
def hook(model, optimizer):
    raise KeyError("in a hook")


def replacing_hook(model, optimizer):
    net[0].bias = nn.Parameter(torch.ones(4))


if sys.argv[1] == "replacing_hook" and smp.rank() == 1:
    model.register_post_partition_hook(replacing_hook)
if sys.argv[1] == "hook" and smp.rank() == 1:
    model.register_post_step_hook(hook)
if sys.argv[1] == "replaced" and smp.rank() == 1:  # the other is in the step, and hears of it in that
    net[0].bias = nn.Parameter(torch.zeros(4))
    try:
        body(model, torch.ones(4, 4))
    except ValueError as error:
        print(error, file=sys.stderr)
if sys.argv[1] == "exit" and smp.rank() == 1:
    sys.exit(5)
if sys.argv[1] == "loads":
    smp.resume_from_checkpoint("/nonexistent")
if sys.argv[1] == "memory" and smp.rank() == 1:
    torch.empty(1 << 60)
if sys.argv[1] == "calls" and smp.rank() == 1:
    smp.barrier()
if sys.argv[1] == "hangs":
    with torch.no_grad():
        body(model, torch.ones(4, 4))  # behind the first step the time-out is that of the configuration
    while smp.rank() == 1:
        pass
if sys.argv[1] == "hangs_inside":
    with torch.no_grad():
        body(model, torch.ones(4, 4))
    Waits.hangs = smp.rank() == 1
if sys.argv[1] == "stops":
    while not smp.stop_requested():
        if smp.rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
    sys.exit(smp.EXIT_PREEMPTED)
with torch.no_grad():
    body(model, torch.ones(4, 4))
if sys.argv[1] == "mpi":
    smp.shutdown()
    is_finalized = ctypes.c_int(1)
    assert mpi.MPI_Finalized(ctypes.byref(is_finalized)) == 0 and is_finalized.value == 0
    assert mpi.MPI_Finalize() == 0
