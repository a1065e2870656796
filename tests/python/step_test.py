"""Steps of Python modules against the plain loop, bit for bit."""

import collections
import copy
import types
import unittest

import support
import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 16, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)
        x = F.relu(self.hidden(torch.flatten(x, 1)))
        return F.log_softmax(self.out(x), dim=1)


def loss_of(model, images, labels):
    return F.nll_loss(model(images), labels)


def batch(seed, size=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)


class Training(unittest.TestCase):
    def test_equals_the_plain_loop(self):
        net = Net()
        plain = copy.deepcopy(net)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 2, 0.5)

        @smp.step
        def train_step(model, images, labels):
            loss = loss_of(model, images, labels)
            model.backward(loss)
            return loss

        for number in range(5):
            images, labels = batch(number)
            optimizer.zero_grad()
            loss = train_step(model, images, labels)
            optimizer.step()
            scheduler.step()
            plain_optimizer.zero_grad()
            losses = support.plain_step(plain, loss_of, images, labels)
            plain_optimizer.step()
            plain_scheduler.step()
            support.same_bits(self, loss.outputs, losses, f"losses of step {number}")
            for name, parameter in model.local_named_parameters():
                support.same_bits(self, [parameter.grad], [plain.get_parameter(name).grad], f"gradient of {name}")
        support.same_bits(self, model.state_dict(), plain.state_dict(), "parameters and buffers")
        self.assertTrue(model.partitioned)
        self.assertIsInstance(optimizer, torch.optim.AdamW)
        count = sum(len(each) for each in smp.allgather([n for n, _ in model.local_named_parameters()], smp.PP_GROUP))
        self.assertEqual(count, len(list(net.parameters())))

    def test_evaluates_without_gradients(self):
        net = Net()
        plain = copy.deepcopy(net).eval()
        model = smp.DistributedModel(net)
        model.eval()

        @smp.step()
        def evaluate(model, images):
            return model(images)

        images, _ = batch(1)
        with torch.no_grad():
            output = evaluate(model, images)
            support.same_bits(self, output.outputs, [plain(part.clone()) for part in images.chunk(4)], "outputs")
        self.assertEqual(output.concat().shape, (16, 10))
        self.assertFalse(output.concat().requires_grad)


