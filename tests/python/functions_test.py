"""Custom autograd functions, torch.utils.checkpoint, torch.compile, hooks and parametrizations of modules in bodies, against
the plain loop bit for bit."""

import copy
import unittest

import support
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class ScaledGradient(torch.autograd.Function):
    """A forward and a backward that do not belong together."""

    @staticmethod
    def forward(ctx, x, scale, names=None):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * ctx.scale, None, None


class Split(torch.autograd.Function):
    """In the newer style, with two results beside a plain value, and a look at the data."""

    @staticmethod
    def forward(x, shift):
        largest = torch.from_numpy(x.detach().numpy().max(1, keepdims=True).copy())
        return x - largest, x + shift, None

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, first, second, _):
        (x,) = ctx.saved_tensors
        return first * 3 + second * x.sign(), None


class Plain(torch.autograd.Function):
    """With a result that no body can have."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, float(x.detach().sum())

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * 2


class Appending(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out):
        out.append(3.0)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Unbound(torch.autograd.Function):
    """As many results as its argument has columns."""

    @staticmethod
    def forward(ctx, x):
        return tuple(column.clone() for column in x.unbind(1))

    @staticmethod
    def backward(ctx, *gradients):
        return torch.stack(gradients, 1) * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = 0.5

    def forward(self, x):
        h = ScaledGradient.apply(self.first(x), self.scale, ("a", "b"))
        low, high, none = Split.apply(self.second(h), 1.5)
        assert none is None
        return self.third(low * high)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        # A reentrant checkpoint of what needs no gradient gives none, not even to its parameters.
        x = self.first(torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=self.reentrant))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Shrinking(nn.Module):
    """Halves until it is small: a loop over data, which no graph holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("limit", torch.tensor(0.5))
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, scale=1.0):
        y = self.linear(self.drop(x)) * scale
        while y.norm() > self.limit:
            y = y / 2
        return {"y": y}


class WithShrinking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shrinking, self.last = nn.Linear(4, 4), Shrinking(), nn.Linear(4, 4)
        self.shrinking.register_forward_hook(lambda module, args, output: {"y": output["y"] + 1})

    def forward(self, x):
        return self.last(self.shrinking(self.first(x), scale=2.0)["y"])


class Scaled(nn.Linear):
    factor = 1.0

    def forward(self, x, *, scale=1.0):
        return super().forward(x) * self.factor * scale


class Replacing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.Tanh()
        self.register_buffer("mean", torch.zeros(4))
        self.change = change

    def forward(self, x):
        y = self.act(self.linear(x)) - self.mean
        self.change(self, x)
        return y


