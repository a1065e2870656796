"""What a type checker has to see of the package (stubs_test.py). An error that it has to find stands behind an ignore, which
it reports where there is none."""

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

smp.init({"partitions": 2, "microbatches": 4})
smp.init(3)  # type: ignore[arg-type]
with smp.partition(1):
    net = nn.Linear(4, 4)
model = smp.DistributedModel(net, bucket_cap_mb=25)
model.backward(3)  # type: ignore[arg-type]
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), static_loss_scale=None)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)


@smp.step
def train_step(model: smp.DistributedModel, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    model.backward(loss)
    return loss


@smp.step(non_split_inputs=["scale"], input_split_axes={"x": 1})
def two_results(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x, x * scale


@smp.step()
def no_result(x: Tensor) -> None:
    del x


class Trainer:
    @smp.step
    def evaluate(model: Any, x: Tensor) -> dict[str, Tensor]:
        return {"scores": model(x)}


x = torch.ones(8, 4)
losses = train_step(model, x)
assert_type(losses, smp.StepOutput)
assert_type(losses.reduce_mean(), Tensor)
assert_type([loss for loss in losses], list[Tensor])
train_step(model, "x")  # type: ignore[arg-type]
first, second = two_results(x, scale=2.0)
assert_type(first, smp.StepOutput)
no_result(x)
Trainer().evaluate(model, x)["scores"].concat()
optimizer.step()
scheduler.step()
optimizer.local_state_dict()
model.load_state_dict(model.state_dict())
assert_type(smp.rank(), int)
assert_type(smp.get_pp_group(), list[int])
assert_type(smp.allgather("seen", smp.PP_GROUP), list[str])
smp.barrier(smp.WORLD_RANK)  # type: ignore[arg-type]
assert_type(smp.doctor().warnings, list[str])
assert_type(smp.timeline().svg, str)
assert_type(model.plan.svg, str)
