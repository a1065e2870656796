"""Modules beside the model in a body, as teachers that nobody trains: their tensors are constants, and the numbers those of the
plain loop, bit for bit."""

import copy
import functools
import unittest

import support
import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


def make_teacher(norm=None):
    teacher = nn.Sequential(nn.Linear(6, 6), norm or nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6))
    for name, buffer in teacher.named_buffers():
        if name.endswith(("mean", "var")):
            buffer.uniform_(0.5, 2)
    return teacher.eval()


def frozen(module):
    return module.requires_grad_(False)


def without_grad_mode(function, mode=torch.no_grad):
    def call(y):
        with mode():
            result = function(y)
        return result.clone()  # behind inference mode a loop may use nothing else

    return call


MEAN, VARIANCE = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6)
INSTANCES = frozen(nn.InstanceNorm1d(6, affine=True, track_running_stats=True)).eval()


def on_instances(norm):
    return lambda y: norm(y.unsqueeze(2).expand(-1, -1, 3)).mean(2)


# What is made of a model's output, by a module for the plain loop and one for smp.
BESIDE = {
    "batch norm": lambda: frozen(make_teacher()),
    "functional batch norm": lambda: lambda y: F.batch_norm(y, MEAN, VARIANCE),
    "instance norm": lambda: on_instances(INSTANCES),
    "functional instance norm": lambda: on_instances(lambda y: F.instance_norm(y, MEAN, VARIANCE, use_input_stats=False)),
    "instance norm without statistics": lambda: on_instances(nn.InstanceNorm1d(6)),
    "scripted": lambda: torch.jit.script(frozen(make_teacher())),
    "traced": lambda: torch.jit.trace(frozen(make_teacher()), torch.ones(2, 6)),
    "scripted and frozen": lambda: torch.jit.freeze(torch.jit.script(frozen(make_teacher(nn.LayerNorm(6))))),
    "not frozen": lambda: without_grad_mode(make_teacher()),
    "not frozen, in inference mode": lambda: without_grad_mode(make_teacher(), torch.inference_mode),
    "not frozen, scripted": lambda: without_grad_mode(torch.jit.script(make_teacher())),
    "not frozen, recurrent": lambda: without_grad_mode(lambda y, lstm=nn.LSTM(6, 6): lstm(y)[0]),
    "computed with gradients": lambda: without_grad_mode(lambda y, w=torch.ones(6, requires_grad=True).exp(): y * w),
}


def loss_of(model, x, beside):
    y = model(x)
    return F.mse_loss(y, beside(y)) + y.square().mean()


class Beside(unittest.TestCase):
    def runs(self, make, between=lambda beside: None):
        plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model = smp.DistributedModel(copy.deepcopy(plain))
        torch.manual_seed(7)
        theirs = make()
        torch.manual_seed(7)
        ours = make()

        @smp.step
        def train_step(model, x):
            loss = loss_of(model, x, ours)
            model.backward(loss)
            return loss

        for seed in range(5):
            x = support.batch(seed)
            with torch.jit.optimized_execution(False):  # modules of a type share their code, and what was made of that
                expected = support.plain_step(plain, functools.partial(loss_of, beside=theirs), x)
            support.same_bits(self, train_step(model, x).outputs, expected, "losses")
            for name, parameter in model.local_named_parameters():
                support.same_bits(self, [parameter.grad], [plain.get_parameter(name).grad], f"gradient of {name}")
            between(theirs), between(ours)

    def test_equal_a_plain_loop(self):
        for name, make in BESIDE.items():
            with self.subTest(name):
                self.runs(make)

    def test_a_teacher_that_follows_between_steps(self):
        def follow(teacher):
            with torch.no_grad():
                for tensor in [*teacher.parameters(), teacher[1].running_mean]:
                    tensor.mul_(0.9)

        self.runs(lambda: frozen(make_teacher()), between=follow)

    def refuses(self, beside, text):
        model = smp.DistributedModel(nn.Linear(6, 6))

        @smp.step
        def train_step(model, x):
            model.backward(loss_of(model, x, beside))

        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, text):
                train_step(model, support.batch())

    def test_what_writes_or_trains_is_refused(self):
        teacher = make_teacher()
        without = without_grad_mode(teacher)
        trained = r"sizes \[6, 6\] that requires a gradient and is none of them.* or use it without grad mode"
        self.refuses(frozen(make_teacher()).train(), "batch_norm writes to a tensor of sizes .6. that is neither|add_ writes to a tensor")
        self.refuses(on_instances(copy.deepcopy(INSTANCES).train()), "instance_norm writes to a tensor|add_ writes to a tensor")
        self.refuses(lambda y: F.batch_norm(y, MEAN, VARIANCE, training=True), "batch_norm writes to a tensor of sizes .6. that is neither")
        self.refuses(teacher, trained)
        self.refuses(lambda y: without(y) + teacher(y), trained)
        self.refuses(lambda y: teacher(y) + without(y), trained)

    def test_one_that_is_trained_after_it_was_recorded_frozen(self):
        teacher = frozen(make_teacher())
        model = smp.DistributedModel(nn.Linear(6, 6))

        @smp.step
        def train_step(model, x):
            with torch.no_grad():
                target = teacher(x)
            loss = loss_of(model, x, teacher) + target.mean()
            model.backward(loss)
            return loss

        before = train_step(model, support.batch()).outputs
        teacher.requires_grad_()
        with self.assertRaisesRegex(RuntimeError, "that requires a gradient and is none of them"):
            train_step(model, support.batch())
        frozen(teacher)
        support.same_bits(self, train_step(model, support.batch()).outputs, before, "losses")


if __name__ == "__main__":
    support.main()
