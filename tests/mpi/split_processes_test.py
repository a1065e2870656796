"""Trains models of the zoo in worlds of NUM_RANKS processes, and compares with the unsplit models.

Usage: split_processes_test.py NUM_RANKS SPLIT_PROCESSES MPIRUN [mpirun flag ...]. MPI starts once per
process, and so does a configuration: one world for each. Ranks that are threads try all of them (split_test), so processes do in
the long form only.
"""

import itertools
import json
import sys

import worlds

TIMEOUT_S = 120 * worlds.SLOWNESS
SEED = 5  # kSplitBaseSeed in tests/support/split_run.h
ALL = itertools.product((1, 2, 5, 8), ("interleaved", "simple"))


class SplitProcesses(worlds.WorldTestCase):
    def run_world(self, microbatches, pipeline, *arguments, stage="tape"):
        config = {"microbatches": microbatches, "pipeline": pipeline, "stage": stage, "seed": SEED, "log_level": "warning"}
        job = self.start(NUM_RANKS, "--gtest_brief=1", "--gtest_color=no", *arguments, environment={"SMP_CONFIG": json.dumps(config)})
        self.finish(job, TIMEOUT_S)
        return job.returncode

    def test_each_configuration_equals_the_unsplit_model(self):
        for microbatches, pipeline in ALL if worlds.IS_LONG else ((5, "interleaved"), (8, "simple")):
            with self.subTest(microbatches=microbatches, pipeline=pipeline):
                code = self.run_world(microbatches, pipeline)
                self.assertEqual(code, 0, self.output)
                self.assertEqual(self.output.count("[  PASSED  ] 9 tests."), NUM_RANKS, self.output)

    def test_stages_under_autograd_equal_the_unsplit_model(self):
        code = self.run_world(5, "interleaved", stage="autograd")
        self.assertEqual(code, 0, self.output)
        self.assertEqual(self.output.count("[  PASSED  ] 9 tests."), NUM_RANKS, self.output)

    def test_models_constructed_without_values_equal_the_unsplit_model(self):
        code = self.run_world(2, "interleaved", "--delayed")
        self.assertEqual(code, 0, self.output)
        self.assertEqual(self.output.count("[  PASSED  ] 9 tests."), NUM_RANKS, self.output)

    def test_one_bit_of_one_gradient_fails_the_world_and_is_named(self):
        code = self.run_world(2, "interleaved", "--gtest_filter=*resnet", "--one-ulp-off")
        self.assertNotEqual(code, 0, self.output)
        self.assertRegex(self.output, rf"resnet, rank {NUM_RANKS - 1} of {NUM_RANKS} stages, 2 microbatches, "
                                      r"interleaved: gradient \S+: 1 of \d+ elements .* differ")


if __name__ == "__main__":
    worlds.SideBySide.at_once = 1  # they compute
    NUM_RANKS = int(sys.argv[1])
    worlds.main(sys.argv[2:])
