"""What could go wrong without an error, and does not: it has the bits of the plain loop, or is refused."""

import copy
import ctypes
import os
import pathlib
import random
import sys
import threading
import types
import unittest

import support
import torch
from checkpoint_test import on_rank_0, shared_folder
from support import batch
from torch import nn

import smdistributed.modelparallel.torch as smp

FACTOR = 1.0  # of Told.forward


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Told(nn.Module):
    """Reads whatever Python has at hand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)])
        self.config = types.SimpleNamespace(scale=1.0, depth=2)
        self.temperature = 1.0
        self.activation = torch.tanh
        self.table = torch.ones(6)  # neither a parameter nor a buffer
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for layer in self.layers[: self.config.depth]:
            x = self.activation(layer(x)) * self.config.scale / self.temperature
        return self.layers[2](x * self.table) * FACTOR * self.calls


def loss_of(model, x):
    return model(x).square().mean()


class Compared(unittest.TestCase):
    def make(self, net, loss_of=loss_of):
        """Steps of both, and what is done to the modules of both before each."""
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)

        @smp.step
        def train_step(x):
            loss = loss_of(model, x)
            model.backward(loss)
            return loss

        def step(what, change=lambda net: None):
            change(net), change(plain)
            model.zero_grad(), plain.zero_grad()
            losses = train_step(batch()).outputs
            support.same_bits(self, losses, support.plain_step(plain, loss_of, batch()), f"losses, {what}")
            for name, parameter in model.local_named_parameters():
                expected = plain.get_parameter(name).grad
                self.assertEqual(parameter.grad is None, expected is None, f"{name}, {what}")
                if expected is not None:
                    support.same_bits(self, [parameter.grad], [expected], f"gradient of {name}, {what}")

        return step


class NeverStale(Compared):
    def test_whatever_forward_reads(self):
        slope = 1.0

        def closure(x):
            return torch.tanh(x) * slope

        def closed_over(net):
            nonlocal slope
            slope = 0.5

        def module_global(net):
            global FACTOR
            FACTOR = 0.5

        step = self.make(Told())
        for what, change in (
            ("at first", lambda net: None),
            ("again", lambda net: None),
            ("attribute", lambda net: setattr(net, "temperature", 2.0)),
            ("configuration", lambda net: setattr(net.config, "scale", 0.25)),
            ("number of layers", lambda net: setattr(net.config, "depth", 1)),
            ("function", lambda net: setattr(net, "activation", torch.sigmoid)),
            ("global", module_global),
            ("closure", lambda net: setattr(net, "activation", closure)),
            ("variable of a closure", closed_over),
            ("another tensor", lambda net: setattr(net, "table", torch.arange(6.0))),
            ("number of layers again", lambda net: setattr(net.config, "depth", 2)),
            ("a module", lambda net: (delattr(net, "activation"), setattr(net, "activation", nn.Tanh()))),
            ("another module", lambda net: setattr(net, "activation", nn.ReLU())),
        ):
            step(what, change)

    def test_microbatches_that_differ(self):
        """By a draw of Python's, as LayerDrop's."""

        class Drops(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
                self.head = nn.Linear(6, 3)
                self.random = random.Random(0)

            def forward(self, x):
                for layer in self.layers:
                    if self.random.random() < 0.5:
                        x = layer(x)
                return self.head(x)

        step = self.make(Drops())
        for number in range(6):
            step(f"step {number}")


    def test_an_alias_of_a_weight_now_and_then(self):
        """As a norm for the log: a run leaves a recording without the alias for one that has it."""
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)

        @smp.step
        def train_step(x, has_norm):
            loss = loss_of(model, x)
            model.backward(loss)
            return loss, net[2].weight.detach().norm() if has_norm else loss

        for number, has_norm in enumerate((False, True, False, True, True, False)):
            losses, norms = train_step(batch(), has_norm)
            expected = support.plain_step(plain, loss_of, batch())
            support.same_bits(self, losses.outputs, expected, f"losses of step {number}")
            if has_norm:
                expected = [plain[2].weight.detach().norm()] * support.MICROBATCHES
            support.same_bits(self, norms.outputs, expected, f"norms of step {number}")


class Modes(Compared):
    """Of torch, which bodies and their callers switch."""

    def test_autocast_in_a_body_and_around_a_step(self):
        def within(model, x):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x)
            assert output.dtype == torch.bfloat16
            return output.float().square().mean()

        net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
        plain = copy.deepcopy(net)
        step = self.make(net, within)
        for number in range(3):
            step(f"step {number}")
        model, evaluate = smp.DistributedModel(copy.deepcopy(plain)), support.make_evaluation()
        parts = [part.clone() for part in batch().chunk(support.MICROBATCHES)]
        for is_around in (True, False, True):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_around):
                outputs = evaluate(model, batch()).outputs
                self.assertEqual(outputs[0].dtype, torch.bfloat16 if is_around else torch.float32)
                support.same_bits(self, outputs, [plain(part) for part in parts], "outputs")
        with torch.autocast("cpu", torch.bfloat16), self.assertRaisesRegex(ValueError, "a call outside of autocast"):
            support.make_step()(model, batch())

    def test_gradients_in_a_part_of_a_body(self):
        """As a model that is its own teacher."""

        def within_a_block(model, x):
            with torch.no_grad():
                target = model(x * 0.5)
            return (model(x) - target).square().mean()

        def by_function(model, x):
            torch.set_grad_enabled(False)
            target = model(x * 0.5)
            torch.set_grad_enabled(True)
            return (model(x) - target).square().mean()

        for loss in (within_a_block, by_function):
            step = self.make(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), loss)
            for number in range(3):
                step(f"step {number}")

    def test_a_metric_without_gradients(self):
        def with_metric(model, x):
            output = model(x)
            with torch.no_grad():
                output.float().argmax(1).float().mean().item()
                self.assertEqual(output.numpy().shape, tuple(output.shape))
            with torch.inference_mode():
                output.sum().item()
            return output.square().mean()

        net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 3))
        step = self.make(net, with_metric)
        for number in range(4):
            step(f"step {number}")

    def test_gradients_in_a_part_of_forward(self):
        class Frozen(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
                self.is_frozen = True

            def forward(self, x):
                with torch.set_grad_enabled(not self.is_frozen):
                    x = self.first(x)
                return self.second(x)

        step = self.make(Frozen())
        for number in range(4):
            step(f"step {number}", lambda net: setattr(net, "is_frozen", number % 2 == 0))  # noqa: B023


class Refused(unittest.TestCase):
    def refuses(self, forward, text, prepare=lambda net: None):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(6, 6)
                self.table = torch.zeros(6)

        Net.forward = forward
        net = Net()
        prepare(net)
        model = smp.DistributedModel(net)

        @smp.step
        def train_step(x):
            loss = loss_of(model, x)
            model.backward(loss)
            return loss

        with self.assertRaisesRegex(RuntimeError, text):
            train_step(batch())

    def test_operators_of_another_thread(self):
        def elsewhere(compute):
            """What compute() returns or raises in a thread of its own."""
            results, errors = [], []

            def work():
                try:
                    results.append(compute())
                except RuntimeError as error:
                    errors.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            if errors:
                raise errors[0]
            return results[0]

        self.refuses(lambda self, x: elsewhere(lambda: self.inner(x)), "raw pointer to step argument 0")
        self.refuses(
            lambda self, x: nn.functional.linear(x, elsewhere(lambda: self.inner.weight * 2)), "outside of it or on another thread"
        )

    def test_raw_memory(self):
        def forward(self, x):
            y = self.inner(x)
            ctypes.memset(y.data_ptr(), 0, y.numel() * y.element_size())
            return y

        self.refuses(forward, "raw pointer to the result of aten::linear, in or after module .inner.")

    def test_data_that_is_put_in_place(self):
        def forward(self, x):
            y = self.inner(x)
            y.data = y.data * 0.5
            return y

        self.refuses(forward, "replaces the data of an existing tensor")

    def test_writes_to_tensors_that_are_no_buffers(self):
        def forward(self, x):
            self.table.add_(1)
            return self.inner(x) + self.table

        self.refuses(forward, "aten::add_ writes to a tensor of sizes .6. that is neither parameter")

    def test_data_that_nothing_has_written(self):
        self.refuses(lambda self, x: self.inner(x) * torch.empty(6), r"reads the result of empty\(\) before any operator")

    def test_shapes_that_depend_on_data(self):
        def forward(self, x):
            y = self.inner(x)
            return y[y > 0]

        self.refuses(forward, "aten::index.*the shape of its result depends on data")


    def test_what_stages_would_run_without(self):
        class Halving(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {})) * 0.5

        def in_mode(self, x):
            with Halving():
                return self.inner(x)

        def packed(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
                return self.inner(x)

        self.refuses(in_mode, "got one under a mode of Python's dispatcher")
        self.refuses(packed, "got one under hooks of saved tensors")

    def test_hooks_of_the_backward(self):
        def hooked(self, x):
            y = self.inner(x)
            self.inner.weight.register_hook(lambda gradient: gradient * 0.5)
            return y

        def with_backward_hook(self, x):
            self.inner.register_full_backward_hook(lambda module, inputs, outputs: None)
            return self.inner(x)

        def hooked_once_more(self, x):
            self.inner.weight.register_hook(lambda gradient: gradient * 3).remove()
            y = self.inner(x)
            self.outside.remove()
            return y

        def hook(net):
            net.outside = net.inner.weight.register_hook(lambda gradient: gradient * 2)

        self.refuses(hooked_once_more, "leave the gradient hooks of 'inner.weight' as they are", hook)
        self.refuses(hooked, "leave the gradient hooks of 'inner.weight' as they are")
        self.refuses(with_backward_hook, "expected modules without backward hooks")


class Waiting(unittest.TestCase):
    def test_leaves_python_to_other_threads(self):
        """Rank 1 waits in a step for rank 0, which waits for a thread of rank 1."""
        model = smp.DistributedModel(nn.Linear(6, 3))
        train_step = support.make_step()
        train_step(model, batch())
        if smp.size() == 1:
            return
        with shared_folder() as folder:
            pipe = os.path.join(folder, "pipe")
            on_rank_0(lambda: os.mkfifo(pipe))
            interval = sys.getswitchinterval()
            if smp.rank() == 0:
                with open(pipe) as file:
                    self.assertEqual(file.read(), "here")
            elif smp.rank() == 1:
                begins = threading.Event()
                thread = threading.Thread(target=lambda: begins.wait() and pathlib.Path(pipe).write_text("here"))
                thread.start()
                sys.setswitchinterval(1000)  # seconds: the lock is given away, and not taken
                begins.set()
            train_step(model, batch())
            sys.setswitchinterval(interval)
            if smp.rank() == 1:
                thread.join()


if __name__ == "__main__":
    support.main()
