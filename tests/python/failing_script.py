"""Fails on one of two ranks, where its argument says: outside of steps, in the body of one, or in a hook."""

import sys

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

smp.init({"microbatches": 2, "log_level": "off"})
model = smp.DistributedModel(nn.Linear(4, 4))


@smp.step
def body(model, x):
    if sys.argv[1] == "body":
        raise KeyError("in the body")
    return model(x)


if sys.argv[1] == "outside" and smp.rank() == 1:
    raise ValueError("on rank 1")
def hook(model, optimizer):
    raise KeyError("in a hook")


if sys.argv[1] == "hook" and smp.rank() == 1:
    model.register_post_step_hook(hook)
if sys.argv[1] == "exit" and smp.rank() == 1:
    sys.exit(5)
with torch.no_grad():
    body(model, torch.ones(4, 4))
