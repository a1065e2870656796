"""The log: which lines there are, in which form and on which ranks, and that Python's logging rules over them."""

import contextlib
import io
import logging
import os
import sys
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

FORM = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}: I [\w/]+\.(py|cpp):\d+\] "
logger = logging.getLogger("smdistributed.modelparallel")
started = io.StringIO()


def setUpModule():
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE", 1))
    with contextlib.redirect_stderr(started):
        smp.init({"microbatches": 2, "partitions": min(ranks, 2), "ddp": True})


def lines_of(call):
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        call()
    return written.getvalue()


def train():
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    model.module.module[0].bias.requires_grad_(False)

    @smp.step
    def train_step(model, x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    train_step(model, torch.ones(4, 4))
    return model


class Lines(unittest.TestCase):
    def test_of_the_configuration(self):
        self.assertEqual(started.getvalue().count("Configuration parameters:\n  pipeline_parallel_degree: "), smp.rank() == 0)
        if smp.rank() == 0:
            self.assertRegex(started.getvalue(), FORM + "Configuration parameters:\n")

    def test_of_the_first_step(self):
        models = []
        lines = lines_of(lambda: models.append(train()))
        if smp.rank() != 0:
            self.assertEqual(lines, "")
            return
        own = list(models[0].local_parameters())
        trained = sum(each.requires_grad for each in own)
        expected = ["Partition assignments:\n"]
        expected += [f"Number of parameters on partition 0 are {len(own)}. {trained} require grads\n"]
        expected += ["Finished partitioning the model\n"]
        expected += ["Broadcasted parameters and buffers for partition 0\n"] if smp.dp_size() > 1 else []
        found = [lines.find(each) for each in expected]
        self.assertNotIn(-1, found, lines)
        self.assertEqual(found, sorted(found))
        self.assertEqual("Broadcasted" in lines, smp.dp_size() > 1)
        self.assertRegex(lines, r"(?m)" + FORM + "Finished partitioning")
        self.assertIn("smdistributed/modelparallel/torch/logs.py:", lines)

    def test_of_process_groups(self):
        lines = started.getvalue()  # with the key ddp, smp.init makes them
        where = f"pp_rank: {smp.pp_rank()}, tp_rank: 0, dp_rank: {smp.dp_rank()}, rdp_rank: {smp.rdp_rank()}\n"
        self.assertRegex(lines, rf"\[{smp.rank()}\] Finished initializing torch distributed process groups. {where}")

    def test_go_where_logging_sends_them(self):
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger.addHandler(handler)
        try:
            lines_of(train)
            logger.setLevel(logging.WARNING)
            self.assertEqual(lines_of(train), "")
        finally:
            logger.setLevel(logging.INFO)
            logger.removeHandler(handler)
        texts = [record.getMessage() for record in records]
        self.assertEqual(sum(text.startswith("Partition assignments:") for text in texts), smp.rank() == 0)

    def test_survive_a_stderr_that_nobody_reads(self):
        class Broken(io.StringIO):
            def write(self, text):
                raise BrokenPipeError

        for stream in (Broken(), None):
            with contextlib.redirect_stderr(stream):
                self.assertTrue(train().partitioned)

    def test_survive_a_handler_that_fails(self):
        """Within the engine, which no exception of a handler may leave half done."""

        def fails(record):
            if record.pathname.startswith("smp/"):
                raise ZeroDivisionError

        handler = logging.Handler()
        handler.emit = fails
        logger.addHandler(handler)
        seen = []
        before, sys.unraisablehook = sys.unraisablehook, seen.append
        try:
            lines_of(train)
        finally:
            logger.removeHandler(handler)
            sys.unraisablehook = before
        self.assertEqual({each.exc_type for each in seen}, {ZeroDivisionError} if smp.rank() == 0 else set())


if __name__ == "__main__":
    support.main()
