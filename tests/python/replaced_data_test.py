"""Forwards that put other data in place of a parameter's or a buffer's (p.data = ...): the plain loop's bits, or a refusal where
the stages, which copy, could not have them."""

import copy
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.part = nn.Linear(6, 6), nn.Linear(6, 6), part
        self.calls = 0
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        returned = self.part(self, h)
        return self.last(h if returned is None else returned) + self.mean


OUTSIDE = torch.ones(6)


def buffer(net, h):
    net.mean.data = 0.9 * net.mean + 0.1 * h.detach().mean(0)


def number(net, h):
    net.count.data = net.count + 1
    return h * net.count


def clamped(net, h):
    net.last.weight.data = net.last.weight.data.clamp(-0.3, 0.3)


def clamped_by_detach_and_twice(net, h):
    for limit in (0.3, 0.2):
        net.last.weight.data = net.last.weight.detach().clamp(-limit, limit)


def with_gradient(net, h):
    net.last.weight.data = net.last.weight * 0.99


def without_grad_mode(net, h):
    with torch.no_grad():
        net.mean.data = 0.5 * net.mean + h.mean(0)


def in_inference_mode(net, h):
    with torch.inference_mode():
        net.count.data = net.count + 1


def fresh(net, h):
    net.mean.data = torch.ones(6)


def row(net, h):
    net.mean.data = (torch.ones(3, 6) * h.detach().mean())[1]
    return h + net.mean


def used_between(net, h):
    net.mean.data = net.mean + 1
    h = h + net.mean
    net.mean.data = net.mean * 0.5
    return h * net.mean


def written_after(net, h):
    net.mean.data = net.mean + 1
    net.mean.mul_(0.5)


def read_after(net, h):
    net.mean.data = net.mean + 1
    return h * net.mean.sum().item()


def read_before(net, h):
    scale = net.mean.sum().item()
    net.mean.data = net.mean + 1
    return h * scale


def itself(net, h):
    net.last.weight.data = net.last.weight.data


def now_and_then(net, h):
    net.calls += 1
    if net.calls % 3:
        net.mean.data = net.mean + 1


def asked_only(net, h):
    torch._has_compatible_shallow_copy_type(net.mean, net.mean + 1)


def other_sizes(net, h):
    net.mean.data = torch.zeros(1)


def other_type(net, h):
    net.mean.data = net.mean.double()


def other_strides(net, h):
    net.last.weight.data = net.last.weight.detach().t() * 2


def of_another(net, h):
    net.first.weight.data, net.last.weight.data = net.last.weight.data, net.first.weight.data


def of_outside(net, h):
    net.mean.data = OUTSIDE


def of_two(net, h):
    net.first.bias.data = net.last.bias.data = net.mean + 1


def source_written(net, h):
    source = net.mean + 1
    net.mean.data = source
    source.mul_(2)


def source_used(net, h):
    source = net.mean + 1
    net.mean.data = source
    net.mean.mul_(2)
    return h * source


def older_data(net, h):
    old = net.mean.data
    net.mean.data = net.mean + 1
    return h * old


def older_view(net, h):
    old = net.mean[:3]
    net.mean.data = net.mean + 1
    return h * old.sum()


def older_view_read(net, h):
    old = net.mean[:3]
    net.mean.data = net.mean + 1
    return h * old.sum().item()


def used_before(net, h):
    net.first.weight.data = net.first.weight.detach() * 0.99


def an_activation(net, h):
    h.data = h.data.clamp(-0.5, 0.5)


def swapped_for_a_while(net, h):
    old = net.mean.data
    net.mean.data = net.mean * 0.5 + 1
    h = h * net.mean
    net.mean.data = old
    return h * net.mean


EQUAL = (buffer, number, clamped, clamped_by_detach_and_twice, with_gradient, without_grad_mode, in_inference_mode, fresh, row,
         used_between, written_after, read_after, read_before, itself, now_and_then, asked_only)  # fmt: skip
LIKE_IT = "expected the data of '(model[0-9]*.)?{}' to be replaced .* by a tensor like it, .*, got {}"
KEPT = "by a result of operators that nothing else keeps, got memory of {}"
BY_NAME = "to be used by that name from then on, got {}, which uses {}"
REFUSED = {
    swapped_for_a_while: "to be replaced once by others, got its own memory again",
    other_sizes: LIKE_IT.format("mean", r"Float of sizes \[1\]"),
    other_type: LIKE_IT.format("mean", "Double of sizes"),
    other_strides: LIKE_IT.format("last.weight", r"Float of sizes \[6, 6\] and strides \[1, 6\]"),
    of_another: KEPT.format("another parameter or buffer, an argument or a tensor made outside"),
    of_outside: KEPT.format("another parameter or buffer, an argument or a tensor made outside"),
    of_two: KEPT.format("another tensor too"),
    source_written: BY_NAME.format("aten::mul_", "what they were replaced by"),
    source_used: BY_NAME.format("aten::mul", "what they were replaced by"),
    older_data: BY_NAME.format("aten::mul", "data.. of it or an older view"),
    older_view: BY_NAME.format("aten::sum", "data.. of it or an older view"),
    older_view_read: BY_NAME.format("aten::sum", "data.. of it or an older view"),
    used_before: "before an operator of the same backward uses them, got aten::linear earlier in the body",
    an_activation: "replaces the data of an existing tensor",
}


class ReplacedData(unittest.TestCase):
    def make(self, part):
        net = Net(part)
        plain = copy.deepcopy(net)
        return plain, smp.DistributedModel(net), support.make_step()

    def test_equals_a_plain_loop(self):
        for part in EQUAL:
            with self.subTest(part.__name__):
                plain, model, train_step = self.make(part)
                for seed in range(5):
                    x = support.batch(seed)
                    losses = train_step(model, x).outputs
                    support.same_bits(self, losses, support.plain_step(plain, support.loss_of, x), "losses")
                    theirs = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
                    for name, tensor in [*model.local_named_parameters(), *model.local_named_buffers()]:
                        support.same_bits(self, [tensor], [theirs[name]], name)
                        if tensor.grad is not None:
                            support.same_bits(self, [tensor.grad], [theirs[name].grad], f"gradient of {name}")

    def test_what_a_copy_is_not_the_same_for_is_refused(self):
        for part, text in REFUSED.items():
            with self.subTest(part.__name__):
                _, model, train_step = self.make(part)
                before = model.state_dict()
                for _ in range(2):
                    with self.assertRaisesRegex(RuntimeError, text):
                        train_step(model, support.batch())
                support.same_bits(self, model.state_dict(), before, "state")


if __name__ == "__main__":
    support.main()
