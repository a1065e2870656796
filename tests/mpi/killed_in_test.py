"""A rank that is killed in any phase of a step, or in a save, ends the job and is named; nothing of it is left.

Usage: killed_in_test.py SMP KILLED_IN
The long form kills both ranks in each phase, ten times.
Prints how long it took from each death to the end of the last process: operations want 5 s at most.
"""

import functools
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

import worlds

PHASES = ("forward", "backward", "reduction", "optimizer", "save")
RANKS = (0, 1)  # one that leads, and one that does not; both write
LIMIT_S = 60 * worlds.SLOWNESS


class Killed(unittest.TestCase):
    def check(self, phase, ranks, times):
        """Is named, and nothing is left."""
        slowest = 0
        for rank in ranks * times:
            with self.subTest(phase=phase, rank=rank), tempfile.TemporaryDirectory() as folder:
                slowest = max(slowest, self.seconds_to_the_end(phase, rank, folder))
        print(f"{phase}: {len(ranks) * times} kills, the slowest end {slowest:.1f} s later", file=sys.stderr)

    def seconds_to_the_end(self, phase, rank, folder):
        token = f"token-{uuid.uuid4().hex}"
        job = subprocess.run([SMP, "run", "-np", "4", KILLED_IN, phase, str(rank), f"{folder}/save", token],
                             env=worlds.ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             timeout=LIMIT_S, check=False)
        left = worlds.left_behind(token)
        end = time.monotonic()
        self.assertEqual((left, job.returncode), ([], 137), job.stdout)
        deaths = re.findall(r"^dies at (\S+)$", job.stdout, re.M)
        self.assertEqual(len(deaths), 1, job.stdout)
        others = {int(each) for each in re.findall(r"^\[rank (\d)\] ", job.stdout, re.M)}
        self.assertTrue(others and rank not in others, job.stdout)
        self.assertRegex(job.stdout, rf"(?m)^\[rank \d\] .*rank {rank} \(pid \d+ on host \S+\) was killed")
        self.assertFalse(pathlib.Path(folder, "save", "state.json").exists())
        return end - float(deaths[0])


for _number, _phase in enumerate(PHASES):
    _ranks, _times = (RANKS, 10) if worlds.IS_LONG else (RANKS[_number % 2:][:1], 1)
    setattr(Killed, f"test_in_{_phase}", functools.partialmethod(Killed.check, _phase, _ranks, _times))

if __name__ == "__main__":
    SMP, KILLED_IN = sys.argv[1:]
    worlds.run_side_by_side()
