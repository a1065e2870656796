"""Activation checkpointing in the forms of SageMaker and torch, against the plain loop bit for bit."""

import copy
import functools
import re
import unittest

import support
import torch
import torch.utils.checkpoint
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential

STEPS = 5  # so that the last ones run from tapes


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x, scale=1.0):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Normalised(nn.Module):
    """With buffers that its forward writes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))


class Listed(nn.Module):
    """Layers of a ModuleList, the first of them twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.layers[0](x)


class Calling(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.layers, self.call = nn.Linear(6, 6), nn.Sequential(*(Block() for _ in range(4))), call

    def forward(self, x):
        return self.call(self.layers, self.first(x))


def one_by_one(function):
    def call(layers, x):
        for layer in layers:
            x = function(layer, x)
        return x

    return call


CALLS = {
    "smp's": one_by_one(functools.partial(checkpoint, preserve_rng_state=False, scale=0.5)),
    "smp's sequential": lambda layers, x: checkpoint_sequential(layers, x, strategy="group_2"),
    "torch's": one_by_one(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)),
    "torch's reentrant": one_by_one(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)),
    "torch's sequential": lambda layers, x: torch.utils.checkpoint.checkpoint_sequential(layers, 2, x, use_reentrant=False),
}


def operators_again(model):
    """By stage, as the plan says."""
    return [int(count) for count in re.findall(r"keeps nothing of (\d+) of \d+ operators", str(model.plan))]


class Recomputation(unittest.TestCase):
    def train(self, net):
        """Losses of all steps, the state in the end, and the model."""
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        train_step, losses = support.make_step(), []
        for number in range(STEPS):
            optimizer.zero_grad()
            losses += train_step(model, support.batch(number)).outputs
            optimizer.step()
        return losses, model.state_dict(), model

    def check(self, net, mark=lambda net: None):
        plain = copy.deepcopy(net)
        mark(net)
        losses, state, model = self.train(net)
        optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), []
        for number in range(STEPS):
            optimizer.zero_grad()
            expected += support.plain_step(plain, support.loss_of, support.batch(number))
            optimizer.step()
        support.same_bits(self, losses, expected, "losses")
        support.same_bits(self, state, plain.state_dict(), "state")
        self.assertGreater(sum(operators_again(model)), 0)
        return model

    def test_layers_of_a_sequential(self):
        for strategy in ("each", "contiguous", "group_2", "group_3"):
            with self.subTest(strategy=strategy):
                mark = functools.partial(smp.set_activation_checkpointing, strategy=strategy)
                self.check(nn.Sequential(*(Block() for _ in range(4))), mark)

    def test_layers_of_a_list(self):
        self.check(Listed(), lambda net: smp.set_activation_checkpointing(net.layers, strategy="group_2"))

    def test_modules_marked_behind_wrapping(self):
        net = nn.Sequential(Block(), Block(), nn.Linear(6, 6))
        model = self.check(net, lambda net: smp.set_activation_checkpointing(net[0]))
        before = sum(operators_again(model))
        smp.set_activation_checkpointing(model.get_module()[1])
        support.make_step()(model, support.batch())
        self.assertEqual(sum(operators_again(model)), before)  # the plan is that of the first step function

    def test_the_last_mark_counts(self):
        net = nn.Sequential(*(Block() for _ in range(4)))

        def mark(net):
            for strategy in ("contiguous", "each"):
                smp.set_activation_checkpointing(net, strategy=strategy)

        self.check(net, mark)

    def test_functions(self):
        for name, call in CALLS.items():
            with self.subTest(name), support.no_warnings():
                self.check(Calling(call))

    def test_buffers_are_written_once(self):
        self.check(nn.Sequential(*(Normalised() for _ in range(3))), smp.set_activation_checkpointing)

    def test_code_that_is_not_torchs_runs_once(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.count = 0

            def forward(self, x):
                self.count += 1
                return x * self.count

        def losses(mark):
            net = nn.Sequential(Block(), smp.opaque(Counting()), Block())
            mark(net)
            return self.train(net)[0]

        torch.manual_seed(3)
        kept = losses(lambda net: None)
        torch.manual_seed(3)
        support.same_bits(self, losses(functools.partial(smp.set_activation_checkpointing, strategy="contiguous")), kept, "losses")

    def test_lists_within_lists(self):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.branches = nn.ModuleDict({"a": nn.ModuleList([Block(), Block()]), "b": Block()})

            def forward(self, x):
                first, second = self.branches["a"]
                return second(first(x)) + self.branches["b"](x)

        self.check(Branches(), lambda net: smp.set_activation_checkpointing(net.branches))

    def test_memory_is_less(self):
        self.check_memory(lambda: nn.Sequential(*(Block() for _ in range(12))))
        self.check_memory(lambda: nn.Sequential(*([Block()] * 12)))  # a region for each call

    def check_memory(self, make):
        def peaks(mark):
            net = make()
            mark(net)
            model = smp.DistributedModel(net)
            support.make_step()(model, torch.randn(4096, 6))
            return model.plan.as_dict["predicted_peak_bytes"]

        kept, again = peaks(lambda net: None), peaks(smp.set_activation_checkpointing)
        for rank, (less, more) in enumerate(zip(again, kept, strict=True)):
            self.assertLess(less, 0.75 * more, f"rank {rank}")

    def test_what_cannot_be_marked(self):
        with self.assertRaisesRegex(TypeError, "expected a module, got int. Pass the layer itself"):
            smp.set_activation_checkpointing(3)
        for strategy in ("all", "group_0", "group_", 2):
            with self.assertRaisesRegex(ValueError, "expected strategy 'each', 'contiguous' or 'group_<n>'"):
                smp.set_activation_checkpointing(nn.Sequential(Block()), strategy=strategy)
        with self.assertWarnsRegex(UserWarning, "pack_args_as_tuple has no effect"):
            smp.set_activation_checkpointing(nn.Sequential(Block()), pack_args_as_tuple=True)

    def test_outside_of_steps_nothing_changes(self):
        net = nn.Sequential(Block(), Block())
        plain = copy.deepcopy(net)
        smp.set_activation_checkpointing(net)
        x = support.batch()
        self.assertTrue(torch.equal(net(x), plain(x)))
        self.assertTrue(torch.equal(copy.deepcopy(net)(x), plain(x)))
        with self.assertRaises(RuntimeError):
            net(torch.ones(2, 5))  # leaves the region behind it
        self.check(net)


if __name__ == "__main__":
    support.main()
