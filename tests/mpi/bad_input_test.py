"""Starts training programs that do one thing wrong, and checks that they are refused as promised.

Usage: bad_input_test.py BAD_INPUT MPIRUN [mpirun flag ...]. A refusal comes on every rank, before any
weight or gradient changes, and says what was expected, what came and how to mend it. Who catches it
can train on; who does not ends the job with it as the last line of any rank.
"""

import functools
import itertools
import json
import os
import subprocess
import sys

import worlds

BAD_CONFIG = {"SMP_CONFIG": json.dumps(
    {"microbatch": 4, "pipeline": "interleave", "active_microbatches": "two", "horovod": True})}
TWO_REPLICAS = {"SMP_CONFIG": json.dumps({"pipeline_parallel_degree": 2})}

# Texts of the message: what was expected, what came, the way out.
REFUSED_AT_START = {
    "configuration_of_the_environment": (
        "configuration: 4 errors", 'unknown key "microbatch"; did you mean "microbatches"?',
        'pipeline: expected one of "interleaved", "simple", got "interleave"',
        'active_microbatches: expected an integer, 0 or more, got "two"', "horovod: true is not available yet. Remove"),
    "step_before_init": ("expected smp::init() to have been called", "got no context", "Call smp::init() first"),
    "degree_that_does_not_fit": ("expected a world size divisible by", "got 2 ranks", "Start a multiple of 3 processes"),
    "different_configuration_on_two_ranks": (
        "expected the same configuration on all ranks", "microbatches: 2 against 4", "Give all ranks the same"),
}
REFUSED_IN_TRAINING = {
    "indivisible_batch": ("expected a batch size divisible by microbatches=2", "got 7", "Drop the last batch"),
    "wrong_partition_of_a_module": ("set_partition: expected a stage in [0, 2)", "got 7", "Stages count from 0"),
    "wrong_partition_in_a_guard": ("PartitionGuard: expected a stage in [0, 2)", "got -1", "Stages count from 0"),
    "custom_function_in_forward": ("Doubled", "custom autograd function", "differentiable operators"),
    "backward_of_the_loss": ("expected model.backward(loss)", "loss.backward() inside a step body", "DistributedModel"),
    "ghost_in_a_later_body": ("Expected tensors of this run", "got a ghost of an earlier run", "return it from the body"),
    "released_parameter": ("weight' live on pipeline rank", "this is rank", "Use DistributedModel::state_dict()"),
    "lbfgs": ("expected an optimizer that updates each element", "got LBFGS", "Use one of those"),
    "returns_that_differ": ("expected the body to return the same number of tensors", "got 1 for microbatch 0 and 2"),
    "throw_in_the_body": ("the tokenizer met a wrong byte",),
}
REFUSED = {**REFUSED_AT_START, **REFUSED_IN_TRAINING}
# Before there are ranks, before they agree, in a call and in a step of all of them, and on the one that runs the body.
UNCAUGHT = ("configuration_of_the_environment", "step_before_init", "different_configuration_on_two_ranks",
            "wrong_partition_of_a_module", "indivisible_batch", "throw_in_the_body")


def environment_of(cases):
    return BAD_CONFIG if "configuration_of_the_environment" in cases else {}


def attempts(cases):
    """As the program makes them: once before training, in training ahead of each step."""
    at_start = [case for case in cases if case in REFUSED_AT_START]
    in_training = [case for case in cases if case not in REFUSED_AT_START]
    # Nothing is released before the first step.
    return at_start + [case for step in range(3) for case in in_training if step > 0 or case != "released_parameter"]


def weights(text):
    return dict(item.split("=") for item in text.split()[1:])


