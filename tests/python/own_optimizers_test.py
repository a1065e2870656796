"""Optimizers of the script's own: those that update each parameter by itself, and those that mix parameters."""

import copy
import math
import pathlib
import unittest
from unittest import mock

import support
import torch
from support import batch, loss_of, make_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.views import OptimizerView

REFUSAL = "expected an optimizer that updates each parameter by its own gradient, got one in which "


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


train_step = make_step()


class Own(torch.optim.Optimizer):
    """Calls update(parameters) of those that have a gradient."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.kept = {}

    @torch.no_grad()
    def step(self):
        self.update([p for group in self.param_groups for p in group["params"] if p.grad is not None])


def own(update):
    return type(update.__name__, (Own,), {"update": update})


# What updates each parameter by itself.


def sgd(self, parameters):
    for p in parameters:
        p.data = p.data - 0.1 * p.grad


def foreach_adam(self, parameters):
    for p in parameters:
        if not self.state[p]:
            self.state[p].update(step=torch.tensor(0.0), m=torch.zeros_like(p), v=torch.zeros_like(p))
    gradients = [p.grad for p in parameters]
    steps, means, squares = ([self.state[p][name] for p in parameters] for name in ("step", "m", "v"))
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(means, gradients, 0.1)
    torch._foreach_mul_(squares, 0.99)
    torch._foreach_addcmul_(squares, gradients, gradients, 0.01)
    rates = [-0.01 / (1 - 0.9 ** step.item()) for step in steps]
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, means, roots, rates)


def lars(self, parameters):
    for p in parameters:
        p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1e-8)), alpha=0.01)


def lars_on_the_host(self, parameters):
    for p in parameters:
        p.sub_(p.grad, alpha=0.01 * p.norm().item() / (p.grad.norm().item() + 1e-8))


def foreach_lars(self, parameters):
    gradients = [p.grad for p in parameters]
    trusts = torch._foreach_div(torch._foreach_norm(parameters), torch._foreach_norm(gradients))
    torch._foreach_sub_(parameters, torch._foreach_mul(gradients, trusts), alpha=0.01)


def adafactor(self, parameters):
    for p in parameters:
        squares = p.grad.square() + 1e-30
        if p.dim() == 2:
            rows, columns = squares.mean(1), squares.mean(0)
            squares = torch.outer(rows, columns) / rows.mean()
        update = p.grad / squares.sqrt()
        p.add_(update / update.square().mean().sqrt().clamp(min=1.0), alpha=-0.01)


def shared_rate(self, parameters):
    rate = self.kept.setdefault("rate", torch.tensor(0.1))
    for p in parameters:
        p.addcmul_(p.grad, -rate)
    rate.mul_(0.9)


def one_buffer(self, parameters):
    buffer = torch.empty(max(p.numel() for p in parameters))
    for p in parameters:
        piece = buffer[: p.numel()].view_as(p)
        torch.mul(p.grad, 0.1, out=piece)
        p.sub_(piece)


def one_memory_for_all(self, parameters):
    if "moments" not in self.kept:
        self.kept["moments"] = torch.zeros(sum(p.numel() for p in parameters))
    for p, moment in zip(parameters, self.kept["moments"].split([p.numel() for p in parameters]), strict=True):
        moment.mul_(0.9).add_(p.grad.flatten())
        p.sub_(moment.view_as(p), alpha=0.1)


def shows_and_clips(self, parameters):
    torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e6)  # of all ranks
    for p in parameters:
        self.kept["shown"] = repr(p)
        p.sub_(p.grad, alpha=0.1)


def keeps_slow_weights(self, parameters):
    for p in parameters:
        slow = self.state[p].setdefault("slow", p.clone())
        p.sub_(p.grad, alpha=0.1)
        p.copy_(slow.lerp_(p, 0.5))


PASSING = (shows_and_clips, keeps_slow_weights, sgd, foreach_adam, lars, lars_on_the_host, foreach_lars, adafactor, shared_rate, one_buffer, one_memory_for_all)

# What mixes parameters, and what the error says of it.


def norm_of_all(self, parameters):
    for p in parameters:  # before it: what has to be put back
        self.state[p]["count"] = self.state[p].get("count", 0) + 1
        self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
    self.kept["updates"] = self.kept.get("updates", 0) + 1
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:
        p.grad.mul_(2)
        p.sub_(p.grad / norm, alpha=0.01)


def foreach_norm_of_all(self, parameters):
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([p.grad for p in parameters])))
    torch._foreach_sub_(parameters, torch._foreach_div([p.grad for p in parameters], norm), alpha=0.01)


def sum_of_squares(self, parameters):
    square = sum(p.grad.square().sum() for p in parameters)
    for p in parameters:
        p.data = p.data - 0.01 * p.grad / square.sqrt()


def norm_on_the_host(self, parameters):
    norm = math.sqrt(sum(p.grad.norm().item() ** 2 for p in parameters))
    for p in parameters:
        p.sub_(p.grad, alpha=0.01 / norm)


def norm_through_numpy(self, parameters):
    norm = math.sqrt(sum(p.grad.square().sum().numpy().item() for p in parameters))
    for p in parameters:
        p.data = p.data - p.grad * (0.01 / norm)


def norm_through_a_list(self, parameters):
    norm = sum(p.grad.norm().tolist() for p in parameters)
    for p in parameters:
        p.sub_(p.grad, alpha=0.01 / norm)


def flat(self, parameters):
    update = torch.cat([p.grad.flatten() for p in parameters])
    update.div_(update.abs().max())
    for p, each in zip(parameters, update.split([p.numel() for p in parameters]), strict=True):
        p.sub_(each.view_as(p), alpha=0.01)


def from_the_second_update(self, parameters):
    for p in parameters:
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        if self.state[p].setdefault("updates", 0) > 0:
            p.sub_(moment * self.kept["sum"], alpha=0.01)
        self.state[p]["updates"] += 1
        moment.add_(p.grad)
    self.kept["sum"] = sum(self.state[p]["moment"].sum() for p in parameters)


def neighbour(self, parameters):
    for p, q in zip(parameters, parameters[1:] + parameters[:1], strict=True):
        p.sub_(p.grad, alpha=0.01)
        p.view(-1)[0].copy_(q.view(-1)[0])


REFUSED = {
    norm_of_all: "aten::stack puts together what comes from '\\d.weight' and '\\d.bias'",
    foreach_norm_of_all: "aten::stack puts together",
    sum_of_squares: "aten::add puts together",
    norm_on_the_host: "aten::item reads a value that comes from '\\d.bias', and '\\d.weight' is updated before '\\d.bias'",
    norm_through_numpy: "numpy reads a value that comes from",
    norm_through_a_list: "tolist reads a value that comes from",
    flat: "aten::cat puts together",
    from_the_second_update: "aten::add puts together",
    neighbour: "aten::copy_ puts together",
}


def bits_of(optimizer, model):
    """Of all that a refused update leaves as it was."""
    local = {name: p for name, p in model.local_named_parameters()}
    grads = {f"{name}.grad": p.grad.clone() for name, p in local.items() if p.grad is not None}
    states = {
        f"{name}.{key}": torch.as_tensor(value).clone() for name, p in local.items() for key, value in optimizer.state.get(p, {}).items()
    }
    kept = {f"kept.{name}": torch.as_tensor(value).clone() for name, value in optimizer.kept.items()}
    return {**{name: p.detach().clone() for name, p in local.items()}, **grads, **states, **kept}


class OwnOptimizers(unittest.TestCase):
    def setUp(self):
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.plain = copy.deepcopy(self.net)
        self.model = smp.DistributedModel(self.net)

    def train(self, optimizer, plain_optimizer, seeds=range(4)):
        for seed in seeds:
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            train_step(self.model, batch(seed))
            support.plain_step(self.plain, loss_of, batch(seed))
            optimizer.step()
            plain_optimizer.step()
        support.same_bits(self, self.model.state_dict(), self.plain.state_dict(), "parameters")

    def test_that_update_each_parameter_by_itself_train_as_in_the_plain_loop(self):
        for update in PASSING:
            with self.subTest(update.__name__):
                self.setUp()
                made = own(update)
                self.train(smp.DistributedOptimizer(made(self.net.parameters())), made(self.plain.parameters()))

    def test_that_derive_from_those_of_torch_pass(self):
        for kind in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Rprop", "Adafactor"):
            for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
                derived = type(kind, (getattr(torch.optim, kind),), {})
                if "fused" in options and kind not in ("SGD", "Adam", "AdamW", "Adagrad"):
                    continue
                if kind == "Adafactor" and "foreach" in options and options["foreach"]:
                    continue  # reads a number of each parameter before it updates the first
                with self.subTest(kind, **options):
                    self.setUp()
                    optimizers = [derived(net.parameters(), lr=0.01, **options) for net in (self.net, self.plain)]
                    self.train(smp.DistributedOptimizer(optimizers[0]), optimizers[1])

    def test_that_mix_parameters_are_refused_before_anything_changes(self):
        for update, text in REFUSED.items():
            with self.subTest(update.__name__):
                self.setUp()
                made = own(update)
                optimizer = smp.DistributedOptimizer(made(self.net.parameters()))
                if smp.pp_size() == 1:
                    self.train(optimizer, made(self.plain.parameters()))
                    continue
                train_step(self.model, batch(0))
                support.plain_step(self.plain, loss_of, batch(0))
                if update is from_the_second_update:
                    optimizer.step()
                    made(self.plain.parameters()).step()
                for _ in range(2):  # and again, as often as it is tried
                    before = bits_of(optimizer, self.model)
                    with self.assertRaisesRegex(ValueError, f"DistributedOptimizer.step: {REFUSAL}{text}.*model.clip_grad_norm_"):
                        optimizer.step()
                    support.same_bits(self, bits_of(optimizer, self.model), before, "what a refused update leaves")
                other = torch.optim.Adam(self.net.parameters())
                plain_other = torch.optim.Adam(self.plain.parameters())
                self.train(smp.DistributedOptimizer(other), plain_other)

    def test_that_mix_what_one_rank_has_are_refused_on_all(self):
        layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16, bias=False)]
        net = nn.Sequential(*layers)
        smp.set_partition(layers[0], 0)
        smp.set_partition(layers[2], smp.pp_size() - 1)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(own(norm_of_all)(net.parameters()))
        train_step(model, batch(0))
        if smp.pp_size() == 1:
            optimizer.step()
            return
        self.assertEqual(len(list(model.local_parameters())), 2 - smp.pp_rank())
        before = bits_of(optimizer, model)
        with self.assertRaisesRegex(ValueError, "aten::stack puts together what comes from '0.weight' and '0.bias'"):
            optimizer.step()
        support.same_bits(self, bits_of(optimizer, model), before, "what a refused update leaves")

    def test_that_mix_parameters_are_told_as_on_the_page(self):
        optimizer = smp.DistributedOptimizer(own(norm_of_all)(self.net.parameters()))
        train_step(self.model, batch(0))
        if smp.pp_size() == 1:
            optimizer.step()
            return
        with self.assertRaises(ValueError) as refused:
            optimizer.step()
        self.assertIn(f"\n{refused.exception}\n", (pathlib.Path(__file__).parents[2] / "docs/python_refusals.md").read_text())

    def test_with_the_norm_of_all_ranks(self):
        class Scaled(Own):
            def update(self, parameters):
                for p in parameters:
                    p.sub_(p.grad, alpha=0.01 / self.norm)

        optimizer = smp.DistributedOptimizer(Scaled(self.net.parameters()))
        train_step(self.model, batch(0))
        support.plain_step(self.plain, loss_of, batch(0))
        optimizer.norm = self.model.clip_grad_norm_(math.inf)
        optimizer.step()
        plain_optimizer = Scaled(self.plain.parameters())
        plain_optimizer.norm = optimizer.norm
        plain_optimizer.step()
        support.same_bits(self, self.model.state_dict(), self.plain.state_dict(), "parameters")

    def test_that_throw_on_one_rank_do_on_all(self):
        def failing(self, parameters):
            for p in parameters:
                p.sub_(p.grad)
            if smp.pp_rank() == smp.pp_size() - 1:
                raise KeyError("mine")

        optimizer = smp.DistributedOptimizer(own(failing)(self.net.parameters()))
        train_step(self.model, batch(0))
        before = bits_of(optimizer, self.model)
        is_last = smp.pp_rank() == smp.pp_size() - 1
        with self.assertRaisesRegex(*((KeyError, "mine") if is_last else (RuntimeError, "on pipeline rank 1: KeyError: 'mine'"))):
            optimizer.step()
        if smp.pp_size() > 1:
            support.same_bits(self, bits_of(optimizer, self.model), before, "what a failed update leaves")

    def test_of_torch_are_not_watched(self):
        class Watched(torch.optim.SGD):
            pass

        for made, is_watched in ((torch.optim.SGD, False), (torch.optim.Adafactor, False), (Watched, True), (own(sgd), True)):
            with self.subTest(made.__name__):
                self.setUp()
                optimizer = smp.DistributedOptimizer(made(self.net.parameters(), lr=0.1))
                train_step(self.model, batch(0))
                with mock.patch.object(OptimizerView, "snapshot", autospec=True, side_effect=OptimizerView.snapshot) as taken:
                    for _ in range(4):
                        optimizer.step()
                self.assertEqual(taken.call_count, 2 if is_watched and smp.pp_size() > 1 else 0)


if __name__ == "__main__":
    support.main()
