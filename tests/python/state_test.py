"""State that is spread over ranks, and what a body may not do to it."""

import copy
import math
import unittest
import warnings

import support
import torch
from support import batch, loss_of, make_step
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


def make_net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


class Run:
    """A model with its optimizer and step."""

    def __init__(self, net):
        self.net = net
        self.model = smp.DistributedModel(net)
        self.optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01))
        self.step = make_step()

    def train(self, *seeds):
        for seed in seeds:
            self.optimizer.zero_grad()
            loss = self.step(self.model, batch(seed))
            self.optimizer.step()
        return loss.outputs


class State(unittest.TestCase):
    def test_goes_on_where_it_was(self):
        net = make_net()
        fresh = copy.deepcopy(net)
        run = Run(net)
        run.train(0, 1)
        state, optimizer_state = run.model.state_dict(), run.optimizer.state_dict()
        self.assertEqual(list(optimizer_state["state"]), list(range(len(list(net.parameters())))))
        expected = run.train(2, 3)
        for is_placed in (False, True):  # loaded before the first step, and after one
            other = Run(copy.deepcopy(fresh))
            if is_placed:
                other.train(7)
            other.model.load_state_dict(state)
            other.optimizer.load_state_dict(copy.deepcopy(optimizer_state))  # torch keeps the tensors that it is given
            support.same_bits(self, other.train(2, 3), expected, f"losses, placed: {is_placed}")
            support.same_bits(self, other.model.state_dict(), run.model.state_dict(), "parameters and buffers")
            here = {id(parameter) for parameter in other.model.local_parameters()}
            self.assertEqual({id(parameter) for parameter in other.optimizer.state}, here)

    def test_loads_into_a_plain_module(self):
        run = Run(make_net())
        run.train(0)
        plain = make_net()
        plain.load_state_dict(run.model.state_dict())
        plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
        plain_optimizer.load_state_dict(run.optimizer.state_dict())
        losses = support.plain_step(plain, loss_of, batch(1))
        support.same_bits(self, run.train(1), losses, "losses")

    def test_is_gathered_to_one_rank_or_to_all(self):
        run = Run(make_net())
        run.train(0)
        state = run.model.state_dict()
        gathered = run.model.state_dict(gather_to_rank0=True)
        support.same_bits(self, gathered, state if smp.mp_rank() == 0 else {}, "gathered")

    def test_that_says_it_is_whole_is_loaded(self):
        run, other = Run(make_net()), Run(make_net())
        run.train(0)
        state = {**run.model.state_dict(), "_smp_is_partial": False}
        for is_placed in (False, True):
            if is_placed:
                other.train(1)
            other.model.load_state_dict(state)
            support.same_bits(self, other.model.state_dict(), run.model.state_dict(), f"state, placed: {is_placed}")

    def test_clips_by_the_norm_of_all_ranks(self):
        net = make_net()
        plain = copy.deepcopy(net)
        run = Run(net)
        run.step(run.model, batch(0))
        support.plain_step(plain, loss_of, batch(0))
        norm = run.model.clip_grad_norm_(0.01)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        self.assertAlmostEqual(norm, expected.item(), places=6)
        for name, parameter in run.model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)

    def test_clips_so_by_torchs_function_too(self):
        net = make_net()
        plain = copy.deepcopy(net)
        run = Run(net)
        run.step(run.model, batch(0))
        support.plain_step(plain, loss_of, batch(0))
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        torch.testing.assert_close(norm, expected)
        for name, parameter in run.model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        if smp.pp_size() > 1:
            everything = [*run.model.parameters()]
            with_gradients = [parameter for parameter in everything if parameter.grad is not None]
            for some in (everything[:-1], with_gradients, run.model.local_parameters()):
                with self.assertRaisesRegex(ValueError, f"all {len(everything)} trainable .* of them and 0 others"):
                    torch.nn.utils.clip_grad_norm_(some, 1.0)
            run.model.zero_grad()
            with self.assertRaisesRegex(ValueError, "got 0 of them"):  # what a rank without gradients would pass
                torch.nn.utils.clip_grad_norm_([], 1.0)

    def test_leaves_gradients_that_are_not_finite_alone_where_it_raises_or_measures(self):
        run = Run(make_net())
        run.step(run.model, batch(0))
        next(run.model.local_parameters()).grad[0] = math.inf
        before = [parameter.grad.clone() for parameter in run.model.local_parameters()]
        with self.assertRaisesRegex(RuntimeError, "finite norm|non-finite"):
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, error_if_nonfinite=True)
        self.assertEqual(run.model.clip_grad_norm_(math.inf), math.inf)
        support.same_bits(self, [parameter.grad for parameter in run.model.local_parameters()], before, "gradients")

    def test_clips_in_torchs_own_function(self):
        """Which is what a script has that has imported it by its name before smp."""
        function = torch.nn.utils.clip_grad_norm_
        self.assertEqual(function.__code__.co_filename, torch.nn.utils.clip_grad.__file__)
        run, plain = Run(make_net().double()), make_net().double()
        plain.load_state_dict(run.net.state_dict())
        run.step(run.model, batch(0).double())
        support.plain_step(plain, loss_of, batch(0).double())
        expected = function.__wrapped__(plain.parameters(), 0.01)
        norm = function(run.model.parameters(), 0.01)
        self.assertEqual(norm.dtype, torch.float64)
        torch.testing.assert_close(norm, expected)
        other = torch.nn.Parameter(torch.ones(2))
        other.grad = torch.full((2,), 3.0)
        self.assertAlmostEqual(function(other, 1.0).item(), 18**0.5, places=5)
        torch.testing.assert_close(other.grad, torch.full((2,), 0.5**0.5))

    def test_refuses_a_wrong_name(self):
        run = Run(make_net())
        with self.assertRaisesRegex(ValueError, "9.weight"):
            run.model.load_state_dict({"9.weight": torch.ones(1)})


