"""Python on a GPU, against plain torch on the same GPU, bit for bit. Not a test of CTest, which would have to skip it elsewhere:

  python tests/python/run_ranks.py tests/gpu/python_test.py 1 2                  one process, and two stages
  SMP_CONFIG='{"pipeline_parallel_degree": 1}' python ... 2                      two replicas
"""

import copy
import os
import unittest

import support
import torch
from support import MICROBATCHES, batch, loss_of
from torch import nn

import smdistributed.modelparallel.torch as smp

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA begins: the same bits in every run


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": MICROBATCHES, "device": "cuda", "log_level": "off"})
    torch.use_deterministic_algorithms(True)


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 6)
    )


def own(rows):
    """Of a batch, what this replica takes."""
    return rows.chunk(smp.dp_size())[smp.dp_rank()]


def add_plain_gradients(net, loss_of, rows):
    """Of the mean over replicas, summed in their order."""
    every = []
    for part in rows.chunk(smp.dp_size()):
        net.zero_grad()
        losses = support.plain_step(net, loss_of, part)
        every.append(([parameter.grad for parameter in net.parameters()], losses))
    for index, parameter in enumerate(net.parameters()):
        parameter.grad = sum(gradients[index] for gradients, _ in every) / smp.dp_size()
    return every[smp.dp_rank()][1]


class OnGpu(unittest.TestCase):
    def compare(self, loss_of, steps=8, scaler=None, make=None):
        """Losses, weights and scale of each step; graphs replay from the fourth on."""
        make = make or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        net = make_net()
        plain = copy.deepcopy(net).cuda()
        plain_optimizer, plain_scaler = make(plain.parameters()), torch.amp.GradScaler("cuda", **(scaler or {"enabled": False}))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(make(net.parameters()))
        own_scaler = smp.amp.GradScaler(**(scaler or {"enabled": False}))

        @smp.step
        def step(model, x, factor):
            loss = loss_of(model, x) * factor
            model.backward(own_scaler.scale(loss))
            return loss

        for number in range(steps):
            factor = 1e37 if scaler and number == 5 else 1.0
            optimizer.zero_grad()
            losses = step(model, own(batch(number)), factor)
            own_scaler.step(optimizer)
            own_scaler.update()
            plain_optimizer.zero_grad()
            expected = add_plain_gradients(
                plain, lambda net, x, factor=factor: plain_scaler.scale(loss_of(net, x) * factor), batch(number).cuda()
            )
            scale = plain_scaler.get_scale()
            plain_scaler.step(plain_optimizer)
            plain_scaler.update()
            self.assertEqual(own_scaler.get_scale(), plain_scaler.get_scale(), number)
            for ours, theirs in zip(losses.outputs, expected, strict=True):
                self.assertTrue(ours.is_cuda)
                self.assertTrue(torch.equal(ours * scale, theirs), f"step {number}: {ours * scale} and {theirs}")
            local = {name: tensor.detach() for name, tensor in model.local_named_parameters()}
            state = plain.state_dict()
            support.same_bits(self, local, {name: state[name] for name in local}, f"weights of step {number}")
        return model, optimizer, plain

    def test_trains(self):
        self.compare(loss_of)

    def test_trains_under_autocast(self):
        def loss_under(dtype):
            def loss(model, x):
                with torch.autocast("cuda", dtype):
                    output = model(x)
                return output.float().square().mean()

            return loss

        self.compare(loss_under(torch.bfloat16))
        self.compare(loss_under(torch.float16), scaler={"init_scale": 2.0**10, "growth_interval": 2})

    def test_goes_on_from_its_state_dictionaries_which_are_on_the_host(self):
        model, optimizer, plain = self.compare(loss_of, steps=2)
        state = model.state_dict()
        self.assertEqual({tensor.device.type for tensor in state.values()}, {"cpu"})
        support.same_bits(self, dict(state), {name: tensor.cpu() for name, tensor in plain.state_dict().items()}, "state")
        other = smp.DistributedModel(make_net())
        other_optimizer = smp.DistributedOptimizer(torch.optim.AdamW(other.parameters(), lr=1e-2))
        other.load_state_dict(state)
        other_optimizer.load_state_dict(optimizer.state_dict())
        step = support.make_step()
        optimizer.zero_grad()
        step(model, own(batch(3))), step(other, own(batch(3)))
        optimizer.step(), other_optimizer.step()
        support.same_bits(self, dict(other.state_dict()), dict(model.state_dict()), "behind the next step")

    def test_delayed_construction_has_the_same_values(self):
        want = make_net().state_dict()
        with smp.delay_param_initialization():
            net = make_net()
        model = smp.DistributedModel(net)
        support.make_evaluation()(model, own(batch()))
        support.same_bits(self, dict(model.state_dict()), dict(want), "values")


if __name__ == "__main__":
    support.main()
