"""smp.timeline: the drawing of a recorded step, on rank 0 once the steps have run."""

import os
import pathlib
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

# The same name on all ranks, which have one parent.
TRACE = os.path.join(tempfile.gettempdir(), f"smp_timeline_{os.getppid()}.json")


def setUpModule():
    smp.init({"microbatches": 4, "log_level": "off", "timeline": TRACE, "timeline_steps": 2})


def tearDownModule():
    if smp.rank() == 0:
        for path in (TRACE, TRACE.replace(".json", ".svg")):
            pathlib.Path(path).unlink(missing_ok=True)


class Timelines(unittest.TestCase):
    def test_draw_a_recorded_step(self):
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1)))

        @smp.step
        def train_step(model, x):
            loss = model(x).sum()
            model.backward(loss)
            return loss

        for _ in range(4):
            train_step(model, torch.ones(8, 4))
            self.assertFalse(smp.timeline())
        self.assertIn("no step drawn", str(smp.timeline()))
        self.assertIsNone(smp.timeline()._repr_svg_())
        train_step(model, torch.ones(8, 4))
        drawn = smp.timeline()
        self.assertEqual(drawn.trace, TRACE)
        self.assertEqual(bool(drawn), smp.rank() == 0)
        if smp.rank() == 0:
            with open(TRACE.replace(".json", ".svg")) as file:
                self.assertEqual(drawn._repr_svg_(), file.read())
            self.assertTrue(ElementTree.fromstring(drawn.svg).tag.endswith("svg"))
            self.assertEqual(repr(drawn), str(drawn))
            for word in ("dependency", "imbalance", "communication", "host"):
                self.assertIn(word, str(drawn))


if __name__ == "__main__":
    support.main()