class Replacing(unittest.TestCase):
    def test_buffers_is_refused_and_undone(self):
        class Net(nn.Module):
            def __init__(self, reads):
                super().__init__()
                self.layer = nn.Linear(6, 3)
                self.reads = reads
                self.register_buffer("mean", torch.zeros(3))

            def forward(self, x):
                y = self.layer(x)
                new = y.mean(0).detach()
                self.mean = 0.9 * self.mean + 0.1 * new if self.reads else new
                return y

        for reads in (True, False):
            net = Net(reads)
            mean = net.mean
            model = smp.DistributedModel(net)
            with self.assertRaisesRegex(RuntimeError, "others for mean"):
                make_step()(model, batch(0))
            self.assertIs(net.mean, mean)

    def test_buffers_between_steps_is_refused(self):
        run = Run(make_net())
        run.train(0)
        old = run.net[3].running_mean
        run.net[3].running_mean = torch.ones(16)
        for ask in (run.model.state_dict, lambda: run.step(run.model, batch(1))):
            with self.assertRaisesRegex(ValueError, "3.running_mean"):
                ask()
        run.net[3].running_mean = old
        run.train(1)


class Schedulers(unittest.TestCase):
    def test_made_before_the_distributed_optimizer(self):
        net = make_net()
        plain = copy.deepcopy(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(optimizer)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 1, 0.5)
        train_step = make_step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
            for seed in range(2):
                for each in (optimizer, plain_optimizer):
                    each.zero_grad()
                train_step(model, batch(seed))
                support.plain_step(plain, loss_of, batch(seed))
                for each in (optimizer, plain_optimizer, scheduler, plain_scheduler):
                    each.step()
        support.same_bits(self, model.state_dict(), plain.state_dict(), "parameters")
        train_step(model, batch(0) * float("nan"))
        with self.assertRaisesRegex((ValueError, RuntimeError), "nan|NaN|finite"):
            optimizer.step()


if __name__ == "__main__":
    support.main()
