"""A rank that takes longer than the others is named within 20 steps, and the job goes on.

Usage: stragglers_test.py STRAGGLING MPIRUN [mpirun flag ...]
"""

import re
import sys

import worlds


class Stragglers(worlds.WorldTestCase):
    def lines(self, rank, section):
        job = self.start(4, str(rank), section)
        lines = self.finish(job)
        self.assertEqual(job.returncode, 0, self.output)
        return [line for line in lines if "straggler: " in line]

    def check(self, rank, section, words):
        found = self.lines(rank, section)
        named = {re.search(r"rank (\d) \(pid ", line)[1] for line in found if words in line}
        self.assertEqual(named, {str(rank)}, self.output)

    def test_a_rank_whose_operators_take_longer_is_named(self):
        self.check(3, "computing", " computes for ")

    def test_a_rank_whose_program_takes_longer_is_named(self):
        self.check(0, "between", " from the end of a step ")

    def test_those_that_wait_for_it_in_a_call_are_not(self):
        for call in ("send", "recv_from", "allgather"):
            with self.subTest(call):
                self.check(1, call, " from the end of a step ")


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
