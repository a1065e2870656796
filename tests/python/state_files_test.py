"""Optimizers in the files of C++: what goes on from them, and what is refused."""

import copy
import glob
import os
import unittest

import support
import torch
from checkpoint_test import shared_folder
from support import batch, make_step
from torch import nn, optim

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import _engine


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 6)
        self.decoder = nn.Linear(16, 6)
        self.decoder.weight = self.head.weight

    def forward(self, x):
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.head(hidden) + self.decoder(hidden)


OPTIMIZERS = {
    "SGD": lambda all: optim.SGD(all, lr=0.1, momentum=0.9),
    "SGD without state": lambda all: optim.SGD(all, lr=torch.tensor(0.1)),
    "Adam": lambda all: optim.Adam(all, lr=0.01),
    "AdamW": lambda all: optim.AdamW(all, lr=0.01, amsgrad=True),
    "RMSprop": lambda all: optim.RMSprop(all, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda all: optim.Adagrad(all, lr=0.1),
}


class Run:
    def __init__(self, make):
        self.net = Net()
        self.model = smp.DistributedModel(self.net)
        self.optimizer = smp.DistributedOptimizer(make(self.net.parameters()))
        self.step = make_step()

    def train(self, *seeds):
        for seed in seeds:
            self.optimizer.zero_grad()
            loss = self.step(self.model, batch(seed))
            self.optimizer.step()
        return loss.outputs

    def save(self, folder):
        smp.save_state(folder, self.model, {"at": "2"}, optimizer=self.optimizer)

    def load(self, folder):
        return smp.load_state(folder, self.model, optimizer=self.optimizer)


def of_two_groups(parameters):
    first, *rest = parameters
    return optim.Adam([{"params": rest}, {"params": [first], "lr": 0.5, "betas": (0.5, 0.75)}], lr=1)


class Optimizers(unittest.TestCase):
    def test_go_on_with_the_same_bits(self):
        for name, make in {**OPTIMIZERS, "two groups": of_two_groups}.items():
            with self.subTest(name), shared_folder() as folder:
                run = Run(make)
                run.train(0, 1)
                for group in run.optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.5
                run.save(folder)
                expected = run.train(2, 3)
                for is_placed in (False, True):
                    other = Run(make)
                    if is_placed:
                        other.train(7)
                    self.assertEqual(other.load(folder), {"at": "2"})
                    self.assertEqual(
                        [float(group["lr"]) for group in other.optimizer.param_groups],
                        [float(group["lr"]) for group in run.optimizer.param_groups],
                    )
                    support.same_bits(self, other.train(2, 3), expected, f"losses, placed: {is_placed}")
                    support.same_bits(self, other.model.state_dict(), run.model.state_dict(), "parameters")
                    local = {id(parameter) for parameter in other.model.local_parameters()}
                    self.assertLessEqual({id(parameter) for parameter in other.optimizer.state}, local)

    def test_that_were_never_updated_are_saved(self):
        with shared_folder() as folder:
            run = Run(OPTIMIZERS["Adagrad"])
            run.save(folder)
            other = Run(OPTIMIZERS["Adagrad"])
            other.load(folder)
            support.same_bits(self, other.train(0, 1), run.train(0, 1), "losses")

    def test_stay_where_a_model_is_loaded_alone(self):
        with shared_folder() as folder:
            run = Run(OPTIMIZERS["Adam"])
            run.train(0, 1)
            run.save(folder)
            before = copy.deepcopy(run.optimizer.state_dict())
            self.assertEqual(smp.load_state(folder, run.model), {"at": "2"})
            self.assertEqual(str(run.optimizer.state_dict()), str(before))

    def test_of_several_models_go_on_together_or_not_at_all(self):
        def of(runs, optimizer_names=None):
            models = {name: run.model for name, run in runs.items()}
            return models, {name: run.optimizer for name, run in zip(optimizer_names or runs, runs.values())}

        def make():
            return {"first": Run(OPTIMIZERS["Adam"]), "second.2": Run(OPTIMIZERS["SGD"])}

        with shared_folder() as folder:
            runs = make()
            models, optimizers = of(runs)
            for run in runs.values():
                run.train(0, 1)
            smp.save_state(folder, models, {"at": "2"}, optimizer=optimizers)
            expected = [run.train(2, 3) for run in runs.values()]
            others = make()
            models, optimizers = of(others)
            before = others["first"].model.state_dict()
            for given, text in (
                ({"first": models["first"], "third": models["second.2"]}, "the model 'third', got one with 'first', 'second.2'"),
                (models["first"], "the model without a name, got one with 'first', 'second.2'"),
                ({"../x": models["first"]}, "expected the name of a DistributedModel of at most 128"),
                ({}, "expected a DistributedModel, or several by name, got none"),
            ):
                with self.assertRaisesRegex(ValueError, text):
                    smp.load_state(folder, given)
            with self.assertRaisesRegex(ValueError, "expected the state of SGD, got that of Adam|of Adam, got that of SGD"):
                smp.load_state(folder, models, optimizer=of(others, reversed(others))[1])
            with self.assertRaisesRegex(TypeError, "expected a DistributedModel, or several by name, got Net"):
                smp.load_state(folder, others["first"].net)
            support.same_bits(self, others["first"].model.state_dict(), before, "after refused loads")
            self.assertEqual(smp.load_state(folder, models, optimizer=optimizers), {"at": "2"})
            for run, losses in zip(others.values(), expected):
                support.same_bits(self, run.train(2, 3), losses, "losses")


class Series(unittest.TestCase):
    def test_on_each_host_and_of_several_models(self):
        with shared_folder() as folder:
            run = Run(OPTIMIZERS["Adam"])
            run.train(0)
            saves = smp.SaveSeries(folder, on_each_host=True)
            content = {"of": str(smp.rank())}
            saves.save(1, {"a": run.model}, content, optimizer={"a": run.optimizer}, in_background=True)
            expected = run.train(1)
            other = Run(OPTIMIZERS["Adam"])
            self.assertEqual(saves.resume({"a": other.model}, optimizer={"a": other.optimizer}), (1, {"of": "0"}))
            support.same_bits(self, other.train(1), expected, "losses")

    def test_goes_on_with_the_same_bits_from_the_newest_that_loads(self):
        for in_background in (False, True):
            with self.subTest(in_background), shared_folder() as folder:
                run = Run(OPTIMIZERS["Adam"])
                saves = smp.SaveSeries(folder)
                self.assertIsNone(saves.resume(run.model, optimizer=run.optimizer))
                for step in (1, 2, 3):
                    run.train(step)
                    saves.save(step, run.model, {"at": f"{step}"}, optimizer=run.optimizer, in_background=in_background)
                expected = run.train(4)
                saves.finish()
                self.assertEqual(sorted(os.listdir(folder)), ["step_2", "step_3"])
                other = Run(OPTIMIZERS["Adam"])
                self.assertEqual(smp.SaveSeries(folder).resume(other.model, optimizer=other.optimizer), (3, {"at": "3"}))
                support.same_bits(self, other.train(4), expected, "losses")
                support.same_bits(self, other.model.state_dict(), run.model.state_dict(), "parameters")
                smp.barrier()
                if smp.rank() == 0:
                    for file in glob.glob(f"{folder}/step_3/*.safetensors"):
                        os.truncate(file, 100)
                smp.barrier()
                self.assertEqual(smp.SaveSeries(folder).resume(other.model, optimizer=other.optimizer), (2, {"at": "2"}))

    def test_of_which_none_loads_is_an_error(self):
        with shared_folder() as folder:
            run = Run(OPTIMIZERS["SGD"])
            smp.SaveSeries(folder).save(1, run.model, optimizer=run.optimizer)
            other = Run(OPTIMIZERS["Adam"])
            with self.assertRaisesRegex(ValueError, "expected one of 1 saves in .* to load, got none. The newest: .*SGD"):
                smp.SaveSeries(folder).resume(other.model, optimizer=other.optimizer)
            with self.assertRaisesRegex(ValueError, "expected to keep 1 save or more, got 0"):
                smp.SaveSeries(folder, 0)
            with self.assertRaisesRegex(ValueError, "expected a step of 0 or more, got -1"):
                smp.SaveSeries(folder).save(-1, run.model, optimizer=run.optimizer)


class Refused(unittest.TestCase):
    def check(self, run, text, folder, kind=ValueError):
        """And nothing changes."""
        before = [run.model.state_dict(), run.optimizer.state_dict()]
        with self.assertRaisesRegex(kind, text):
            run.load(folder)
        self.assertEqual(str([run.model.state_dict(), run.optimizer.state_dict()]), str(before))

    def test_are_other_optimizers(self):
        with shared_folder() as folder:
            run = Run(OPTIMIZERS["Adam"])
            run.train(0)
            run.save(folder)
            self.check(Run(OPTIMIZERS["AdamW"]), "expected the state of AdamW, got that of Adam", folder)
            self.check(Run(of_two_groups), "expected 2 parameter groups, got 1", folder)
            reversed_ = Run(lambda parameters: optim.Adam([*parameters][::-1]))
            self.check(reversed_, "expected the parameters and options of group 0, got others", folder)

    def test_is_a_save_without_one(self):
        with shared_folder() as folder:
            run = Run(OPTIMIZERS["SGD"])
            run.train(0)
            smp.save_state(folder, run.model)
            self.check(run, "expected the state of an optimizer, got an empty one on every rank", folder)

    def test_is_what_cpp_does_not_have(self):
        class Own(optim.SGD):
            pass

        makers = {
            "expected maximize=False of SGD, as in LibTorch, got True": lambda all: optim.SGD(all, maximize=True),
            "expected decoupled_weight_decay=False of Adam": lambda all: optim.Adam(all, decoupled_weight_decay=True),
            "expected SGD, Adam, AdamW, RMSprop, Adagrad of torch.optim, .*got Own": Own,
            "got NAdam": optim.NAdam,
        }
        for text, make in makers.items():
            with self.subTest(text), shared_folder() as folder:
                run = Run(make)
                with self.assertRaisesRegex(ValueError, text):
                    run.save(folder)
                self.assertEqual(os.listdir(folder), [])

    def test_is_an_optimizer_of_another_model(self):
        run, other = Run(OPTIMIZERS["SGD"]), Run(OPTIMIZERS["SGD"])
        with shared_folder() as folder, self.assertRaisesRegex(ValueError, "got one of another model"):
            smp.save_state(folder, run.model, optimizer=other.optimizer)
        with shared_folder() as folder, self.assertRaisesRegex(TypeError, "smp.DistributedOptimizer returns, got SGD"):
            smp.save_state(folder, run.model, optimizer=optim.SGD(run.net.parameters()))

    def test_are_calls_with_one_on_some_ranks_alone(self):
        if smp.size() == 1:
            self.skipTest("one rank")
        run = Run(OPTIMIZERS["SGD"])
        with shared_folder() as folder, self.assertRaisesRegex(ValueError, "expected the same call on all ranks"):
            smp.save_state(folder, run.model, optimizer=run.optimizer if smp.rank() == 0 else None)

    def test_is_content_that_is_no_texts(self):
        run = Run(OPTIMIZERS["SGD"])
        for content in ({"epoch": 3}, {3: "epoch"}, [("epoch", "3")], "epoch", {"name": "\udcff"}, run.optimizer):
            with shared_folder() as folder:
                with self.assertRaisesRegex(TypeError, "save_state: expected user_content to be texts by name"):
                    smp.save_state(folder, run.model, content if smp.rank() == 0 else None)
                self.assertEqual(os.listdir(folder), [])

    def test_are_forged_entries(self):
        """Of a file whose checksum is right; what else is refused, C++ refuses alike (tests/unit/smp/state_test.cpp)."""
        whole = {"step": torch.tensor(1), "exp_avg": torch.zeros(16), "exp_avg_sq": torch.zeros(16)}
        forged = {
            "first.bias: exp_avg is Float .3., the parameter Float .16.": {**whole, "exp_avg": torch.zeros(3)},
            "exp_avg is Double": {**whole, "exp_avg": torch.zeros(16).double()},
            "torch.float32 holds, got -1": {**whole, "step": torch.tensor(-1)},
            "torch.float32 holds, got 16777217": {**whole, "step": torch.tensor(2**24 + 1)},
            "first.bias: missing field exp_avg": {"step": whole["step"]},
        }
        run = Run(OPTIMIZERS["Adam"])
        run.train(0)

        def write(folder, kind, fields):
            made = _engine.LibTorchOptimizer(kind, [[*run.net.parameters()]], run.optimizer._engine_optimizer)
            made.set_state(run.net.first.bias, fields)
            _engine.save_state(folder, [("", run.model._engine_model)], [("", made)], {})

        for text, fields in forged.items():
            with self.subTest(text), shared_folder() as folder:
                write(folder, "Adam", fields)
                self.check(run, text, folder)
        with shared_folder() as folder:
            write(folder, "Adagrad", {"step": whole["step"], "sum": torch.zeros(16)})
            self.check(Run(OPTIMIZERS["Adagrad"]), "'first.weight: missing field sum'", folder)

    def test_is_a_damaged_file(self):
        with shared_folder() as folder:
            run = Run(OPTIMIZERS["Adam"])
            run.train(0)
            run.save(folder)
            if smp.rank() == 0:
                [path] = glob.glob(f"{folder}/rank_0_of_*.safetensors")
                with open(path, "r+b") as file:
                    file.seek(-3, os.SEEK_END)
                    file.write(b"???")
            smp.barrier()
            self.check(run, "expected the checksum .* The file is damaged", folder)


if __name__ == "__main__":
    support.main()
