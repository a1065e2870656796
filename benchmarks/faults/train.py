"""Four ranks that train replicas of a small model, of smp or of torch's DDP, and what goes wrong with one of them. Started by run.py.

Usage: train.py smp|torch FAULT FILE TOKEN
FILE gets the time at which it goes wrong; TOKEN tells the processes of a job from all others.
"""

import os
import signal
import sys
import time

import torch
from torch import nn

CULPRIT, FAULT_STEP, LAST_STEP = 2, 20, 100_000


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x).square().mean()


class OfSmp:
    def __init__(self, width):
        import smdistributed.modelparallel.torch as smp

        self.smp = smp
        smp.init({"pipeline_parallel_degree": 1, "microbatches": 1, "log_level": "warning"})
        self.rank = smp.rank()
        self.model = smp.DistributedModel(Net(width))
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=1e-3))

        @smp.step
        def train_step(model, x):
            loss = model(x)
            model.backward(loss)
            return loss

        self.train_step = train_step

    def step(self, x):
        self.optimizer.zero_grad()
        self.train_step(self.model, x)
        self.optimizer.step()

    def barrier(self):
        self.smp.barrier()


class OfTorch:
    def __init__(self, width):
        if "RANK" not in os.environ:  # of mpirun
            os.environ.update(RANK=os.environ["OMPI_COMM_WORLD_RANK"], WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"])
        torch.distributed.init_process_group("gloo")
        self.rank = torch.distributed.get_rank()
        self.model = nn.parallel.DistributedDataParallel(Net(width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).backward()
        self.optimizer.step()

    def barrier(self):
        torch.distributed.barrier()


def throw():
    raise RuntimeError("the data set has no file 7")


def loop():
    while True:
        pass


def main(side, fault, file):
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    width = 17 if fault == "shape" and rank == CULPRIT else 16
    if width == 17:
        mark(file)
    training = (OfSmp if side == "smp" else OfTorch)(width)
    for step in range(LAST_STEP):
        x = torch.randn(8, width)
        if training.rank == CULPRIT and step == FAULT_STEP and fault != "shape":
            mark(file)
            if fault == "leaves":
                break
            if fault == "nan":
                x.fill_(float("nan"))
            elif fault == "order":
                training.barrier()
            else:
                {"killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "throws": throw, "loops": loop,
                 "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP)}[fault]()  # fmt: skip
        training.step(x)


def mark(file):
    with open(file + ".new", "w", encoding="ascii") as out:
        out.write(str(time.monotonic()))
    os.rename(file + ".new", file)


if __name__ == "__main__":
    main(*sys.argv[1:4])
