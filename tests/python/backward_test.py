"""model.backward of several tensors with gradients of their own, and smp.amp.GradScaler, against torch's own bit for bit."""

import copy
import unittest

import support
import torch
from support import batch, loss_of
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


def make_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Backward(unittest.TestCase):
    def check(self, tensors_of, gradients_of):
        """Gradients after one step beside those of torch.autograd.backward, microbatch by microbatch."""
        net = make_net()
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)

        @smp.step
        def step(model, x):
            model.backward(tensors_of(model(x)), gradients_of(x))

        step(model, batch())
        for part in batch().chunk(support.MICROBATCHES):
            gradients = gradients_of(part.clone())
            torch.autograd.backward(tensors_of(plain(part.clone())), gradients)
        expected = {name: parameter.grad / support.MICROBATCHES for name, parameter in plain.named_parameters()}
        local = dict(model.local_named_parameters())
        support.same_bits(
            self, {name: local[name].grad for name in local}, {name: expected[name] for name in local}, "gradients"
        )

    def test_of_a_tensor_by_its_gradient(self):
        self.check(lambda y: y, lambda x: x[:, :2])
        self.check(lambda y: [y], lambda x: [x[:, :2].exp()])

    def test_of_several_losses(self):
        self.check(lambda y: (y[:, 0].sum(), y[:, 1].pow(2).mean()), lambda x: None)

    def test_of_a_loss_beside_a_tensor(self):
        self.check(lambda y: [y.pow(2).mean(), y.sin()], lambda x: (None, x[:, 2:4]))

    def test_of_complex_tensors(self):
        self.check(lambda y: torch.complex(y, y.sin()), lambda x: torch.complex(x[:, :2], x[:, 2:4]))

    def test_refuses_what_torch_refuses(self):
        model = smp.DistributedModel(make_net())
        for ask, words in (
            (lambda y: model.backward([y.sum(), y]), r"tensor 1 .* got torch.float32 of sizes \(4, 2\)"),
            (lambda y: model.backward(y, y.detach()[:1]), r"sizes \(4, 2\), .* and torch.float32 of sizes \(1, 2\)"),
            (lambda y: model.backward(y, y.detach() * 1j), "and torch.complex64 of sizes"),
            (lambda y: model.backward([y.sum(), y.sum()], [None]), "got 2 tensors and 1 gradients"),
            (lambda y: model.backward([]), "got 0 tensors"),
            (lambda y: model.backward([y.sum(), y.detach().sum()]), "tensor 1 .* requires_grad=False"),
        ):

            @smp.step
            def step(model, x, ask=ask):
                ask(model(x))

            with self.assertRaisesRegex(ValueError, words):
                step(model, batch())

    def test_is_told_what_a_loss_is(self):
        for nothing in (None, 3.0, {"loss": 1}):

            @smp.step
            def step(model, x, nothing=nothing):
                model(x)
                model.backward(nothing)

            with self.assertRaisesRegex(TypeError if smp.pp_rank() == 0 else RuntimeError, "expected tensors, got"):
                step(smp.DistributedModel(make_net()), batch())


