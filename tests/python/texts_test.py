"""Errors of the engine name what a script would write, on every rank, whatever way they come."""

import traceback
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import _engine


def setUpModule():
    with unittest.TestCase().assertRaisesRegex(RuntimeError, r"smp\.init\(\) .* Call smp\.init\(\) first in the script"):
        smp.rank()
    smp.init({"microbatches": 4, "log_level": "off"})


def no_cpp(text):
    return "::" not in text.replace("aten::", "") and "->" not in text


class Texts(unittest.TestCase):
    def setUp(self):
        self.model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))

    def test_of_calls(self):
        calls = [
            (lambda: self.model.backward(torch.ones(1)), RuntimeError, r"after the loss, in a function under @smp\.step"),
            (lambda: smp.set_partition(self.model.module, 9), ValueError, r"use smp\.pp_size\(\)"),
        ]
        if smp.size() > 1:
            calls.append((lambda: self.model(torch.ones(1, 4)), RuntimeError, r"into a function under @smp\.step"))
        for call, kind, words in calls:
            with self.assertRaisesRegex(kind, words) as caught:
                call()
            self.assertTrue(no_cpp(str(caught.exception)), caught.exception)

    def test_of_steps(self):
        """The rank that runs the body raises what torch or the engine has thrown; the others are told by a message."""

        def branches(model, x):
            y = model(x)
            model.backward(y[y.nonzero()[:, 0]].sum())

        def differentiates(model, x):
            model(x).sum().backward()

        def reads(model, x):
            y = nn.functional.dropout(model(x))
            y.sum().item()
            return y

        def collects(model, x):
            y = model(x)
            return torch.tensor([y.sum(), y.mean()])

        for body, sizes, words in (
            (collects, (8, 4), r"look at values by item\(\), .* by torch\.stack"),
            (branches, (8, 4), r"torch\.where .* smp\.opaque"),
            (differentiates, (8, 4), r"torch\.autograd\.grad .*smp\.opaque"),
            (reads, (8, 4), r"Evaluate under torch\.no_grad\(\), with"),
            (branches, (6, 4), r"drop_last=True of the DataLoader\) or change the key microbatches"),
            (branches, (), r"name the argument in non_split_inputs of smp\.step"),
        ):
            try:
                smp.step(body)(self.model, torch.ones(sizes))
                self.fail("nothing raised")
            except Exception as error:
                self.assertRegex(str(error), words)
                self.assertTrue(no_cpp(str(error)), error)
                frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            raised_within = body in (branches, differentiates, collects) and sizes == (8, 4)
            self.assertEqual(body.__name__ in frames, smp.rank() == 0 and raised_within)
            if body is differentiates and raised_within and smp.rank() == 0:
                self.assertEqual(frames[-1], "differentiates")  # the script's own line, not what torch and smp have called since

    def test_of_what_stages_cannot_run(self):
        doubled = torch.jit.script(torch.nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        jitted = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), doubled))

        def profiled(model, x):
            y = jitted(x)
            for _ in range(4):
                y = doubled(y)
            jitted.backward(y.mean())

        def chooses(model, x):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (model(x),))

        def loops(model, x):
            return torch._higher_order_ops.while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (model(x),))

        def packs(model, x):
            y, lengths = model(x).unsqueeze(1), (x > 0).sum(1)
            return nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False).data

        def nests(model, x, **form):
            y = model(x)
            return torch.nested.as_nested_tensor([y[0], y[1]], **form).to_padded_tensor(0)

        def in_doubles(model, x):
            torch.set_default_dtype(torch.float64)
            try:
                return model(x) * torch.ones(1)
            finally:
                torch.set_default_dtype(torch.float32)

        def is_dual(model, x):
            with torch.autograd.forward_ad.dual_level():
                return model(torch.autograd.forward_ad.make_dual(x, x))

        for body, words in (
            (chooses, r"got cond of torch, which .* torch\.where, .* smp\.opaque"),
            (loops, r"got while_loop of torch, which .* smp\.opaque"),
            (packs, r"aten::_pack_padded_sequence, .* depends on data, .* smp\.opaque"),
            (lambda model, x: model(x)[torch.where(x[:, 0] > 0)], r"aten::where, .* depends on data, .* smp\.opaque"),
            (nests, r"got a nested tensor, .* Pad the parts to one size"),
            (lambda model, x: nests(model, x, layout=torch.jagged), r"Nested tensors make one within: pad, and mask"),
            (in_doubles, r"has changed torch\.set_default_dtype, .* smp\.opaque"),
            (is_dual, r"got a dual tensor .* in Python torch\.func\.jvp goes"),
        ):
            with self.assertRaisesRegex(Exception, words) as caught:
                smp.step(body)(self.model, torch.ones(8, 4))
            self.assertTrue(no_cpp(str(caught.exception)), caught.exception)
        smp.step(profiled)(self.model, torch.ones(8, 4))  # TorchScript's plans of the second call on are left out
        with self.assertRaisesRegex(ValueError, r"got none \(sizes \[0, 4\].* non_split_inputs of smp\.step"):
            smp.step(chooses)(self.model, torch.ones(0, 4))

    def test_of_results_and_models_that_are_taken_for_tensors_and_modules(self):
        loss = smp.step(lambda model, x: model(x).mean())(self.model, torch.ones(8, 4))
        one = r"expected a tensor, got one of each microbatch\. .* loss\.reduce_mean\(\)\.item\(\)"
        for use, kind in (
            (lambda: loss.item(), AttributeError),
            (lambda: loss.backward(), AttributeError),
            (lambda: loss.shape, AttributeError),
            (lambda: f"{loss:.4f}", TypeError),
            (lambda: float(loss), TypeError),
            (lambda: 0.0 + loss, TypeError),
            (lambda: loss / 2, TypeError),
        ):
            with self.assertRaisesRegex(kind, one):
                use()
        self.assertEqual(f"{loss}", str(loss))
        with self.assertRaisesRegex(AttributeError, "no attribute 'losses'$"):
            loss.losses

        class Generates(nn.Linear):
            def generate(self, x):
                return self(x)

        model = smp.DistributedModel(Generates(4, 4))
        with self.assertRaisesRegex(AttributeError, r"'generate'; .*model\.get_module\(\)\.generate"):
            model.generate
        smp.step(lambda x: model.get_module().generate(x))(torch.ones(8, 4))
        for name in ("nothing", "_private", "hf_device_map"):
            with self.assertRaisesRegex(AttributeError, f"no attribute '{name}'$"):
                getattr(model, name)

    def test_may_be_long(self):
        for begin, end in (("Config::", ""), ("StepOptions::", ""), (": auto train_step = smp::step(", "});")):
            text = _engine.in_python(begin + "x" * 300_000 + end)
            self.assertGreater(len(text), 300_000)

    def test_of_scripts_stay_as_they_are(self):
        def raises(model, x):
            raise KeyError("std::vector", "a->b")

        with self.assertRaises(Exception) as caught:
            smp.step(raises)(self.model, torch.ones(8, 4))
        self.assertIn("std::vector", str(caught.exception))
        self.assertIn("a->b", str(caught.exception))

        def raises_surrogates(model, x):
            raise ValueError("a name of a file, caf\udce9")

        with self.assertRaisesRegex(ValueError, "a name of a file, caf") as caught:
            smp.step(raises_surrogates)(self.model, torch.ones(8, 4))
        self.assertIn("\udce9" if smp.rank() == 0 else "\\udce9", str(caught.exception))


if __name__ == "__main__":
    support.main()
