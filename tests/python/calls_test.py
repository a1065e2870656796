"""Ranks in different calls: an error that names both, on both sides, and nothing of one call taken for the other's."""

import functools
import os
import subprocess
import sys
import tempfile
import unittest

import support
import torch
import torch._dynamo  # which the first optimizer loads, in each fork anew
from forked import ForkedScripts
from torch import nn

import smdistributed.modelparallel.torch as smp


class Job:
    """What a rank has to call, after one step of all."""

    def __init__(self, folder, **config):
        smp.init({"microbatches": 2, "log_level": "off", **config})
        self.folder = folder
        self.model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.optimizer = smp.DistributedOptimizer(torch.optim.Adam(self.model.parameters()))
        self.functions = [support.make_step() for _ in range(2)]
        self.step()

    def step(self, number=0, times=1):
        for _ in range(times):
            self.functions[number](self.model, torch.ones(4, 4))


def other_step(job):
    job.step(number=1)


def three_steps(job):
    job.step(times=3)


def nothing(job):
    """The end of the program, which leaves the job."""


def shutdown(job):
    smp.shutdown()


def save_checkpoint(job):
    smp.save_checkpoint(job.folder, "tag")


def resume(job):
    smp.resume_from_checkpoint(job.folder, "tag")


def state_dict(job):
    job.model.state_dict()


def load(job):
    job.model.load_state_dict({}, strict=False)


def optimizer_state(job):
    job.optimizer.state_dict()


def load_optimizer(job):
    job.optimizer.load_state_dict({"state": {}, "param_groups": []})


def clip(job):
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)


def make_model(job):
    smp.DistributedModel(nn.Linear(1, 1))


def barrier(job):
    smp.barrier()


def pp_barrier(job):
    smp.pp_barrier()


def allgather(job):
    smp.allgather("own", smp.WORLD)


def broadcast(job):
    smp.broadcast("own", smp.WORLD)


def send(job):
    smp.send("own", 1 - smp.rank(), smp.RankType.WORLD_RANK)


def receive(job):
    smp.recv_from(1 - smp.rank(), smp.RankType.WORLD_RANK)


NAMES = {
    Job.step: "step",
    three_steps: "step",
    nothing: "shutdown",
    shutdown: "shutdown",
    save_checkpoint: "save_checkpoint",
    resume: "resume_from_checkpoint",
    state_dict: "state_dict",
    load: "load_state_dict",
    optimizer_state: "state of an optimizer",
    load_optimizer: "load_state_dict",
    clip: "clip_grad_norm_",
    make_model: "DistributedModel",
    barrier: "barrier of WORLD",
    pp_barrier: "barrier of PP_GROUP",
    allgather: "allgather of WORLD",
}

BOTH_WAYS = [(Job.step, other) for other in (save_checkpoint, state_dict, load, nothing)]
ONE_WAY = [
    *((Job.step, other) for other in (shutdown, resume, optimizer_state, clip, barrier)),
    *((other, Job.step) for other in (load_optimizer, make_model, allgather)),
    *((nothing, other) for other in (save_checkpoint, state_dict, load, barrier, make_model)),
    (shutdown, state_dict),
    (save_checkpoint, resume),
    (save_checkpoint, barrier),
    (optimizer_state, state_dict),
    (state_dict, load),
    (barrier, allgather),
    (barrier, pp_barrier),
]
PAIRS = BOTH_WAYS + [pair[::-1] for pair in BOTH_WAYS] + ONE_WAY


def run(parts, folder, config):
    """The part of this rank, and what became of it, as a line that no other output looks like."""
    try:
        job = Job(folder, **config)  # whose step others may have behind them, and end the job
        parts[smp.rank()](job)
        if smp.is_initialized():
            smp.shutdown()
    except BaseException as error:
        sys.stderr.write(f"\nsaw: {smp.rank()}: {str(error).splitlines()[0]}\n")
        raise


