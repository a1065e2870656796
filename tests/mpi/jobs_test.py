"""Jobs that share a host.

Usage: jobs_test.py SMP RECOVERING
"""

import json
import subprocess
import sys
import tempfile
import unittest

import worlds

NUM_JOBS = 20 if worlds.IS_LONG else 6


class Jobs(unittest.TestCase):
    def test_run_beside_each_other(self):
        config = {"microbatches": 2, "seed": 5, "log_level": "warning"}
        environment = {**worlds.ENVIRONMENT, "SMP_CONFIG": json.dumps(config)}
        with tempfile.TemporaryDirectory() as folder:
            jobs = [subprocess.Popen([SMP, "run", "-np", "2", RECOVERING, f"{folder}/{job}", "3"], env=environment, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE) for job in range(NUM_JOBS)]
            printed = [(*job.communicate(), job.returncode) for job in jobs]
        losses = {tuple(line for line in output.splitlines() if line.startswith("loss")) for output, *_ in printed}
        self.assertEqual([code for *_, code in printed], [0] * NUM_JOBS, [errors for _, errors, code in printed if code])
        self.assertEqual([len(each) for each in losses], [3], losses)


if __name__ == "__main__":
    SMP, RECOVERING = sys.argv[1:]
    unittest.main(argv=["test"], verbosity=2)
