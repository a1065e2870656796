"""200 random arguments: what a step splits and returns, against a plain split."""

import collections
import random
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

CASES, ROWS = 200, 8
Pair = collections.namedtuple("Pair", "first second")


class Output(collections.OrderedDict):
    """As transformers' ModelOutput: a dictionary with a class and attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Marks(list):
    pass


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


def random_leaf(draw):
    kind = draw.randrange(8)
    if kind < 5:
        sizes = [ROWS, *(draw.randint(1, 3) for _ in range(draw.randrange(3)))]
        dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.bool])
        tensor = torch.randint(0, 9, sizes, generator=torch.Generator().manual_seed(draw.randrange(1000))).to(dtype)
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if len(sizes) > 1 and draw.randrange(3) == 0 else tensor
    return draw.choice([None, 3, 2.5, "text", True, ()])


def random_value(draw, depth):
    if depth == 0 or draw.randrange(4) == 0:
        return random_leaf(draw)
    items = [random_value(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    kind = draw.randrange(7)
    if kind == 0:
        return items
    if kind == 1:
        return tuple(items)
    if kind == 2:
        return Pair(items[0], items[-1])
    if kind == 3:
        return Marks(items)
    named = {f"key{i}": item for i, item in enumerate(items)}
    return (named, collections.OrderedDict(named), Output(named))[kind - 4]


def walk(value, leaf):
    if isinstance(value, dict):
        return type(value)((key, walk(item, leaf)) for key, item in value.items())
    if isinstance(value, Pair):
        return Pair(*(walk(item, leaf) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(walk(item, leaf) for item in value)
    return leaf(value)


def changed(value):
    return value.clone() if not isinstance(value, torch.Tensor) or value.dtype == torch.bool else value * 2 + 1


def on_tensors(leaf):
    return lambda value: leaf(value) if isinstance(value, torch.Tensor) else value


class Containers(unittest.TestCase):
    def check(self, ours, given):
        """The result of a step against what its body got: the same containers, a StepOutput or a list for each leaf."""
        if isinstance(given, torch.Tensor):
            self.assertIsInstance(ours, smp.StepOutput)
            pieces = [changed(piece.clone()) for piece in given.chunk(support.MICROBATCHES)]
            support.same_bits(self, ours.outputs, pieces, "pieces")
            return support.same_bits(self, [ours.concat()], [changed(given)], "all")
        if not isinstance(given, (dict, list, tuple)):
            return self.assertEqual(ours, [given] * support.MICROBATCHES)
        self.assertIs(type(ours), type(given))
        self.assertEqual(len(ours), len(given))
        if isinstance(given, dict):
            self.assertEqual(list(ours), list(given))
            ours, given = ours.values(), given.values()
        for mine, item in zip(ours, given, strict=True):
            self.check(mine, item)

    def test_come_in_cut_and_go_out_whole(self):
        model = smp.DistributedModel(nn.Linear(1, 1))

        @smp.step
        def body(model, value, *rest, **named):
            rows = []
            walk((value, rest, named), on_tensors(lambda tensor: rows.append(len(tensor))))
            assert set(rows) <= {ROWS // support.MICROBATCHES}, rows
            model(torch.zeros(1, 1))
            return walk((value, list(rest), named), on_tensors(changed))

        for case in range(CASES):
            draw = random.Random(case)
            value = random_value(draw, 3)
            rest = [random_value(draw, 2) for _ in range(draw.randrange(3))]
            named = {f"name{i}": random_value(draw, 2) for i in range(draw.randrange(3))}
            with self.subTest(case=case), torch.no_grad():
                self.check(body(model, value, *rest, **named), (value, rest, named))


if __name__ == "__main__":
    support.main()
