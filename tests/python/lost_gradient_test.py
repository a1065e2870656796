"""A region of smp.opaque that needs a gradient for data, and none for the zeros that it is recorded on, ends the job."""

import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, h):
        return self.net(h).square().mean() if h.abs().sum() > 0 else torch.zeros(())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.region = nn.Linear(6, 6), smp.opaque(Masked())

    def forward(self, x):
        h = self.first(x)
        return self.region(h) + h.square().mean()


def train():
    smp.init({"microbatches": 2, "log_level": "off"})
    model = smp.DistributedModel(Net())

    @smp.step
    def train_step(model, x):
        loss = model(x)
        model.backward(loss)
        return loss

    train_step(model, support.batch())


class LostGradient(unittest.TestCase):
    def test_is_told(self):
        for count in (1, 2):
            with self.subTest(processes=count):
                errors = support.fork_ranks(count, train, {})
                self.assertIn("expected a result that needs no gradient, as it was recorded, got one that does", errors)


if __name__ == "__main__":
    unittest.main()
