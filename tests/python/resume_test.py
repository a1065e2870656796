"""Three steps, a checkpoint and three more in a new job are six steps, bit for bit."""

import json
import pathlib
import tempfile
import unittest

import resuming
import support
import torch
import torch._dynamo  # which the first optimizer loads, in each fork anew


def run(action, folder, partitions, replicas=1):
    configuration = {"SMP_CONFIG": json.dumps({"partitions": partitions})}
    return support.fork_ranks(partitions * replicas, lambda: resuming.main(action, folder), configuration)


def result(folder, name):
    return torch.load(pathlib.Path(folder, f"{name}.pt"), weights_only=True)


class Resuming(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.folder = folder.name
        self.addCleanup(folder.cleanup)

    def check(self, partitions, expected, replicas=1):
        self.assertEqual(run("first", self.folder, partitions, replicas), "")
        names = {path.name for path in pathlib.Path(self.folder, "partial_partial").iterdir()}
        parts = [f"{kind}_{rank}_0.pt" for kind in ("model", "optimizer") for rank in range(partitions)]
        self.assertEqual(names, {*parts, "user_content.pt"})
        self.assertEqual(run("partial,full", self.folder, partitions, replicas), "")
        for kind in ("partial", "full"):
            self.same(result(self.folder, kind), expected)

    def same(self, ours, expected):
        support.same_bits(self, ours["losses"], expected["losses"], "losses")
        support.same_bits(self, ours["model"], expected["model"], "parameters and buffers")
        self.assertEqual(ours["rates"], expected["rates"])
        self.assertEqual(len(expected["optimizer"]["state"]), len(ours["optimizer"]["state"]))
        for index, state in expected["optimizer"]["state"].items():
            support.same_bits(self, ours["optimizer"]["state"][index], state, f"optimizer's state of parameter {index}")

    def test_on_as_many_and_on_others(self):
        self.assertEqual(run("whole", self.folder, 1), "")
        expected = result(self.folder, "whole")
        for partitions, partitions_after in ((1, 2), (4, None), (2, 1)):
            with self.subTest(partitions=partitions):
                self.check(partitions, expected)
                if partitions_after is None:
                    continue
                self.assertEqual(run("full", self.folder, partitions_after), "")
                self.same(result(self.folder, "full"), expected)
        self.assertIn("expected a checkpoint of 1 partitions, as this job has, got one of 2", run("partial", self.folder, 1))

    def test_with_replicas(self):
        self.assertEqual(run("whole", self.folder, 2, 2), "")
        self.check(2, result(self.folder, "whole"), replicas=2)


if __name__ == "__main__":
    unittest.main()
