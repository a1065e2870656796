"""`smp doctor` and `smp selftest`, which start a program of their own on every rank.

Usage: checks_test.py SMP SELFTEST
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import worlds


def smp(*arguments, **environment):
    return subprocess.run([SMP, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env={**worlds.ENVIRONMENT, **environment})


class Doctor(unittest.TestCase):
    def test_says_what_ranks_run_on_and_what_is_wrong(self):
        done = smp("doctor", "-np", 3)
        self.assertRegex(done.stdout, r"smp \S+, LibTorch \S+, 3 ranks\n")
        self.assertEqual(done.stdout.count("GiB of memory"), 3, done.stdout + done.stderr)
        for pair in ("0 and 1", "1 and 2"):
            self.assertRegex(done.stdout, rf"ranks {pair}: \d+ us for 8 bytes, \S+ GiB/s\n")
        self.assertEqual(done.returncode, 1 if "warning: " in done.stdout else 0, done.stdout + done.stderr)

    def test_counts_what_it_warns_of_as_a_failure(self):
        done = subprocess.run(["bash", "-c", f"ulimit -n 512; {SMP} doctor -np 1"], capture_output=True, text=True, check=False,
                              env=worlds.ENVIRONMENT)
        self.assertIn("512 files may be open at once, 1024 are usual", done.stdout)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)


class Selftest(unittest.TestCase):
    def test_passes_on_stages_and_replicas(self):
        for ranks, config, expected in ((1, {}, "1 stages and 1 replicas"), (3, {}, "3 stages and 1 replicas"),
                                        (4, {"pipeline_parallel_degree": 2}, "2 stages and 2 replicas")):
            done = smp("selftest", "-np", ranks, SMP_CONFIG=json.dumps(config))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(f"{expected} train with the bits of plain LibTorch", done.stdout)

    def test_fails_where_a_rank_computes_differently(self):
        """As one on another kind of processor does."""
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program")
            program.write_text(f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && export ATEN_CPU_CAPABILITY=default\nexec {SELFTEST}\n')
            done = smp("run", "-np", 2, "bash", program)
        self.assertIn("ranks 1 compute other bits than rank 0, without smp too", done.stdout)
        self.assertNotEqual(done.returncode, 0)

    def test_splits_as_the_configuration_says(self):
        done = smp("selftest", "-np", 2, SMP_CONFIG='{"microbatches": 8}')
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Secrets(unittest.TestCase):
    def test_are_not_printed(self):
        """What is planted in the environment and in the key of saves, by programs that end well and by one that does not."""
        with tempfile.TemporaryDirectory() as folder:
            planted = "planted-5f1c77"
            key = pathlib.Path(folder, "key")
            key.write_text(planted * 4)
            key.chmod(0o600)
            good = json.dumps({"save_key_file": str(key)})
            for command, config in ((["doctor", "-np", 2], good), (["selftest", "-np", 2], good),
                                    (["run", "-np", 2, SELFTEST], '{"microbatches": -1}')):
                done = smp(*command, SMP_CONFIG=config, AWS_SECRET_ACCESS_KEY=planted, HF_TOKEN=planted)
                self.assertNotIn(planted, done.stdout + done.stderr)
                self.assertEqual(done.returncode == 2, config != good, done.stdout + done.stderr)


if __name__ == "__main__":
    SMP, SELFTEST = sys.argv[1:]
    worlds.run_side_by_side()
