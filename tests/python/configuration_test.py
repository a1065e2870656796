"""Where a configuration comes from."""

import contextlib
import os
import sys
import unittest
from unittest import mock

import support
import torch

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch import job, workers


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


    def test_precedence_of_four_sources(self):
        """Each names one key more than the one before."""
        keys = ["microbatches", "seed", "timeline_steps", "max_cached_graphs"]

        def run():
            sys.argv = [sys.argv[0], "--mp_parameters", "microbatches=3,seed=3,timeline_steps=3"]
            smp.init({**dict.fromkeys(keys, 4), "log_level": "off"})
            got = [getattr(smp.state.cfg, key) for key in keys]
            if got != [1, 2, 3, 4]:
                raise AssertionError(got)

        sources = {"SM_HP_MP_PARAMETERS": '{"microbatches": 1}', "SMP_CONFIG": '{"microbatches": 2, "seed": 2}'}
        self.assertEqual(support.fork_ranks(1, run, sources), "")


    def test_keys_that_steer_nothing_may_differ_between_ranks(self):
        def run():
            rank = int(os.environ["RANK"])
            smp.init({"prescaled_batch": rank == 0, "contiguous": rank == 1, "log_level": "off"})

        self.assertEqual(support.fork_ranks(2, run, {}), "")


class SecondCall(unittest.TestCase):
    """SageMaker's row 34: an import of transformers may have made the first."""

    @classmethod
    def setUpClass(cls):
        cls.enterClassContext(mock.patch.dict(os.environ, {"SM_HP_MP_PARAMETERS": '{"partitions": 1, "microbatches": 4}'}))
        cls.enterClassContext(mock.patch.object(sys, "argv", sys.argv[:1]))
        smp.init({"log_level": "off"})

    def test_that_names_what_is_in_force_changes_nothing(self):
        before = vars(smp.state.cfg)
        smp.init()
        smp.init({"partitions": 1, "log_level": "off", "pipeline": None})
        smp.init({"pipeline_parallel_degree": 1, "tensor_parallel_degree": 1, "placement_strategy": "cluster"})
        smp.init({"microbatches": 8})  # the environment overrides it here as there
        self.assertEqual(vars(smp.state.cfg), before)

    def test_takes_over_keys_that_have_had_no_effect(self):
        smp.init({"pipeline": "simple", "optimize": "speed", "memory_weight": 0.5})
        cfg = smp.state.cfg
        self.assertEqual((cfg.pipeline, cfg.optimize, cfg.memory_weight, cfg.microbatches), ("simple", "speed", 0.5, 4))
        with mock.patch.object(sys, "argv", [*sys.argv, "--mp_parameters", "seed=3"]):
            smp.init()
        self.assertEqual((smp.state.cfg.pipeline, smp.state.cfg.seed), ("simple", 3))
        self.assertFalse(torch.distributed.is_initialized())
        smp.init({"ddp": True})
        self.assertEqual(torch.distributed.get_world_size(smp.get_dp_process_group()), 1)
        smp.init({"ddp": True, "pipeline": "interleaved", "seed": 0})
        with self.assertRaisesRegex(ValueError, "had an effect, got other values for ddp: true against false"):
            smp.init({"ddp": False})
        self.assertTrue(smp.DistributedModel(torch.nn.Linear(1, 1)).module.module)

    def test_too_late_for_others(self):
        with self.assertRaisesRegex(ValueError, "microbatchez"):
            smp.init({"microbatchez": 4})
        with mock.patch.dict(os.environ, {"SM_HP_MP_PARAMETERS": ""}):
            with self.assertRaisesRegex(ValueError, "pipeline_parallel_degree: 1 against 2"):
                smp.init({"partitions": 2})
        model = smp.DistributedModel(torch.nn.Linear(1, 1))
        with self.assertRaisesRegex(ValueError, "all of them where there is a model, got other values for bucket_cap_mb: 25 against 1"):
            smp.init({"bucket_cap_mb": 1, "contiguous": False})
        self.assertTrue(model)

    def test_of_forks_is_that_of_workers(self):
        child = os.fork()
        if child == 0:
            with mock.patch.object(workers, "begin", lambda: os._exit(5)):
                smp.init({"partitions": 7})
            os._exit(0)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 5)


if __name__ == "__main__":
    unittest.main()
