"""Stops runs at random steps and resumes them in new processes: the curve has the same bits as without a stop.

Usage: resume_test.py RESUME MPIRUN [mpirun flag ...].
"""

import json
import pathlib
import random
import signal
import sys
import tempfile

import worlds

TIMEOUT_S = 60 * worlds.SLOWNESS
NUM_STEPS = 9


class Resume(worlds.WorldTestCase):
    def losses(self, folder, first, last, ranks, stages):
        config = {"microbatches": 4 // (ranks // stages), "pipeline_parallel_degree": stages, "seed": 5, "log_level": "warning"}
        job = self.start(ranks, folder, str(first), str(last), environment={"SMP_CONFIG": json.dumps(config)})
        lines = [line for line in self.finish(job, TIMEOUT_S) if line.startswith("loss ")]
        self.assertEqual(job.returncode, 0, self.output)
        self.assertEqual(len(lines), last - first, self.output)
        return lines

    def check(self, before, after):
        stop = random.randrange(1, NUM_STEPS)
        with self.subTest(before=before, after=after, stop=stop), tempfile.TemporaryDirectory() as folder:
            want = self.losses(folder + "/whole", 0, NUM_STEPS, *before)
            got = self.losses(folder + "/stopped", 0, stop, *before) + self.losses(folder + "/stopped", stop, NUM_STEPS, *after)
            self.assertEqual(got, want)
            files = sorted(path.name for path in pathlib.Path(folder, "stopped").iterdir())
            save = json.loads(pathlib.Path(folder, "stopped", "state.json").read_text())["save"]
            expected = [f"rank_{r}_of_{after[1]}.{save}.safetensors" for r in range(after[1])]
            self.assertEqual(files, [*expected, "state.json"])

    def test_same_ranks(self):
        for ranks in ((1, 1), (2, 2), (3, 3), (4, 4), (4, 2)) if worlds.IS_LONG else ((3, 3), (4, 2)):
            self.check(ranks, ranks)

    def test_other_number_of_stages(self):
        more = (((2, 2), (4, 4)), ((4, 4), (1, 1))) if worlds.IS_LONG else ()
        for before, after in (((1, 1), (3, 3)), ((3, 3), (2, 2)), *more):
            self.check(before, after)

    def test_a_damaged_file_is_refused_by_all(self):
        with tempfile.TemporaryDirectory() as folder:
            self.losses(folder, 0, 2, 2, 2)
            [file] = pathlib.Path(folder).glob("rank_1_of_2.*.safetensors")
            file.write_bytes(file.read_bytes()[:-3])
            job = self.start(2, folder, "2", "4", environment={"SMP_CONFIG": json.dumps({"log_level": "warning"})})
            self.finish(job, TIMEOUT_S)
            self.assertNotEqual(job.returncode, 0)
            self.assertIn(f"{file.name}': expected", self.output)

    def test_a_signal_saves_behind_a_step(self):
        """To mpirun, as Slurm sends it ahead of its limit. What goes on is what would have."""
        for ranks in ((2, 2), (4, 2)) if worlds.IS_LONG else ((4, 2),):
            with self.subTest(ranks), tempfile.TemporaryDirectory() as folder:
                config = {"microbatches": 4 // (ranks[0] // ranks[1]), "pipeline_parallel_degree": ranks[1], "seed": 5,
                          "log_level": "warning"}
                job = self.start(ranks[0], folder + "/run", "0", "1000000",
                                 environment={"SMP_CONFIG": json.dumps(config)})
                got = [job.stdout.readline().strip() for _ in range(3)]
                self.assertTrue(got[-1].startswith("loss 2"), got)
                job.send_signal(signal.SIGUSR1)
                got += [line.strip() for line in job.stdout if line.startswith("loss ")]
                self.finish(job, TIMEOUT_S)
                self.assertEqual(job.returncode, 75)
                last = len(got) + 3
                got += self.losses(folder + "/run", len(got), last, *ranks)
                self.assertEqual(got, self.losses(folder + "/whole", 0, last, *ranks))


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
