"""Traces and drawings of real processes.

Usage: timeline_test.py TIMELINE_PROCESSES MPIRUN [mpirun flag ...]
"""

import collections
import json
import pathlib
import sys
import tempfile
import xml.etree.ElementTree

import worlds

MICROBATCHES, STEPS = 4, (3, 4, 5, 6)  # the last one evaluates
SVG = "{http://www.w3.org/2000/svg}"
ROUNDING_US = 0.01  # times are written in microseconds, as floating-point numbers


class Timeline(worlds.WorldTestCase):
    def record(self, num_ranks, stages, recorded_steps):
        """The events of the trace and the root of the drawing."""
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder, "trace.json")
            job = self.start(num_ranks, str(trace), str(stages), str(recorded_steps))
            lines = self.finish(job)
            self.assertEqual(job.returncode, 0, self.output)
            self.assertEqual(sum(line.startswith("say:") for line in lines), num_ranks, self.output)
            self.assertEqual(sorted(file.name for file in pathlib.Path(folder).iterdir()), ["trace.json", "trace.svg"])
            events = json.loads(trace.read_text())["traceEvents"]
            return events, xml.etree.ElementTree.parse(trace.with_suffix(".svg")).getroot()

    def by_category(self, events):
        found = collections.defaultdict(list)
        for event in events:
            found[event.get("cat")].append(event)
        return found

    def check_actions(self, actions, replica, stages):
        names = collections.Counter(
            (event["args"]["step"], event["tid"], event["name"]) for event in actions if event["pid"] == replica)
        for step in STEPS:
            is_training = step != STEPS[-1]
            for stage in range(stages):
                for m in range(MICROBATCHES):
                    expected = [f"F {m}"]
                    expected += [f"send F {m}"] if stage + 1 < stages else []
                    expected += [f"receive F {m}"] if stage > 0 else []
                    if is_training:
                        expected += [f"B {m}", f"W {m}"]
                        expected += [f"send B {m}"] if stage > 0 else []
                        expected += [f"receive B {m}"] if stage + 1 < stages else []
                    for name in expected:
                        self.assertEqual(names.pop((step, stage, name), 0), 1, (replica, step, stage, name))
        self.assertEqual(names, {})

    def check_clock(self, actions):
        """Every action ends after it has begun, and every receive after the sending has begun."""
        sends, receives = {}, {}
        for event in actions:
            self.assertGreaterEqual(event["dur"], 0, event)
            args = event["args"]
            if event["name"].startswith("send"):
                sends[event["pid"], args["step"], event["name"][5:], args["stage"], args["peer"]] = event
            elif event["name"].startswith("receive"):
                receives[event["pid"], args["step"], event["name"][8:], args["peer"], args["stage"]] = event
        self.assertTrue(sends)
        self.assertEqual(sends.keys(), receives.keys())
        for key, send in sends.items():
            self.assertGreaterEqual(receives[key]["ts"] + receives[key]["dur"], send["ts"], key)

    def check_idle_time(self, events, replica, stages):
        """Compute and idle time of each rank add up to the step, which is the same for all."""
        for step in STEPS:
            own = [event for event in events if event["pid"] == replica and event.get("args", {}).get("step") == step]
            steps = {event["tid"]: event for event in own if event["cat"] == "step"}
            start = steps[0]["ts"]
            length = max(event["ts"] + event["dur"] for event in steps.values()) - start
            for rank in range(stages):
                idle = [event for event in own if event["cat"] == "idle" and event["tid"] == rank]
                compute = [event for event in own if event["cat"] in ("action", "work") and event["tid"] == rank
                           and event["name"][0] in "FBW"]
                total = sum(event["dur"] for event in idle + compute)
                self.assertAlmostEqual(total, length, delta=ROUNDING_US * len(own), msg=(replica, step, rank))
                self.assertLessEqual({event["name"] for event in idle},
                                     {"dependency", "imbalance", "communication", "host"})

    def check_drawing(self, root, stages):
        self.assertEqual(root.tag, f"{SVG}svg")
        bars = collections.Counter(element.get("class") for element in root.iter(f"{SVG}rect"))
        panels = 3  # predicted, simulated with measured durations, measured; and one in the legend
        self.assertEqual(bars["forward"], panels * stages * MICROBATCHES + 1)
        self.assertEqual(bars["backward"], panels * stages * MICROBATCHES + 1)
        self.assertGreaterEqual(bars["weight"], stages * MICROBATCHES + 1)  # simulated ones may take no time
        words = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
        for word in ("measured", "predicted", "bubble", "dependency", "host"):
            self.assertIn(word, words)

    def check_job(self, num_ranks, stages, recorded_steps):
        events, root = self.record(num_ranks, stages, recorded_steps)
        found = self.by_category(events)
        for replica in range(num_ranks // stages):
            self.check_actions(found["action"], replica, stages)
            self.check_idle_time(events, replica, stages)
        self.check_clock(found["action"])
        self.check_drawing(root, stages)

    def test_pipeline_of_two(self):
        self.check_job(2, 2, recorded_steps=len(STEPS))  # written within the last of them

    def test_two_replicas_of_a_pipeline_of_two(self):
        self.check_job(4, 2, recorded_steps=100)  # written at shutdown

    def test_file_that_cannot_be_written_is_refused_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            for path in (f"{folder}/none/trace.json", folder, f"{folder}/trace.svg"):
                with self.subTest(path=path):
                    job = self.start(2, path, "2", "1")
                    self.finish(job)
                    self.assertNotEqual(job.returncode, 0)
                    self.assertIn("timeline: expected", self.output)
                    self.assertIn(path, self.output)
                    self.assertNotIn("say:", self.output)


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
