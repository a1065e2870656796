"""Steps whose plan is made from measured times: the body runs for the plan before it runs for the step."""

import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "cost": "measured", "cost_cache": "off", "log_level": "off"})


class Measured(unittest.TestCase):
    def test_body_that_reads_and_returns_values(self):
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        expected = [net(torch.ones(2, 8)).detach() for _ in range(4)]
        model = smp.DistributedModel(net)

        @smp.step
        def body(model, x):
            y = model(x)
            return y, y.sum().item(), len(x)

        with torch.no_grad():
            y, sums, sizes = body(model, torch.ones(8, 8))
        support.same_bits(self, y.outputs, expected, "outputs")
        self.assertEqual(sums, [each.sum().item() for each in expected])
        self.assertEqual(sizes, [2] * 4)


if __name__ == "__main__":
    support.main()
