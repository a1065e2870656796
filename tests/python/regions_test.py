"""Modules of smp.opaque that have gradients of their own, and those that cannot be called on zeros, against the plain loop bit for
bit."""

import copy
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def inner_loss(self, parameters, x):
        return torch.func.functional_call(self.net, parameters, (x,)).square().mean()


class Penalty(Critic):
    """Of WGAN-GP, on an input that needs no gradient."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()


class PenaltyOfAnActivation(Critic):
    def forward(self, x):
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope.square().sum(1).mean() + self.net(x).mean()


class InnerStep(Critic):
    """Of MAML."""

    def forward(self, x):
        slow = dict(self.net.named_parameters())
        gradients = torch.autograd.grad(self.inner_loss(slow, x[:2]), list(slow.values()), create_graph=True)
        fast = {name: value - 0.1 * gradient for (name, value), gradient in zip(slow.items(), gradients, strict=True)}
        return self.inner_loss(fast, x[2:])


class FunctionalInnerStep(Critic):
    def forward(self, x):
        slow = dict(self.net.named_parameters())
        gradients = torch.func.grad(self.inner_loss)(slow, x[:2])
        return self.inner_loss({name: value - 0.1 * gradients[name] for name, value in slow.items()}, x[2:])


class PerSample(Critic):
    def forward(self, x):
        one = torch.func.grad(lambda parameters, row: self.inner_loss(parameters, row[None]))
        gradients = torch.func.vmap(one, in_dims=(None, 0))(dict(self.net.named_parameters()), x)
        return sum(each.flatten(1).norm(dim=1).mean() for each in gradients.values())


class SecondDerivatives(Critic):
    def forward(self, x):
        hessians = torch.func.vmap(torch.func.hessian(lambda row: self.net(row).sum()))(x)
        return hessians.square().mean() + torch.func.vmap(torch.func.jacrev(self.net))(x).square().mean()


class Descent(Critic):
    """By backward(), on tensors of its own."""

    def forward(self, x):
        z = x.detach().clone().requires_grad_()
        self.net(z).sum().backward(inputs=[z])
        return self.net(x - 0.1 * z.grad).mean()


class Adding(Critic):
    def forward(self, x):
        self.net(x).sum().backward(retain_graph=True)
        return self.net(x).mean()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, x, lengths):
        rows = x.unsqueeze(2).expand(-1, -1, 6)
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return self.gru(packed)[1][0]


class Chosen(nn.Module):
    def forward(self, probabilities, y):
        if not torch.allclose(probabilities.sum(1), torch.ones(len(y))):
            raise ValueError("they must sum to one")
        return y * probabilities


class Net(nn.Module):
    def __init__(self, region):
        super().__init__()
        self.first, self.region, self.last = nn.Linear(6, 6), region, nn.Linear(6, 6)

    def forward(self, x):
        return self.of_region(x, torch.tanh(self.first(x))) + self.last(x).square().mean()

    def of_region(self, x, h):
        return self.region(h)


class OnTheArgument(Net):
    def of_region(self, x, h):
        return self.region(x) + h.mean()


class WithLengths(Net):
    def of_region(self, x, h):
        states = self.region(h, 2 + 3 * (x[:, 0] > 0).long()).square().mean()
        return states * 2 if x.sum().item() > 0 else states.relu()  # what follows is recorded anew, the region as well


class WithProbabilities(Net):
    def of_region(self, x, h):
        return self.region(x.softmax(1), h).square().mean()


class WithOwnProbabilities(Net):
    def of_region(self, x, h):
        return self.region(h.softmax(1), h).square().mean()


def loss_of(model, x):
    return model(x)


class Regions(unittest.TestCase):
    def make(self, make_net, region):
        torch.manual_seed(0)
        net = make_net(region())
        plain = copy.deepcopy(net)
        smp.opaque(net.region)
        model = smp.DistributedModel(net)

        @smp.step
        def train_step(model, x):
            loss = loss_of(model, x)
            model.backward(loss)
            return loss

        return plain, model, train_step

    def test_equal_a_plain_loop(self):
        regions = (Penalty, PenaltyOfAnActivation, InnerStep, FunctionalInnerStep, PerSample, SecondDerivatives, Descent)
        nets = [(each, region) for region in regions for each in (Net, OnTheArgument)]
        nets.remove((OnTheArgument, PenaltyOfAnActivation))
        for make_net, region in [*nets, (WithLengths, Packed), (WithProbabilities, Chosen)]:
            with self.subTest(f"{make_net.__name__}, {region.__name__}"):
                plain, model, train_step = self.make(make_net, region)
                for seed in range(6):
                    x = support.batch(seed)
                    losses = train_step(model, x).outputs
                    support.same_bits(self, losses, support.plain_step(plain, loss_of, x), "losses")
                    for name, parameter in model.local_named_parameters():
                        expected = plain.get_parameter(name).grad
                        self.assertEqual(parameter.grad is None, expected is None, name)
                        if expected is not None:
                            support.same_bits(self, [parameter.grad], [expected], f"gradient of {name}")

    def refuses(self, make_net, region, text):
        _, model, train_step = self.make(make_net, region)
        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, text):
                train_step(model, support.batch())
        self.assertTrue(all(parameter.grad is None for parameter in model.local_parameters()))

    def test_what_cannot_be_recorded_is_refused(self):
        self.refuses(Net, Adding, r"leaves the gradients of its inputs as they are.*backward\(\) with `inputs`")
        text = r"Chosen: expected a call that can be recorded on zeros, .* got ValueError: they must sum to one\. .*arguments of the step"
        self.refuses(WithOwnProbabilities, Chosen, text)
        text = "on the values that arguments of the step alone decide, and zeros for the others.*does not require grad"
        self.refuses(OnTheArgument, PenaltyOfAnActivation, text)


if __name__ == "__main__":
    support.main()
