"""Started by torchrun: trains as the plain loop does, also with a process group of its own or forks; or fails on rank 1."""

import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

from support import MICROBATCHES, plain_step


def made():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


@smp.step
def train_step(model, x, y):
    loss = loss_of(model, x, y)
    model.backward(loss)
    return loss


if sys.argv[1] == "own group":
    dist.init_process_group("gloo")
smp.init({"microbatches": MICROBATCHES, "partitions": 2, "log_level": "off"})
if sys.argv[1] == "failure" and smp.rank() == 1:
    raise ValueError("on rank 1")
if sys.argv[1] == "forks" and smp.rank() == 0:  # are no ranks: a SIGTERM ends them, and their failure is not the job's
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(abs, [1])
    pool.join()
    child = os.fork()
    if child == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
model, optimizer = made()
model, optimizer = smp.DistributedModel(model), smp.DistributedOptimizer(optimizer)
plain, plain_optimizer = made()
for step in range(4):
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)), torch.arange(8) % 3
    optimizer.zero_grad()
    losses = train_step(model, x, y).outputs
    optimizer.step()
    plain_optimizer.zero_grad()
    expected = plain_step(plain, loss_of, x, y)
    plain_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True)), (losses, expected)
total = torch.tensor([float(smp.rank())])
dist.all_reduce(total, group=smp.get_pp_process_group())
assert total.item() == 1, total
sys.stdout.write(f"rank {smp.rank()} of {smp.size()}: the plain loop's losses\n")  # in one call: the ranks share a pipe
