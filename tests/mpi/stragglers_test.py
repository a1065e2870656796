"""A rank that takes longer than the others is named within 20 steps, and the job goes on.

Usage: stragglers_test.py STRAGGLING MPIRUN [mpirun flag ...]
"""

import re
import sys

import worlds

SECTIONS = {" computes for ": "computing", " from the end of a step ": "between"}


class Stragglers(worlds.WorldTestCase):
    def named(self, case):
        """Ranks and what each takes longer for."""
        job = self.start(4, case)
        lines = self.finish(job)
        self.assertEqual(job.returncode, 0, self.output)
        return {(int(re.search(r"rank (\d) \(pid ", line)[1]), section) for line in lines if "straggler: " in line
                for words, section in SECTIONS.items() if words in line}

    def test_ranks_whose_operators_or_program_take_longer_are_named(self):
        self.assertEqual(self.named("own"), {(3, "computing"), (0, "between")}, self.output)

    def test_those_that_wait_for_one_in_a_call_are_not(self):
        self.assertEqual(self.named("others"), {(1, "between")}, self.output)


if __name__ == "__main__":
    worlds.SideBySide.at_once = 1  # the ranks of another world would take their time
    worlds.main(sys.argv[1:])
