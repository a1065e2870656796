"""The program of docs/steps.md on 1, 2 and 3 processes: every rank prints the same lines.

Usage: steps_page_test.py STEPS_PAGE MPIRUN [mpirun flag ...]
"""

import sys

import worlds


class StepsPage(worlds.WorldTestCase):
    def lines(self, num_ranks):
        job = self.start(num_ranks)
        lines = self.finish(job)
        self.assertEqual(job.returncode, 0, self.output)
        return sorted(lines)

    def test_every_rank_of_every_world_prints_the_same(self):
        alone = self.lines(1)
        self.assertEqual(len(alone), 4, self.output)
        self.assertEqual(alone[0], "3 steps counted", self.output)
        for num_ranks in (2, 3):
            with self.subTest(num_ranks=num_ranks):
                self.assertEqual(self.lines(num_ranks), sorted(alone * num_ranks))


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