class Scaler(unittest.TestCase):
    def train(self, make, distribute, losses_at, make_scaler, steps=6):
        """Parameters and scale after each step; one step's gradients overflow."""
        torch.manual_seed(1)
        net = make_net()
        model = distribute(net)
        optimizer = make(net)
        scaler = make_scaler()
        seen = []
        for number in range(steps):
            optimizer.zero_grad()
            losses_at(model, scaler, batch(number), 1e37 if number == 2 else 1.0)
            if number % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), copy.deepcopy(model.state_dict())))
        return seen

    def test_scales_and_skips_as_torchs_in_one_process(self):
        @smp.step
        def step(model, scaler, x, factor):
            model.backward(scaler.scale(loss_of(model, x) * factor))

        def plain_step(model, scaler, x, factor):
            support.plain_step(model, lambda model, part: scaler.scale(loss_of(model, part) * factor), x)

        def distributed(net):
            return smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

        options = dict(init_scale=2.0**10, growth_interval=2)
        ours = self.train(distributed, smp.DistributedModel, step, lambda: smp.amp.GradScaler(**options))
        theirs = self.train(
            lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), lambda net: net, plain_step,
            lambda: torch.amp.GradScaler("cpu", **options),
        )  # fmt: skip
        self.assertEqual([scale for scale, _ in ours], [1024, 2048, 1024, 1024, 2048, 2048])
        for (scale, state), (plain_scale, plain_state) in zip(ours, theirs, strict=True):
            self.assertEqual(scale, plain_scale)
            for name, tensor in plain_state.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-7)  # norms are summed in another order

    def test_takes_fused_optimizers_and_keeps_its_state(self):
        net = make_net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), fused=True))
        scaler = smp.amp.GradScaler(init_scale=2.0**10)

        @smp.step
        def step(model, scaler, x, factor):
            model.backward(scaler.scale(loss_of(model, x) * factor))

        for factor in (1.0, 1e37):
            before = model.state_dict()
            optimizer.zero_grad()
            step(model, scaler, batch(), factor)
            scaler.step(optimizer)
            scaler.update()
            self.assertEqual(torch.equal(before["0.weight"], model.state_dict()["0.weight"]), factor > 1)
        self.assertEqual(scaler.get_scale(), 512)
        other = smp.amp.GradScaler()
        other.load_state_dict(scaler.state_dict())
        for each in (other, copy.deepcopy(scaler)):
            self.assertEqual(each.get_scale(), 512)
            step(model, each, batch(), 1.0)

    def test_lets_each_optimizer_decide_for_itself(self):
        nets = make_net(), make_net()
        models = [smp.DistributedModel(net) for net in nets]
        optimizers = [smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
        scaler = smp.amp.GradScaler(init_scale=2.0**10)

        @smp.step
        def step(overflows, other, x):
            overflows.backward(scaler.scale(loss_of(overflows, x) * 1e37))
            other.backward(scaler.scale(loss_of(other, x)))

        before = [model.state_dict() for model in models]
        step(*models, batch())
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        self.assertEqual(scaler.get_scale(), 512)
        kept = [torch.equal(old["0.weight"], model.state_dict()["0.weight"]) for old, model in zip(before, models, strict=True)]
        self.assertEqual(kept, [True, False])
        with self.assertRaisesRegex(RuntimeError, "finite"):  # without the scaler
            optimizers[1].step()

    def test_that_differ_by_rank_are_refused(self):
        """As where one rank alone loads their state: each would divide by its own scale."""
        net = make_net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        scaler = smp.amp.GradScaler(init_scale=2.0**10)
        own = scaler.state_dict()

        @smp.step
        def step(model, x):
            model.backward(scaler.scale(loss_of(model, x)))

        last = smp.rank() == smp.size() - 1
        for change, text in (
            (lambda: scaler.load_state_dict({**own, "scale": 64.0}), r"got scale 1024.0 on rank 0 and scale 64.0 on rank \d"),
            (lambda: scaler.update(64.0), r"got scale 1024.0 on rank 0 and scale 64.0 on rank \d"),
            (lambda: scaler.load_state_dict({**own, "_growth_tracker": 3}), r"_growth_tracker 0 .* _growth_tracker 3 on rank \d"),
        ):
            if last:
                change()
            before = model.state_dict()
            optimizer.zero_grad()
            step(model, batch())
            if smp.size() > 1:
                with self.assertRaisesRegex(ValueError, f"GradScaler.unscale_: .*{text}.*on all ranks alike"):
                    scaler.step(optimizer)
                support.same_bits(self, model.state_dict(), before, "weights")
            scaler = smp.amp.GradScaler(init_scale=2.0**10)
        optimizer.zero_grad()
        step(model, batch())
        scaler.step(optimizer)
        self.assertFalse(torch.equal(model.state_dict()["0.weight"], before["0.weight"]))

    def test_takes_no_device(self):
        for device in ("cuda", torch.device("cpu")):
            with self.assertRaisesRegex(TypeError, f"a number as init_scale, got .*{torch.device(device).type}"):
                smp.amp.GradScaler(device)

    def test_in_a_step_is_none_of_torchs(self):
        model, scaler = smp.DistributedModel(make_net()), torch.amp.GradScaler("cpu")

        @smp.step
        def step(model, x):
            model.backward(scaler.scale(loss_of(model, x)))

        with self.assertRaisesRegex(RuntimeError, r"expected smp.amp.GradScaler in a step function, got torch.amp"):
            step(model, batch())
        self.assertEqual(scaler.scale(torch.ones(())).item(), scaler.get_scale())

    def test_updates_outside_of_steps(self):
        net = make_net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        scaler = smp.amp.GradScaler()
        for ask in (lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer), scaler.update):

            @smp.step
            def step(model, x, ask=ask):
                model.backward(scaler.scale(loss_of(model, x)))
                ask()

            with self.assertRaisesRegex(ValueError, "GradScaler"):
                step(model, batch())


if __name__ == "__main__":
    support.main()
