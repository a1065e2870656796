"""Parameters and buffers that are others than the engine knows, or come to share memory: refused, or as in the plain loop."""

import copy
import unittest

import support
import torch
from support import batch
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class KeepsMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = x.mean(0)
        return x - self.mean


class Registering(nn.Module):
    """Gives itself, or a module of its own, a tensor in forward."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)
        self.act = nn.Tanh()
        self.change = change

    def forward(self, x):
        y = self.act(self.norm(self.inner(x)))
        self.change(self, y)
        return y


class Replaced(unittest.TestCase):
    """Parameters and buffers, by others than the engine knows."""

    def test_in_a_body(self):
        changes = {
            "last": lambda net, y: net.register_buffer("last", y.detach().mean(0)),
            "act.last": lambda net, y: net.act.register_buffer("last", y.detach().mean(0)),
            "norm.running_mean, norm.running_var": lambda net, y: setattr(net, "norm", nn.BatchNorm1d(6, affine=False)),
            "added.running_mean, added.running_var": lambda net, y: setattr(net, "added", nn.BatchNorm1d(6, affine=False)),
        }
        nets = {names: Registering(change) for names, change in changes.items()}
        nets["0.mean"] = nn.Sequential(torch.jit.script(KeepsMean()), nn.Linear(6, 6))
        for names, net in nets.items():
            model, train_step = smp.DistributedModel(net), support.make_step()
            before = model.state_dict()
            for _ in range(2):
                with self.assertRaisesRegex(RuntimeError, f"got others for {names}.*self.mean.copy_"):
                    train_step(model, batch())
                support.same_bits(self, model.state_dict(), before, names)

    def test_between_steps_is_refused_until_all_is_back(self):
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        model, other = smp.DistributedModel(net), smp.DistributedModel(nn.Linear(6, 3))
        evaluate = support.make_evaluation()
        for owner, name, replacement in (
            (net[0], "bias", nn.Parameter(torch.zeros(6))),
            (net[1], "running_mean", torch.zeros(6)),
            (net, "2", nn.Linear(6, 3)),
        ):
            before = getattr(owner, name)
            setattr(owner, name, replacement)
            for each in (model, model, other):
                with self.assertRaisesRegex(ValueError, f"step: .* got others for .*{name}"):
                    evaluate(each, batch())
                self.assertIs(getattr(owner, name), replacement)
            setattr(owner, name, before)
            evaluate(model, batch())


class Tied(unittest.TestCase):
    """By memory that several parameters share, where the first step has given them to ranks."""

    def setUp(self):
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.plain = copy.deepcopy(self.net)
        self.model, self.train_step = smp.DistributedModel(self.net), support.make_step()
        smp.set_partition(self.net[0], 0), smp.set_partition(self.net[4], smp.pp_size() - 1)
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.net.parameters(), lr=0.1))
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)

    def change(self, change):
        change(self.net), change(self.plain)

    def trains(self, what):
        for number in range(2):
            self.optimizer.zero_grad(), self.plain_optimizer.zero_grad()
            losses = self.train_step(self.model, batch(number)).outputs
            support.same_bits(self, losses, support.plain_step(self.plain, support.loss_of, batch(number)), f"losses, {what}")
            self.optimizer.step(), self.plain_optimizer.step()
        support.same_bits(self, self.model.state_dict(), self.plain.state_dict(), what)

    @staticmethod
    def tie(net):
        net[0].weight.data = net[4].weight.data = torch.linspace(-1, 1, 36).view(6, 6)

    def test_before_the_first_step(self):
        self.change(self.tie)
        for what in ("tied", "tied anew"):
            self.trains(what)
            self.change(self.tie)
        self.change(lambda net: setattr(net[4].weight, "data", torch.ones(6, 6)))
        self.trains("not tied any more")

    def test_after_it_is_refused(self):
        self.trains("at first")
        before = self.model.state_dict()
        self.change(self.tie)
        for call in (lambda: self.train_step(self.model, batch()), self.model.state_dict, lambda: self.model.load_state_dict(before)):
            with self.assertRaisesRegex(ValueError, r"with memory of their own.* got 0.weight, 4.weight on the same\. .*clone"):
                call()
        self.change(lambda net: setattr(net[4].weight, "data", torch.ones(6, 6)))
        self.trains("given its own")

    def test_is_none_on_parts_of_one_tensor(self):
        self.trains("at first")

        def flatten(net):
            flat = torch.linspace(-1, 1, sum(parameter.numel() for parameter in net.parameters()))
            nn.utils.vector_to_parameters(flat, net.parameters())

        self.change(flatten)
        self.trains("flat")


if __name__ == "__main__":
    support.main()
