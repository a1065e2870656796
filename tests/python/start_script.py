"""Started as one process, in the way that its argument names."""

import ctypes
import ctypes.util
import importlib.util
import multiprocessing
import os
import sys

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

HOW = sys.argv[1]


def start_mpi():
    """As `from mpi4py import MPI` does, which is taken where it is installed."""
    if importlib.util.find_spec("mpi4py"):
        importlib.import_module("mpi4py.MPI")
    else:
        ctypes.CDLL(ctypes.util.find_library("mpi"), mode=ctypes.RTLD_GLOBAL).MPI_Init(None, None)


if HOW == "singleton":
    start_mpi()
if HOW != "ranks":
    smp.init({"microbatches": 2})  # at the top, as scripts have it: spawned workers run it, too
    TOP = smp.rank(), smp.size(), smp.local_rank()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index, smp.rank(), smp.dp_size(), *TOP])


def refused(queue):
    smp.init()
    try:
        smp.DistributedModel(nn.Linear(1, 1))
        queue.put(("made",))
    except RuntimeError as error:
        queue.put((smp.is_initialized(), str(error)))


def be_rank(rank, environments):
    os.environ.update(environments[rank])
    smp.init({"microbatches": 2, "log_level": "off"})
    assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]


def train():
    model = smp.DistributedModel(nn.Linear(4, 4))

    @smp.step
    def step(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(4, 4))
    assert model.get_module().weight.grad is not None


if __name__ == "__main__":
    if HOW in ("ranks", "ranks of a rank"):
        from support import job_environments

        with job_environments(2) as environments:
            torch.multiprocessing.spawn(be_rank, (environments,), nprocs=2)
    elif HOW != "singleton":
        context = multiprocessing.get_context(HOW)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=context)
        print([row.tolist() for batch in loader for row in batch])
        if HOW != "fork":  # which has what its parent has
            queue = context.Queue()
            process = context.Process(target=refused, args=(queue,))
            process.start()
            print(*queue.get())
            process.join()
    if HOW != "ranks":
        train()
    print("ended")
