"""Objects in checkpoint files: made of their fields, and no code of a file or of their classes runs."""

import argparse
import collections
import dataclasses
import datetime
import enum
import os
import pathlib
import pickle
import tempfile
import types
import unittest

import support
import torch

import smdistributed.modelparallel.torch as smp

RUNS = []  # what has run while a file was read


class Phase(enum.Enum):
    WARM_UP = "warm-up"


@dataclasses.dataclass
class Inner:
    size: int
    tensor: torch.Tensor


@dataclasses.dataclass
class Settings:
    inner: Inner
    phase: Phase = Phase.WARM_UP
    rate: float = 0.1

    def __post_init__(self):
        RUNS.append("post_init")

    def __setattr__(self, name, value):
        RUNS.append(f"set {name}")
        super().__setattr__(name, value)


class Scaler:
    """As scripts define theirs."""

    def __init__(self, scale):
        RUNS.append("init")
        self.scale = scale
        self.itself = self

    def __eq__(self, other):
        RUNS.append("equal")

    def __hash__(self):
        RUNS.append("hash")
        return 0


class Restores:
    def __setstate__(self, state):
        RUNS.append("setstate")


class Reduces:
    def __reduce__(self):
        return os.mkdir, (str(MARK),)


class Ends:
    def __del__(self):
        RUNS.append("del")


class Slotted:
    __slots__ = ("kept",)


class New:
    def __new__(cls):
        RUNS.append("new")
        return object.__new__(cls)


MARK = pathlib.Path(tempfile.gettempdir()) / f"smp_objects_test_{os.getpid()}"


def loaded(obj):
    with tempfile.TemporaryDirectory() as folder:
        smp.save(obj, f"{folder}/x", partial=False)
        RUNS.clear()
        return smp.load(f"{folder}/x", partial=False)


class Objects(unittest.TestCase):
    def test_that_keep_fields_alone_come_back(self):
        shared = Inner(3, torch.arange(3))
        content = loaded({"settings": Settings(shared), "again": [shared], "scaler": Scaler(2.0), "phase": (Phase.WARM_UP,)})
        self.assertEqual(RUNS, [])
        settings, scaler = content["settings"], content["scaler"]
        self.assertIs(type(settings), Settings)
        self.assertEqual((settings.rate, settings.inner.size), (0.1, 3))
        self.assertTrue(torch.equal(settings.inner.tensor, torch.arange(3)))
        self.assertIs(settings.phase, Phase.WARM_UP)
        self.assertIs(content["again"][0], settings.inner)
        self.assertEqual((type(scaler), scaler.scale), (Scaler, 2.0))
        self.assertIs(scaler.itself, scaler)
        self.assertEqual(content["phase"], (Phase.WARM_UP,))

    def test_of_pythons_library_come_back(self):
        arguments = argparse.Namespace(folder=pathlib.PosixPath("/a/b"), phase=Phase.WARM_UP, settings=Settings(Inner(1, torch.ones(1))))
        plain = {"at": datetime.datetime(2024, 1, 2), "for": datetime.timedelta(1), "ordered": collections.OrderedDict(b=1, a=2)}
        content = loaded({"args": arguments, "own": types.SimpleNamespace(x=1, deep=[Inner(2, torch.ones(2))]), **plain})
        self.assertEqual({name: content[name] for name in plain}, plain)
        self.assertEqual((content["args"].folder, content["args"].phase), (arguments.folder, Phase.WARM_UP))
        self.assertEqual(content["args"].settings.inner.size, 1)
        self.assertEqual((content["own"].x, content["own"].deep[0].size), (1, 2))

    def test_of_transformers_configurations_come_back(self):
        try:
            from transformers import GenerationConfig, GPT2Config
        except ImportError:
            return
        config = GPT2Config(n_layer=2, id2label={0: "a", 1: "b"})
        content = loaded({"config": config, "generation": GenerationConfig(max_length=7)})
        self.assertEqual(content["config"].to_dict(), config.to_dict())
        self.assertEqual(content["config"].hidden_size, config.n_embd)
        self.assertEqual(content["generation"].max_length, 7)

    def test_with_code_of_their_own_are_refused(self):
        slotted = Slotted()
        slotted.kept = 1
        for obj, named in (
            (Restores(), "Restores"),
            (Reduces(), "posix.mkdir"),
            (Ends(), "Ends"),
            (slotted, "Slotted"),
            (New(), "New"),
            (unittest.TestCase(), "unittest.case.TestCase"),  # of a library
            (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        ):
            with self.subTest(named), self.assertRaisesRegex(pickle.UnpicklingError, f"got .*{named}.*trusted=True.*asdict"):
                loaded({"x": obj})
            self.assertEqual([each for each in RUNS if each != "del"], [])
        self.assertFalse(MARK.exists())

    def test_of_pythons_library_take_no_attributes_but_fields(self):
        class Crafted:
            def __init__(self, kind):
                self.kind = kind

            def __reduce__(self):
                return self.kind, (), (None, {"__class__": 1, "made": 2})  # which an unpickler would set one by one

        for kind in (argparse.Namespace, types.SimpleNamespace):
            with self.assertRaisesRegex(pickle.UnpicklingError, f"an object of named fields, got {kind.__name__} with tuple"):
                loaded(Crafted(kind))

    def test_whose_class_is_gone_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            smp.save(Inner(1, torch.ones(1)), f"{folder}/x", partial=False)
            own = globals().pop("Inner")
            try:
                with self.assertRaisesRegex(pickle.UnpicklingError, "got __main__.Inner in"):
                    smp.load(f"{folder}/x", partial=False)
            finally:
                globals()["Inner"] = own

    def test_that_are_keys_are_refused(self):
        """Their __hash__ would run."""
        for obj in ({Scaler(1.0): 1}, {Scaler(1.0)}, {(1, Scaler(1.0)): 1}):
            with self.assertRaisesRegex(pickle.UnpicklingError, "trusted=True"):
                loaded(obj)
            self.assertEqual(RUNS, [])

    def test_of_a_member_that_an_enum_has_not_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            smp.save(Phase.WARM_UP, f"{folder}/x", partial=False)
            member = Phase._value2member_map_.pop("warm-up")
            try:
                with self.assertRaisesRegex(pickle.UnpicklingError, "trusted=True"):
                    smp.load(f"{folder}/x", partial=False)
            finally:
                Phase._value2member_map_["warm-up"] = member


if __name__ == "__main__":
    smp.init({"log_level": "off"})
    support.main()