class BadInput(worlds.WorldTestCase):
    def run_world(self, case, mode, num_ranks=2, environment=None):
        job = self.start(num_ranks, case, mode, environment=environment)
        lines = self.finish(job)
        return job.returncode, worlds.rank_lines(lines)

    def run_uncaught(self, case, num_ranks=2, environment=None):
        code, lines = self.run_world(case, "uncaught", num_ranks, environment)
        self.assertNotEqual(code, 0, self.output)
        return lines

    def said(self, lines, rank):
        prefix = f"say: rank {rank} "
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]

    def refusals(self, words):
        """What this rank caught, after the check that nothing has changed."""
        found = [i for i, word in enumerate(words) if word.startswith(("refused", "went through"))]
        snapshots = {}  # by step
        for i in found:
            before, after = weights(words[i - 1]), weights(words[i + 1])
            # A first step that is not refused releases parameters.
            common = before.keys() & after.keys()
            self.assertTrue(common, self.output)
            self.assertEqual([before[name] for name in common], [after[name] for name in common], self.output)
            snapshots.setdefault(sum(word.startswith("loss") for word in words[:i]), after)
        for earlier, later in itertools.pairwise(snapshots.values()):  # good steps lie between
            for name in later:
                self.assertNotEqual(earlier[name], later[name], self.output)
        return [words[i] for i in found]

    @functools.cache
    def good_losses(self, num_ranks, replicas):
        code, lines = self.run_world("no mistake", "caught", num_ranks, TWO_REPLICAS if replicas else {})
        self.assertEqual(code, 0, self.output)
        losses = [self.said(lines, rank) for rank in range(num_ranks)]
        self.assertEqual([len(words) for words in losses], [3] * num_ranks, self.output)
        return losses

    def check_caught(self, cases, num_ranks=2, environment=None, replicas=False):
        """cases: what each is refused with."""
        code, lines = self.run_world(",".join(cases), "caught", num_ranks, environment)
        self.assertEqual(code, 0, self.output)
        for rank in range(num_ranks):
            words = self.said(lines, rank)
            refusals = self.refusals(words)
            for case, refusal in zip(attempts(cases), refusals, strict=True):
                self.assertTrue(refusal.startswith("refused "), self.output)
                for text in cases[case]:
                    self.assertIn(text, refusal, case)
            losses = [word for word in words if word.startswith("loss")]
            self.assertEqual(losses, self.good_losses(num_ranks, replicas)[rank], self.output)

    def test_refused_on_every_rank_and_training_goes_on(self):
        """One after the other in one job, in the long form each in one of its own."""
        alone = [{case: texts} for case, texts in REFUSED.items()] if worlds.IS_LONG else []
        for cases in (REFUSED_AT_START, REFUSED_IN_TRAINING, *alone):
            with self.subTest(list(cases)):
                self.check_caught(cases, environment=environment_of(cases))

    def test_refusal_that_nobody_catches_ends_the_job_and_is_its_last_line(self):
        for case in REFUSED if worlds.IS_LONG else UNCAUGHT:
            with self.subTest(case):
                lines = self.run_uncaught(case, environment=environment_of([case]))
                # Before init nobody has a rank, and C++ itself prints what it was that nobody caught.
                last = self.output if case == "step_before_init" else worlds.reports(lines[-1:])[0]
                for text in REFUSED[case]:
                    self.assertIn(text, last)

    def test_variables_of_a_world_without_its_mpirun_are_refused(self):
        rank, size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
        job = subprocess.run(
            [self.program, "configuration_of_the_environment", "uncaught", "token"], timeout=worlds.TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, rank: "0", size: "2"})
        self.assertNotEqual(job.returncode, 0, job.stdout)
        self.assertIn(f"expected MPI to find rank 0 of 2 ({rank}=0, {size}=2), got rank 0 of 1", job.stdout)

    def test_refusal_of_one_replica_is_refused_by_all(self):
        self.check_caught({"indivisible_batch_on_one_replica": REFUSED["indivisible_batch"]}, num_ranks=4,
                          environment=TWO_REPLICAS, replicas=True)
        lines = self.run_uncaught("indivisible_batch_on_one_replica", 4, TWO_REPLICAS)
        self.assertRegex(lines[-1], r"^\[rank \d\] .*expected a batch size divisible by microbatches=2, got 7")

    def test_ghost_used_after_its_step_is_refused_where_it_is(self):
        text = "expected a tensor with data, got a ghost of a step body that has ended"
        code, lines = self.run_world("ghost_after_the_step", "caught")
        self.assertEqual(code, 0, self.output)
        for refusal in self.refusals(self.said(lines, 0)):
            self.assertIn(text, refusal)
            self.assertIn("return what you need from the body", refusal)
        losses = [word for word in self.said(lines, 1) if word.startswith("loss")]
        self.assertEqual(losses, self.good_losses(2, False)[1], self.output)
        self.assertIn(text, self.run_uncaught("ghost_after_the_step")[-1])

    def test_throw_between_steps_is_the_last_line_and_the_only_report(self):
        for case, rank in (("throw_on_the_leader", 0), ("throw_on_the_last_rank", 2)):
            with self.subTest(case):
                lines = self.run_uncaught(case, 3)
                self.assertEqual(lines[-1], f"[rank {rank}] the loader found no file", self.output)
                self.assertEqual(len(worlds.reports(lines)), 1, self.output)

    def check_failure_within_a_step(self, case, culprit, text, num_ranks=2, environment=None):
        lines = self.run_uncaught(case, num_ranks, environment)
        self.assertEqual(worlds.reports(lines), lines[-1:], self.output)
        self.assertRegex(lines[-1], rf"^\[rank {culprit}\] .*{text}")
        # Who catches it cannot go on: the other ranks hear of it, and every later call throws it again.
        code, lines = self.run_world(case, "caught", num_ranks, environment)
        self.assertNotEqual(code, 0, self.output)
        for rank in range(num_ranks):
            caught = [word for word in self.said(lines, rank) if word.startswith("refused")]
            self.assertEqual(len(caught), 1, self.output)
            self.assertRegex(caught[0], ("" if rank == culprit else rf"rank {culprit} failed: .*") + text)
        self.assertRegex(lines[-1], rf"^\[rank {culprit}\] .*{text}")

    def test_failing_operator_of_a_follower_ends_the_job(self):
        self.check_failure_within_a_step("word_out_of_range", 1, "index out of range")

    def test_failing_operator_of_one_replica_ends_the_job(self):
        self.check_failure_within_a_step("word_out_of_range_on_one_replica", 3, "index out of range", 4, TWO_REPLICAS)

    def test_different_step_functions_end_the_job(self):
        self.check_failure_within_a_step("different_step_functions", 1, "Make and call step functions in the same order")

    def test_numbers_that_go_bad_and_optimizers_that_differ_end_the_job(self):
        two_of_one = {"SMP_CONFIG": json.dumps({"pipeline_parallel_degree": 1})}
        rates = "'optimizer 0 (SGD), group 0: lr = 0.1' on {} 0 and 'optimizer 0 (SGD), group 0: lr = 0.2' on {} 1"
        for case, environment, text in (
                ("nan_in_the_target", {}, "got nan in the loss of microbatch 1 on rank 1 in training step 1. No rank has"),
                ("rate_of_one_replica", two_of_one, rates.format("replica", "replica")),
                ("rate_of_one_replica_at_the_end", two_of_one, rates.format("rank", "rank"))):
            with self.subTest(case):
                self.assertIn(text, self.run_uncaught(case, environment=environment)[-1])

    def test_killed_rank_is_named_by_every_survivor(self):
        for killed in (0, 2):
            with self.subTest(killed=killed):
                job = self.start(3, "train_for_ever", "uncaught")
                for line in job.stdout:
                    if "loss" in line:
                        break
                os.kill(worlds.pid_of_rank(self.token, killed), 9)
                reports = worlds.reports(self.finish(job))
                self.assertNotEqual(job.returncode, 0, self.output)
                survivors = [rank for rank in range(3) if rank != killed]
                self.assertEqual(sorted(line[:8] for line in reports), [f"[rank {rank}]" for rank in survivors])
                for line in reports:
                    self.assertRegex(line, rf"\] rank {killed} \(pid \d+ on host .+\) was killed")


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