class Contract(unittest.TestCase):
    def setUp(self):
        self.net = nn.Linear(4, 4)
        self.model = smp.DistributedModel(self.net)

    def test_returns_containers_as_they_are(self):
        pair = collections.namedtuple("pair", "a b")  # noqa: PYI024
        Contract.pair = pair
        pair.__qualname__ = "Contract.pair"

        @smp.step
        def body(model, x):
            y = model(x)
            plain = {"shape": y.shape, "names": frozenset(["a"])}
            return {"loss": y.sum(), "size": len(x), "both": pair(y, [y.mean(), "text"]), "plain": plain}

        x = torch.ones(8, 4)
        with torch.no_grad():
            result = body(self.model, x)
        self.assertIsInstance(result["loss"], smp.StepOutput)
        self.assertEqual(result["size"], [2, 2, 2, 2])
        self.assertIsInstance(result["both"], pair)
        self.assertEqual(result["both"].b[1], ["text"] * 4)
        self.assertEqual(result["plain"], {"shape": [torch.Size([2, 4])] * 4, "names": [frozenset(["a"])] * 4})
        support.same_bits(self, [result["both"].a.concat()], [self.reference(x)], "output")

    def reference(self, x):
        state = self.model.state_dict()
        return torch.cat([F.linear(part.clone(), state["weight"], state["bias"]) for part in x.chunk(4)])

    def test_splits_nested_arguments_and_keeps_some_whole(self):
        @smp.step(non_split_inputs=["table"], input_split_axes={"columns": 1})
        def body(model, inputs, table, columns, scale=1.0):
            assert columns.shape == (4, 2) and table.shape == (4,)
            return model(inputs["x"][0]) * table * scale, columns.t() * 1

        x, table, columns = torch.randn(8, 4), torch.arange(4.0), torch.randn(4, 8)
        x, table, columns = smp.allgather((x, table, columns), smp.WORLD)[0]
        with torch.no_grad():
            out, back = body(self.model, {"x": (x,), "n": 3}, table=table, columns=columns, scale=2.0)
        support.same_bits(self, [out.concat()], [self.reference(x) * table * 2.0], "output")
        support.same_bits(self, [back.concat()], [columns.t()], "columns")

    def test_weighs_an_uneven_evaluation_by_rows(self):
        @smp.step
        def body(model, x):
            return model(x).mean()

        x = smp.allgather(torch.randn(14, 4), smp.WORLD)[0]
        with torch.no_grad():
            for rows in (8, 6, 14):  # the middle one of microbatches of 2, 2, 1 and 1 rows
                mean = self.reference(x[:rows]).mean()
                torch.testing.assert_close(body(self.model, x[:rows]).reduce_mean(), mean)

    def test_gives_each_argument_to_its_parameter(self):
        @smp.step
        def body(model, first, /, second=None, *, third=None, **others):
            assert second is None and set(others) == {"first"}, (second, others)
            return model(first) + third + others["first"]

        x, y, z = smp.allgather((torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)), smp.WORLD)[0]
        with torch.no_grad():
            out = body(self.model, x, third=y, first=z)
        support.same_bits(self, [out.concat()], [self.reference(x) + y + z], "output")

        @smp.step
        def with_defaults(model, x, mask=None, labels=None):
            assert mask is None
            return model(x) * labels

        with torch.no_grad():
            out = with_defaults(self.model, x, labels=y)
        support.same_bits(self, [out.concat()], [self.reference(x) * y], "output")

    def test_evaluates_batches_that_microbatches_do_not_divide(self):
        @smp.step(input_split_axes={"columns": 1})
        def body(model, x, columns):
            return model(x), columns.sum(0)

        x, columns = torch.arange(44.0).reshape(11, 4), torch.arange(22.0).reshape(2, 11)
        with torch.no_grad():
            for rows in (11, 8, 5, 11):
                out, sums = body(self.model, x[:rows], columns[:, :rows])
                parts = torch.tensor_split(x[:rows], 4)
                self.assertEqual([len(each) for each in out], [len(each) for each in parts])
                state = self.model.state_dict()
                expected = [F.linear(part.clone(), state["weight"], state["bias"]) for part in parts]
                support.same_bits(self, out.outputs, expected, "outputs")
                support.same_bits(self, [sums.concat()], [columns[:, :rows].sum(0)], "columns")
            for number in (5, 8):
                with self.assertRaisesRegex(ValueError, f"{number} and 11. Pass"):
                    body(self.model, x, columns[:, :number])
            with self.assertRaisesRegex(ValueError, "at least one row for each of 4"):
                body(self.model, x[:3], columns[:, :3])
        with self.assertRaisesRegex(ValueError, "divisible"):  # training
            body(self.model, x, columns)

        @smp.step
        def trains(model, x):
            with torch.enable_grad():
                model.backward(model(x).sum())

        with torch.no_grad(), self.assertRaisesRegex(ValueError, r"as many rows each.*got \[3, 3, 3, 2\]"):
            trains(self.model, x)
        with torch.no_grad():
            trains(self.model, x[:8])

    def test_reads_values_of_microbatches_of_other_sizes(self):
        counts = {"rows": 0, "sum": 0.0}

        @smp.step
        def body(model, x):
            y = model(x)
            counts["rows"] += len(y)
            counts["sum"] += y.sum().item()
            return y

        x = torch.arange(44.0).reshape(11, 4)
        with torch.no_grad():
            for rows in (8, 11, 5, 5, 11):  # the first microbatch of the later ones is like one that was seen
                counts.update(rows=0, sum=0.0)
                out = body(self.model, x[:rows]).concat()
                if smp.pp_rank() == 0:
                    self.assertEqual(counts["rows"], rows)
                    self.assertAlmostEqual(counts["sum"], out.sum().item(), 3)
                state = self.model.state_dict()
                expected = [F.linear(part.clone(), state["weight"], state["bias"]) for part in torch.tensor_split(x[:rows], 4)]
                support.same_bits(self, [out], [torch.cat(expected)], "output")

    def test_sets_and_mappings(self):
        @smp.step
        def body(model, batch, tensors):
            (only,) = tensors
            return {"set": {only * 1}, "mapping": collections.UserDict(y=model(batch["x"]))}

        batch = types.MappingProxyType({"x": torch.ones(8, 4)})
        with torch.no_grad():
            result = body(self.model, batch, {torch.ones(4)})
        self.assertIsInstance(result["mapping"], collections.UserDict)
        support.same_bits(self, [result["mapping"]["y"].concat()], [self.reference(batch["x"])], "output")
        self.assertEqual(len(result["set"]), 1)

    def test_does_not_bind(self):
        class Trainer:
            @smp.step
            def train_step(model, x):  # noqa: N805
                return model(x).sum()

        with torch.no_grad():
            self.assertEqual(len(Trainer().train_step(self.model, torch.ones(4, 4))), 4)

    def test_ignores_arguments_of_other_ranks(self):
        @smp.step
        def body(model, x):
            return model(x).sum()

        x = torch.ones(8, 4) if smp.pp_rank() == 0 else torch.empty(8, 0)
        with torch.no_grad():
            total = body(self.model, x).reduce_sum()
        torch.testing.assert_close(total, self.reference(torch.ones(8, 4)).sum())

    def test_reads_values_in_the_body(self):
        @smp.step
        def body(model, x):
            y = model(x)
            return y.sum().item(), f"{float(y.mean()):.3f}"

        x = torch.ones(8, 4)
        with torch.no_grad():
            sums, texts = body(self.model, x)
        expected = self.reference(x)[:2]
        self.assertEqual(sums, [expected.sum().item()] * 4)
        self.assertEqual(texts, [f"{float(expected.mean()):.3f}"] * 4)

    def test_reads_the_bits_that_it_returns(self):
        for layer in (nn.Linear(8, 8), nn.GRU(8, 8)):  # whose products take another kernel where no weight needs a gradient
            plain = copy.deepcopy(layer)
            model = smp.DistributedModel(layer)

            @smp.step
            def read(model, x):
                y = model(x.transpose(0, 1))
                y = y[0] if isinstance(y, tuple) else y
                return y, torch.from_numpy(y.numpy())

            x = torch.randn(8, 5, 8)
            with torch.no_grad():
                for _ in range(2):
                    returned, values = read(model, x)
                    for one, other, part in zip(returned, values, x.chunk(4), strict=True):
                        expected = plain(part.transpose(0, 1))
                        self.assertTrue(torch.equal(one, expected[0] if isinstance(expected, tuple) else expected))
                        self.assertTrue(torch.equal(one, other))

    def test_refuses_with_the_way_out(self):
        @smp.step
        def backward(model, x):
            model(x).sum().backward()

        with self.assertRaisesRegex(RuntimeError, "model.backward"):
            backward(self.model, torch.ones(8, 4))

        @smp.step
        def penalty(model, x):
            y = model(x)
            (gradient,) = torch.autograd.grad(y.sum(), y)
            model.backward((y * gradient).sum())

        with self.assertRaisesRegex(RuntimeError, "torch.autograd.grad"):
            penalty(self.model, torch.ones(8, 4))

        @smp.step
        def fails(model, x):
            raise KeyError("mine")

        with self.assertRaises(KeyError if smp.pp_rank() == 0 else RuntimeError):
            fails(self.model, torch.ones(8, 4))

        @smp.step
        def body(model, x):
            return model(x)

        with self.assertRaisesRegex(ValueError, "6"):
            body(self.model, torch.ones(6, 4))
        if smp.pp_size() > 1:
            with self.assertRaisesRegex(RuntimeError, "step body"):
                self.model(torch.ones(8, 4))
        with self.assertRaisesRegex(NotImplementedError, "detach_outputs=True, got False. Results are on every rank"):
            smp.step(detach_outputs=False)(lambda model: None)
        with self.assertRaisesRegex(ValueError, "tabel"):
            smp.step(non_split_inputs=["tabel"])(lambda model, table: None)

    def test_refuses_other_containers_for_another_microbatch(self):
        def make():
            count = [0]

            @smp.step
            def body(model, x):
                count[0] += 1
                return {f"key{count[0]}": model(x)}

            return body

        with self.assertRaisesRegex(ValueError, "microbatch 1"):
            make()(self.model, torch.ones(8, 4))


class Communication(unittest.TestCase):
    def test_objects_travel(self):
        self.assertEqual(smp.allgather({"rank": smp.rank()}, smp.WORLD), [{"rank": r} for r in range(smp.size())])
        if smp.rank() == 0 and smp.size() > 1:
            smp.broadcast([1, "two", torch.ones(2)], smp.WORLD)
        elif smp.rank() > 0:
            number, text, tensor = smp.recv_from(0, smp.WORLD_RANK)
            self.assertEqual((number, text), (1, "two"))
            self.assertTrue(torch.equal(tensor, torch.ones(2)))

    def test_a_receiver_may_wait_for_another_one(self):
        if smp.size() < 3:
            return
        if smp.rank() == 0:
            smp.broadcast("all", smp.WORLD)
        elif smp.rank() == 1:
            smp.send(smp.recv_from(0, smp.WORLD_RANK) + " of us", 2, smp.WORLD_RANK)
        elif smp.rank() == 2:
            self.assertEqual([smp.recv_from(source, smp.WORLD_RANK) for source in (1, 0)], ["all of us", "all"])
        else:
            self.assertEqual(smp.recv_from(0, smp.WORLD_RANK), "all")


if __name__ == "__main__":
    support.main()