class Functions(unittest.TestCase):
    def check(self, net, plain=None, steps=3, between=lambda module, number: None):
        plain = plain or copy.deepcopy(net)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

        @smp.step
        def train_step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        for number in range(steps):
            between(net, number), between(plain, number)
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            losses = train_step(model, x).outputs
            plain_optimizer.zero_grad()
            expected = support.plain_step(plain, lambda model, x: model(x).square().mean(), x)
            support.same_bits(self, losses, expected, f"losses of step {number}")
            for path, parameter in model.local_named_parameters():
                support.same_bits(self, [parameter.grad], [plain.get_parameter(path).grad], f"gradient of {path}")
            optimizer.step()
            plain_optimizer.step()
        support.same_bits(self, model.state_dict(), getattr(plain, "_orig_mod", plain).state_dict(), "parameters")

    def test_custom_backward(self):
        self.check(Custom())

    def test_arguments_are_never_stale(self):
        def between(module, number):
            module.scale = 0.5 + number % 2

        self.check(Custom(), steps=5, between=between)

    def test_plain_results_and_writes_to_arguments_are_refused(self):
        model = smp.DistributedModel(nn.Linear(4, 4))
        for body, reason in (
            (lambda model, x: Plain.apply(model(x))[0], "Plain: expected tensors as results"),
            (lambda model, x: Appending.apply(model(x), []), "Appending: expected a call that leaves its arguments"),
            (lambda model, x: Writing.apply(model(x) * 1), "Writing: expected a call that leaves its tensors"),
        ):
            with self.assertRaisesRegex(RuntimeError, reason):
                smp.step(body)(model, torch.ones(8, 4))

    def test_results_are_known_by_sizes(self):
        model = smp.DistributedModel(nn.Linear(4, 4))

        @smp.step
        def body(model, x, width):
            columns = Unbound.apply(model(x)[:, :width])
            model.backward(sum(columns).mean())
            return len(columns)

        for width in (4, 2, 4, 3):
            self.assertEqual(body(model, torch.ones(8, 4), width), [width] * support.MICROBATCHES)

    def test_functions_that_cannot_be_sent_are_refused(self):
        class Local(torch.autograd.Function):
            forward = ScaledGradient.forward
            backward = ScaledGradient.backward

        model = smp.DistributedModel(nn.Linear(4, 4))
        for function, argument, reason in ((Local, 1.0, "Local"), (ScaledGradient, nn.Linear(1, 1), "Linear within")):

            @smp.step
            def body(model, x, function=function, argument=argument):
                return function.apply(model(x), argument)

            with self.assertRaisesRegex(RuntimeError, reason):
                body(model, torch.ones(8, 4))

    def test_checkpointed_blocks(self):
        for reentrant in (False, True):
            with self.subTest(reentrant=reentrant):
                self.check(Checkpointed(reentrant))

    def test_checkpoint_in_a_context(self):
        class InContext(nn.Sequential):
            def forward(self, x):
                def contexts():
                    return torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)

                run = super().forward
                return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False, context_fn=contexts).float()

        self.check(InContext(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))

    def test_opaque_modules(self):
        net = WithShrinking()
        net.shrinking.drop.eval()  # plain torch draws other numbers
        plain = copy.deepcopy(net)
        smp.opaque(net.shrinking)
        self.check(net, plain=plain)
        with self.assertRaisesRegex(TypeError, "got int"):
            smp.opaque(3)

    def test_opaque_modules_that_replace_what_they_have(self):
        changes = (
            ("mean", lambda net, x: setattr(net, "mean", x.mean(0))),
            ("last", lambda net, x: net.register_buffer("last", x.mean(0))),
            ("act", lambda net, x: setattr(net, "act", nn.ReLU())),
            ("linear.weight", lambda net, x: setattr(net.linear, "weight", nn.Parameter(torch.ones(4, 4)))),
            ("linear.bias", lambda net, x: setattr(net.linear.bias, "data", net.linear.bias.data + 1)),
        )
        for position in (0, 1):
            for name, change in changes:
                layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
                layers[position] = smp.opaque(Replacing(change))
                net = nn.Sequential(*layers)
                model, evaluate = smp.DistributedModel(net), support.make_evaluation()
                smp.set_partition(net[0], 0), smp.set_partition(net[1], smp.pp_size() - 1)
                before = model.state_dict()
                for _ in range(2):
                    with self.assertRaisesRegex(RuntimeError, f"Replacing: expected a forward .* got others for {name}. "):
                        evaluate(model, torch.ones(8, 4))
                self.assertEqual(list(net[position]._modules), ["linear", "act"])
                support.same_bits(self, model.state_dict(), before, name)
                net[position].change = lambda net, x: setattr(net.linear.bias, "data", net.linear.bias.data.clone())
                evaluate(model, torch.ones(8, 4))

    def test_copies_of_opaque_modules_have_attributes_of_their_own(self):
        plain = nn.Sequential(*(Scaled(4, 4) for _ in range(3)))
        block = smp.opaque(copy.deepcopy(plain[0]))
        net = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))
        net.load_state_dict(plain.state_dict())
        for layers in (net, plain):
            for number, layer in enumerate(layers):
                layer.factor = 1.0 + number
        self.check(net, plain=plain)

    def test_hooks_of_modules(self):
        def with_more_scale(module, args, kwargs):
            return args, {**kwargs, "scale": kwargs.get("scale", 1.0) * 3}

        net = nn.Sequential(nn.Linear(4, 4), Scaled(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
        net.register_forward_pre_hook(lambda module, args: args[0] * 2)
        net[0].register_forward_hook(lambda module, args, output: torch.cat([output[:, 2:], args[0][:, :2]], 1))
        net[1].register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        net[1].register_forward_pre_hook(with_more_scale, with_kwargs=True)
        net[1].register_forward_hook(lambda module, args, kwargs, output: output * len(kwargs) + 1, with_kwargs=True)
        net[2].register_forward_hook(lambda module, args, output: output * module.weight_of_hook)

        def between(module, number):
            module[2].weight_of_hook = 0.5 + number % 2
            if number == 3:
                module[1]._forward_pre_hooks.clear()

        self.check(net, steps=5, between=between)

    def test_parametrizations(self):
        self.check(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), Scaled(8, 4)))

    def test_modules_of_torchscript(self):
        plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        net = copy.deepcopy(plain)
        net[0], net[2] = torch.jit.script(net[0]), torch.jit.trace(net[2], torch.ones(2, 6))
        model, train_step = smp.DistributedModel(net), support.make_step()
        for seed in range(3):
            losses = train_step(model, support.batch(seed)).outputs
            support.same_bits(self, losses, support.plain_step(plain, support.loss_of, support.batch(seed)), "losses")
        for name, parameter in model.local_named_parameters():
            support.same_bits(self, [parameter.grad], [plain.get_parameter(name).grad], f"gradient of {name}")

    def test_compiled_modules_run_as_they_were_written(self):
        self.check(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), backend="eager"))


if __name__ == "__main__":
    support.main()
