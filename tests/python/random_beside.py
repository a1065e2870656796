"""Parts of random programs that reach beside operators: teachers that are no part of the model, data put in place, and regions of
smp.opaque with gradients of their own."""

import functools

import random_parts
import torch
import torch.nn.functional as F
from random_parts import FORWARD, WIDTH, forward_part
from torch import nn

import smdistributed.modelparallel.torch as smp


def make_teacher():
    numbers = torch.get_rng_state()
    torch.manual_seed(11)
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).eval()
    teacher[1].running_var.uniform_(0.5, 2)
    torch.set_rng_state(numbers)
    return teacher


FROZEN, UNFROZEN = make_teacher().requires_grad_(False), make_teacher()
MEAN, VARIANCE = torch.linspace(-1, 1, WIDTH), torch.linspace(1, 2, WIDTH)


class Region(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Penalty(Region):
    def forward(self, h):
        h = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(h).tanh().sum(), h, create_graph=True)
        return slope.norm(dim=1).mean()


class InnerStep(Region):
    def forward(self, h):
        slow = dict(self.linear.named_parameters())
        call = functools.partial(torch.func.functional_call, self.linear)
        gradients = torch.func.grad(lambda parameters: call(parameters, (h,)).square().mean())(slow)
        return call({name: value - 0.1 * gradients[name] for name, value in slow.items()}, (h,))


class PerSample(Region):
    def forward(self, h):
        one = torch.func.grad(lambda weight, row: F.linear(row, weight).tanh().sum())
        return torch.func.vmap(one, in_dims=(None, 0))(self.linear.weight, h).mean(1)


class Shares(Region):
    def forward(self, h, counts):
        assert (counts > 0).all()
        return self.linear(h) / counts.unsqueeze(1)


class Net(random_parts.Net):
    def __init__(self, parts, hooks):
        super().__init__(parts, hooks)
        self.penalty, self.inner_step, self.per_sample, self.shares = (
            smp.opaque(region()) for region in (Penalty, InnerStep, PerSample, Shares)
        )


@forward_part
def target_of_a_teacher(net, h):
    with torch.no_grad():
        target = UNFROZEN(h)
    return h - 0.1 * target


@forward_part
def data_of_a_buffer(net, h):
    net.running.data = 0.9 * net.running + 0.1 * h.detach().mean(0)
    return h - net.running


@forward_part
def data_put_in_place_of_a_weight(net, h):
    net.linears[2].weight.data = net.linears[2].weight.detach().clamp(-0.3, 0.3)
    return net.linears[2](h)


@forward_part
def data_put_in_place_by_data(net, h):
    net.scale.data = net.scale.data * 0.99
    return h * net.scale


FORWARD |= {
    "teacher": lambda net, h: h + 0.1 * FROZEN(h),
    "norm in evaluation": lambda net, h: F.batch_norm(h, MEAN, VARIANCE),
    "penalty": lambda net, h: h * (1 + 0.1 * net.penalty(h)),
    "inner step": lambda net, h: net.inner_step(h),
    "gradients per sample": lambda net, h: h + 0.1 * net.per_sample(h),
    "shares": lambda net, h: net.shares(h, net.tokens + 1),
}
