"""Where a configuration comes from."""

import contextlib
import os
import sys
import unittest
from unittest import mock

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch import job


class Parameters(unittest.TestCase):
    def test_are_pythons_values(self):
        text = "partitions=2,microbatches=4,pipeline=simple,ddp=True,auto_partition=False,memory_weight=0.5,contiguous=true"
        expected = {
            "partitions": 2,
            "microbatches": 4,
            "pipeline": "simple",
            "ddp": True,
            "auto_partition": False,
            "memory_weight": 0.5,
            "contiguous": True,
        }
        self.assertEqual(job._parameters_of(["--epochs", "3", "--mp_parameters", text]), expected)
        self.assertEqual(job._parameters_of([f"--mp_parameters={text}", "x"]), expected)
        self.assertEqual(job._parameters_of(["--mp_parameters", ""]), {})
        self.assertEqual(job._parameters_of(["--mp_parameters"]), {})
        with self.assertRaisesRegex(ValueError, "key=value.*'partitions'"):
            job._parameters_of(["--mp_parameters", "partitions,ddp=True"])

    def test_precedence(self):
        with contextlib.ExitStack() as stack:
            argv = [sys.argv[0], "--mp_parameters", "microbatches=3,pipeline=sample"]
            stack.enter_context(mock.patch.object(sys, "argv", argv))
            stack.enter_context(mock.patch.dict(os.environ, {"SMP_CONFIG": '{"bucket_cap_mb": -1}'}))
            with self.assertRaises(ValueError) as refused:
                smp.init({"microbatches": 0, "pipeline": "simple", "threads": 0})
            text = str(refused.exception)
            self.assertIn("got sample", text.replace('"', ""))
            self.assertIn("threads", text)
            self.assertIn("SMP_CONFIG: bucket_cap_mb", text)
            self.assertNotIn("microbatches", text)


if __name__ == "__main__":
    unittest.main()
