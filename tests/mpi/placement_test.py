"""The program of docs/placement.md on two stages x two replicas under one placement strategy of each layout, in the long form
under every one: the layout is the one that the page shows, and the losses are the same.

Usage: placement_test.py PLACEMENT_PAGE MPIRUN [mpirun flag ...]
"""

import json
import re
import sys

import worlds

LINE = re.compile(r"rank (\d): stage (\d) of pipeline ([\d,]+), replica (\d) of ([\d,]+), losses((?: \S+){5})$")
# By rank: stage, pipeline, replica, ranks of the stage.
CLUSTER = {0: (0, "0,1", 0, "0,2"), 1: (1, "0,1", 0, "1,3"), 2: (0, "2,3", 1, "0,2"), 3: (1, "2,3", 1, "1,3")}
SPREAD = {0: (0, "0,2", 0, "0,1"), 1: (0, "1,3", 1, "0,1"), 2: (1, "0,2", 0, "2,3"), 3: (1, "1,3", 1, "2,3")}
LAYOUTS = {name: CLUSTER for name in ("cluster", "DPT", "DTP", "TDP")} | {
    name: SPREAD for name in ("spread", "TPD", "PDT", "PTD")}


class Placement(worlds.WorldTestCase):
    def run_world(self, strategy, num_ranks=4, **config):
        config = {"placement_strategy": strategy, "log_level": "warning", **config}
        job = self.start(num_ranks, environment={"SMP_CONFIG": json.dumps(config)})
        lines = self.finish(job)
        self.assertEqual(job.returncode, 0, self.output)
        found = [match.groups() for match in map(LINE.match, lines) if match]
        self.assertEqual(len(found), num_ranks, self.output)
        return {int(rank): ((int(stage), pipeline, int(replica), stages), losses.split())
                for rank, stage, pipeline, replica, stages, losses in found}

    def test_every_strategy_has_its_layout_and_the_same_losses(self):
        seen = set()
        for strategy in LAYOUTS if worlds.IS_LONG else ("cluster", "PTD"):
            with self.subTest(strategy):
                ranks = self.run_world(strategy)
                self.assertEqual({rank: where for rank, (where, _) in ranks.items()}, LAYOUTS[strategy])
                seen |= {tuple(losses) for _, losses in ranks.values()}
        self.assertEqual(len(seen), 1, seen)

    def test_two_replicas_train_as_one_does(self):
        (replicated,) = {tuple(losses) for _, losses in self.run_world("spread").values()}
        alone = self.run_world("spread", num_ranks=2, microbatches=4)[0][1]
        for one, other in zip(replicated, alone):
            self.assertAlmostEqual(float(one), float(other), delta=2e-6 * float(other))


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
