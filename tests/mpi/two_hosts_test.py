"""Jobs of two hosts: that they run and have the bits of one, what they listen on, and what becomes of them when the network between
the hosts is gone.

Usage: two_hosts_test.py SMP FAILING_WORLD RESUME
"""

import json
import os
import re
import sys
import tempfile
import time
import unittest

import two_hosts
import worlds

LIMIT_S = 120 * worlds.SLOWNESS


class TwoHosts(unittest.TestCase):
    def setUp(self):
        self.hosts = self.enterContext(two_hosts.Hosts())

    def start(self, *program, config=None, num_ranks=2):
        each = num_ranks // 2
        environment = {**worlds.ENVIRONMENT, "SMP_CONFIG": json.dumps(config or {})}
        return self.hosts.start("h1", [SMP, "run", "--hosts", f"h1:{each},h2:{each}", "--interface", "eth0", "-np", num_ranks,
                                       *program], environment)

    def start_ready(self, mode, token):
        job = self.start(FAILING_WORLD, mode, token)
        self.printed = []
        while sum("ready" in line for line in self.printed) < 2:
            self.printed.append(job.stdout.readline())
            self.assertTrue(self.printed[-1], "".join(self.printed))
        return job

    def finish(self, job):
        """What a job has printed, of which no process is left. A host that is cut off notices by itself."""
        output, _ = job.communicate(timeout=LIMIT_S)
        for pid in self.hosts.processes("h2"):
            worlds.wait_for_end(pid)
        self.assertEqual([self.hosts.processes(host) for host in ("h1", "h2")], [[], []], output)
        return output

    def test_have_the_bits_of_one(self):
        config = {"microbatches": 4, "seed": 5, "log_level": "warning"}
        with tempfile.TemporaryDirectory() as folder:
            losses = []
            for ranks in (2, 4):
                output = self.finish(self.start(RESUME, f"{folder}/{ranks}", "0", "4", config=config, num_ranks=ranks))
                losses.append(re.findall("loss .*", output))
                self.assertEqual(len(losses[-1]), 4, output)
            self.assertEqual(losses[0], losses[1])
            alone = self.hosts.start("h1", [RESUME, f"{folder}/alone", "0", "4"],
                                     {**os.environ, "SMP_CONFIG": json.dumps(config)})
            self.assertEqual(re.findall("loss .*", self.finish(alone)), losses[0])

    def test_a_cut_between_them_ends_both_and_names_the_host(self):
        job = self.start_ready("interrupted", "token")
        self.assertGreater(len(self.hosts.processes("h2")), 0)
        self.hosts.wait_until_quiet("h2")  # else TCP tries for a quarter of an hour, as docs/reliability.md says
        self.hosts.cut()
        begin = time.monotonic()
        output = self.finish(job)
        print(f"both hosts had ended {time.monotonic() - begin:.1f} s after the cut", file=sys.stderr)
        self.assertNotEqual(job.returncode, 0)
        self.assertRegex(output, r"lost communication with a remote daemon[\s\S]*on node h2")

    def test_a_cut_between_ranks_of_torchrun_ends_both(self):
        common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500",
                  "MASTER_ADDR": two_hosts.ADDRESSES["h1"]}
        ranks = [self.hosts.start(host, [FAILING_WORLD, "interrupted", "token"], {**common, "RANK": str(rank)})
                 for rank, host in enumerate(("h1", "h2"))]
        for rank in ranks:
            while "ready" not in (line := rank.stdout.readline()):
                self.assertTrue(line, "ended before it was ready")
        self.hosts.cut()
        for rank, other in zip(ranks, ("rank 1 \\(.*h2\\)", "rank 0 \\(.*h1\\)")):
            output, _ = rank.communicate(timeout=LIMIT_S)
            self.assertRegex(output, f"{other} was killed, ended without a word, or its host cannot be reached")
            self.assertEqual(rank.returncode, 3, output)

    def test_a_rank_that_is_killed_ends_both(self):
        job = self.start_ready("interrupted", "token")
        [rank] = [pid for pid in self.hosts.processes("h2") if worlds.name_of(pid).startswith("failing")]
        os.kill(rank, 9)
        output = self.finish(job)
        self.assertEqual(job.returncode, 137, output)


if __name__ == "__main__":
    SMP, FAILING_WORLD, RESUME = sys.argv[1:]
    unittest.main(argv=["test"], verbosity=2)
