"""200 random arguments: what a step splits, leaves whole and returns, against a plain split."""

import collections
import collections.abc
import dataclasses
import random
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

CASES, ROWS = 200, 8
PLAIN_SET = frozenset([2, "text"])  # a value like any other
CONTAINERS = (collections.abc.Mapping, list, tuple, set, frozenset)
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


@dataclasses.dataclass
class Sliced:
    """Cuts itself, as SageMaker's library asks of such classes."""

    rows: list
    axis: int | None = None

    def smp_slice(self, num_mb, mb, axis):
        return Sliced(self.rows[mb::num_mb], axis)


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


def random_leaf(draw, axis):
    """Tensors have ROWS entries along it."""
    kind = draw.randrange(9)
    if kind < 5:
        sizes = [draw.randint(1, 3) for _ in range(axis + draw.randrange(3))]
        sizes.insert(axis, ROWS)
        dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.bool])
        tensor = torch.randint(0, 9, sizes, generator=torch.Generator().manual_seed(draw.randrange(1000))).to(dtype)
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if len(sizes) > 1 and draw.randrange(3) == 0 else tensor
    if kind == 5:
        return Sliced([draw.randrange(9) for _ in range(ROWS)])
    return draw.choice([None, 3, 2.5, "text", True, (), PLAIN_SET])


def random_value(draw, depth, axis=0):
    if depth == 0 or draw.randrange(4) == 0:
        return random_leaf(draw, axis)
    items = [random_value(draw, depth - 1, axis) for _ in range(draw.randint(1, 3))]
    kind = draw.randrange(9)
    if kind == 0:
        return items
    if kind == 1:
        return tuple(items)
    if kind == 2:
        return Pair(items[0], items[-1])
    if kind == 3:
        return Marks(items)
    if kind == 4:  # of one, since nothing tells which result came from which of several
        return draw.choice([set, frozenset])([torch.full([2] * axis + [ROWS], draw.random())])
    named = {f"key{i}": item for i, item in enumerate(items)}
    return (named, collections.OrderedDict(named), Output(named), collections.UserDict(named))[kind - 5]


def walk(value, leaf):
    if isinstance(value, collections.abc.Mapping):
        return type(value)((key, walk(item, leaf)) for key, item in value.items())
    if isinstance(value, Pair):
        return Pair(*(walk(item, leaf) for item in value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(walk(item, leaf) for item in value)
    return leaf(value)


def changed(value):
    return value.clone() if not isinstance(value, torch.Tensor) or value.dtype == torch.bool else value * 2 + 1


def on_tensors(leaf):
    return lambda value: leaf(value) if isinstance(value, torch.Tensor) else value


class Containers(unittest.TestCase):
    def check(self, ours, given, axis):
        """The result of a step against what its body got, cut along `axis` or, for None, whole: the same containers, with a
        StepOutput or a list for each leaf."""
        if isinstance(given, torch.Tensor):
            self.assertIsInstance(ours, smp.StepOutput)
            cut = [given] * support.MICROBATCHES if axis is None else given.chunk(support.MICROBATCHES, axis)
            pieces = [changed(piece.clone()) for piece in cut]
            support.same_bits(self, ours.outputs, pieces, "pieces")
            return support.same_bits(self, [ours.concat()], [torch.cat(pieces)], "all")
        if isinstance(given, Sliced) and axis is not None:
            pieces = [given.smp_slice(support.MICROBATCHES, m, axis) for m in range(support.MICROBATCHES)]
            return self.assertEqual(ours, pieces)
        if not isinstance(given, CONTAINERS) or given == PLAIN_SET:
            return self.assertEqual(ours, [given] * support.MICROBATCHES)
        self.assertIs(type(ours), type(given))
        self.assertEqual(len(ours), len(given))
        if isinstance(given, collections.abc.Mapping):
            self.assertEqual(list(ours), list(given))
            ours, given = ours.values(), given.values()
        for mine, item in zip(ours, given, strict=True):
            self.check(mine, item, axis)

    def test_come_in_cut_or_whole_and_go_out_whole(self):
        model = smp.DistributedModel(nn.Linear(1, 1))

        @smp.step(non_split_inputs=["whole"], input_split_axes={"columns": 1})
        def body(model, value, *rest, columns, whole, **named):
            rows = []
            walk((value, rest, named), on_tensors(lambda tensor: rows.append(len(tensor))))
            walk(columns, on_tensors(lambda tensor: rows.append(tensor.shape[1])))
            assert set(rows) <= {ROWS // support.MICROBATCHES}, rows
            model(torch.zeros(1, 1))
            return [walk(each, on_tensors(changed)) for each in ((value, list(rest), named), columns, whole)]

        for case in range(CASES):
            draw = random.Random(case)
            value = random_value(draw, 3)
            rest = [random_value(draw, 2) for _ in range(draw.randrange(3))]
            named = {f"name{i}": random_value(draw, 2) for i in range(draw.randrange(3))}
            columns, whole = random_value(draw, 2, axis=1), random_value(draw, 2)
            with self.subTest(case=case), torch.no_grad():
                results = body(model, value, *rest, columns=columns, whole=whole, **named)
                for ours, given, axis in zip(results, ((value, rest, named), columns, whole), (0, 1, None), strict=True):
                    self.check(ours, given, axis)


if __name__ == "__main__":
    support.main()