class Jobs(unittest.TestCase):
    def seen(self, errors, num_ranks):
        """What each rank has thrown, by rank."""
        lines = sorted(line for line in errors.splitlines() if line.startswith("saw: "))
        self.assertEqual([line[:6] for line in lines], [f"saw: {rank}" for rank in range(num_ranks)], errors)
        return lines

    def check_names(self, texts, failures):
        for line in failures:
            self.assertIn("expected every rank to make the same calls in the same order", line)
            for text in texts:
                self.assertIn(text, line)


def job(parts, config=None):
    """Its ranks' errors."""
    with tempfile.TemporaryDirectory() as folder:
        return support.fork_ranks(len(parts), functools.partial(run, parts, folder, config or {}), {})


class Different(Jobs):
    def check(self, cases, **config):
        """`cases`: the parts of the ranks, and what each rank's error names."""
        for parts, texts in cases:
            with self.subTest([part.__name__ for part in parts]):
                self.check_names(texts, self.seen(job(parts, config), len(parts)))

    def test_of_two_ranks_are_named_on_both(self):
        self.check([(parts, [f"{NAMES[part]} on rank {rank}" for rank, part in enumerate(parts)]) for parts in PAIRS])

    def test_of_objects_are_named_on_both(self):
        from_0, from_1 = (f"of an object from rank {rank} to rank {1 - rank}" for rank in range(2))
        self.check(
            [
                ((barrier, send), ("barrier of WORLD on rank 0", from_1)),
                ((broadcast, barrier), (from_0, "barrier of WORLD on rank 1")),
                ((Job.step, receive), ("step on rank 0", from_0)),
                ((send, Job.step), (from_0, "step on rank 1")),
                ((receive, nothing), (from_1, "shutdown on rank 1")),
                ((receive, receive), (from_0, from_1)),
                ((send, send), (from_0, from_1)),
            ]
        )

    def test_numbers_of_steps(self):
        fewer_on_0, fewer_on_1 = (Job.step, three_steps), (three_steps, Job.step)
        self.check([(fewer_on_0, ("shutdown on rank 0", "step on rank 1")), (fewer_on_1, ("shutdown on rank 1", "step on rank 0"))])

    def test_step_functions_are_told_apart_by_number(self):
        for parts in ((Job.step, other_step), (other_step, Job.step)):
            for line in self.seen(job(parts), 2):
                self.assertIn("expected all ranks of a pipeline to call the same step function, got number", line)

    def test_among_replicas(self):
        """Pipelines (0, 1) and (2, 3)."""
        step = Job.step
        cases = [
            ((step, step, nothing, nothing), ["step on rank", "shutdown on rank"]),
            ((nothing, nothing, nothing, state_dict), ["shutdown on rank 2", "state_dict on rank 3"]),
            ((step, step, step, save_checkpoint), ["save_checkpoint on rank 3", "step on rank"]),
        ]
        self.check(cases, pipeline_parallel_degree=2, ddp=True)


@unittest.skipUnless("MPIRUN" in os.environ, "the build has no MPI")
class DifferentOverMpi(Jobs):
    def test_of_two_ranks_are_named_on_both(self):
        scripts = ForkedScripts()
        self.addCleanup(scripts.close)
        for parts in ((Job.step, save_checkpoint), (state_dict, Job.step)):
            launcher = [os.environ["MPIRUN"], "--oversubscribe", "--bind-to", "none", "-np", "2"]
            with self.subTest([part.__name__ for part in parts]), tempfile.TemporaryDirectory() as folder:
                command = [*launcher, *scripts.command(__file__, folder, *(part.__name__ for part in parts))]
                errors = subprocess.run(command, capture_output=True, text=True, check=False).stderr
                self.check_names([f"{NAMES[part]} on rank {rank}" for rank, part in enumerate(parts)], self.seen(errors, 2))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a rank under mpirun
        run([globals().get(name) or getattr(Job, name) for name in sys.argv[2:]], sys.argv[1], {})
    else:
        unittest.main()
