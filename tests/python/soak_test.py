"""The memory of every rank is flat, over a thousand steps behind those that fill caches."""

import gc
import unittest

import support
import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

FIRST_LOOK, SLACK = 300, 1 << 20
STEPS = FIRST_LOOK + 1000


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x):
        return self.second(Straight.apply(self.drop(F.relu(self.first(x)))))


def resident_bytes():
    gc.collect()
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


class Soak(unittest.TestCase):
    def test_memory_is_flat(self):
        torch.manual_seed(0)
        smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})
        net = Net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01))

        @smp.step
        def train_step(model, batch, number):
            output = model(batch["x"])
            loss = (output - torch.tensor([float(number % 7)] * 8)).square().mean()
            model.backward(loss)
            return {"loss": loss, "kept": {"output": output}, "number": number}, f"{loss:.2f}"

        before = 0
        for number in range(STEPS):
            optimizer.zero_grad()
            result, texts = train_step(model, {"x": torch.full((8, 8), number % 5 / 5)}, number)
            optimizer.step()
            self.assertEqual(result["number"], [number] * support.MICROBATCHES)
            self.assertEqual([f"{loss:.2f}" for loss in result["loss"]], texts)
            if number + 1 == FIRST_LOOK:
                before = resident_bytes()
        after = resident_bytes()
        seen = f"rank {smp.rank()}: {before} bytes after {FIRST_LOOK} steps, {after} after {STEPS}"
        self.assertLessEqual(after - before, SLACK, seen)


if __name__ == "__main__":
    support.main()
