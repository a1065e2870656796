"""What bodies do to tensors in Python's own ways, against plain torch."""

import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Cache:
    """An object of no container's class, with tensors inside."""

    def __init__(self, first, second):
        self.layers = [first, {"again": first, "second": second}]


class Ghosts(unittest.TestCase):
    def setUp(self):
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.model = smp.DistributedModel(self.net)
        self.x = torch.arange(32.0).reshape(8, 4)
        self.parts = [part.clone() for part in self.x.chunk(support.MICROBATCHES)]

    def plain(self, x):
        state = self.model.state_dict()
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        net.load_state_dict(state)
        return net(x)

    def test_literals_are_the_bodys_own(self):
        table = [0.5, 2.0, -1.0, 4.0]

        @smp.step
        def body(model, x):
            scale = torch.tensor(table)
            scale[1] = 3.0  # the literal is written to in place
            total = torch.tensor(0.0)
            total += model(x).sum()
            return model(x) * scale, total, torch.as_tensor([1, 2]) + len(x)

        with torch.no_grad():
            for _ in range(2):
                scaled, total, counts = body(self.model, self.x)
                now = torch.tensor([table[0], 3.0, *table[2:]])
                support.same_bits(self, scaled.outputs, [self.plain(part) * now for part in self.parts], "scaled")
                support.same_bits(self, total.outputs, [self.plain(part).sum() for part in self.parts], "total")
                support.same_bits(self, counts.outputs, [torch.tensor([3, 4])] * 4, "counts")
                table[3] += 1.0  # what a matched run takes over

    def test_moving_to_its_own_device_is_no_look(self):
        @smp.step
        def body(model, x):
            y = model(x)
            for same in (y.to(y.device), y.to("cpu"), y.cpu(), y.to(x)):
                assert same is y
            return y.cpu().sum(), y.float().to(model.module[0].weight.device).mean()

        with torch.no_grad():
            total, mean = body(self.model, self.x)
        support.same_bits(self, total.outputs, [self.plain(part).sum() for part in self.parts], "sums")
        support.same_bits(self, mean.outputs, [self.plain(part).mean() for part in self.parts], "means")

    def test_looks_at_values(self):
        @smp.step
        def body(model, x):
            y = model(x)
            loss = y.square().mean()
            model.backward(loss)
            array = y.detach().numpy()
            assert not array.flags.writeable
            return str(y.tolist()), array.sum().item(), repr(y.detach().cpu()), f"{loss:.4f}", repr(model.module[0].bias.detach())

        bias = self.model.state_dict()["0.bias"]
        looks = [body(self.model, self.x) for _ in range(2)]
        for lists, sums, texts, losses, biases in looks:
            for m, part in enumerate(self.parts):
                expected = self.plain(part).detach()
                self.assertEqual(lists[m], str(expected.tolist()))
                self.assertEqual(sums[m], expected.numpy().sum().item())
                self.assertEqual(texts[m], repr(expected))
                self.assertEqual(losses[m], f"{expected.square().mean():.4f}")
                self.assertEqual(biases[m], repr(bias))

    def test_numpy_of_what_needs_a_gradient_is_refused_as_in_torch(self):
        @smp.step
        def body(model, x):
            return float(model(x).numpy().sum())

        with self.assertRaisesRegex(RuntimeError, "requires grad"):
            body(self.model, self.x)

    def test_tensors_in_objects_come_back(self):
        @smp.step
        def body(model, x):
            hidden = model.module[0](x)
            return Cache(hidden, model.module[2](hidden))

        with torch.no_grad():
            caches = body(self.model, self.x)
        self.assertEqual(len(caches), support.MICROBATCHES)
        state = self.model.state_dict()
        for cache, part in zip(caches, self.parts, strict=True):
            hidden = nn.functional.linear(part, state["0.weight"], state["0.bias"])
            second = nn.functional.linear(hidden, state["2.weight"], state["2.bias"])
            self.assertIs(cache.layers[0], cache.layers[1]["again"])
            support.same_bits(self, [cache.layers[0], cache.layers[1]["second"]], [hidden, second], "tensors of objects")

    def test_a_tensor_kept_from_a_body_is_refused(self):
        kept = []

        @smp.step
        def body(model, x):
            kept.append(model(x))
            return kept[-1].sum()

        with torch.no_grad():
            body(self.model, self.x)
        for look in (repr, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.is_shared):
            for tensor in kept:
                with self.assertRaisesRegex(RuntimeError, "earlier run of the body"):
                    look(tensor)
        self.assertEqual(len(kept), support.MICROBATCHES if smp.pp_rank() == 0 else 0)


if __name__ == "__main__":
    support.main()
