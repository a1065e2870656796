"""What tests of the Python package share: a loss with its step, and the plain loop that a step is compared with."""

import contextlib
import gc
import os
import select
import sys
import tempfile
import unittest
import warnings

import torch

import smdistributed.modelparallel.torch as smp

from forked import job_environments

MICROBATCHES = 4


def batch(seed=0):
    """For models of six features."""
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))


def loss_of(model, x):
    return model(x).pow(2).mean()


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make_evaluation():
    """Of what models return."""

    @smp.step
    def evaluate(model, x):
        return model(x)

    return evaluate


def make_step():
    """A step function of its own, with programs of its own."""

    @smp.step
    def train_step(model, x):
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    return train_step


def plain_step(model, loss_of, *batch, microbatches=MICROBATCHES):
    """One step without smp: losses by microbatch; gradients are those of their mean."""
    losses = []
    for part in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
        loss = loss_of(model, *(piece.clone() for piece in part))
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return losses


def same_bits(test, ours, theirs, what):
    """Tensors by name, or a list of them."""
    pairs = zip(ours, theirs, strict=True)
    if isinstance(ours, dict):
        test.assertEqual(list(ours), list(theirs), what)
        pairs = ((ours[name], theirs[name]) for name in ours)
    for index, (a, b) in enumerate(pairs):
        if not torch.equal(a, b):  # the text takes longer than most training
            test.fail(f"{what}: {list(ours)[index] if isinstance(ours, dict) else index}: {a} and {b}")


def made(construct, is_delayed):
    """The module, and the state in which its construction leaves the generator."""
    torch.manual_seed(7)
    with smp.delay_param_initialization(enabled=is_delayed):
        module = construct()
    return module, torch.get_rng_state()


def tensors_of(module):
    return {name: tensor.detach() for each in (module.named_parameters, module.named_buffers)
            for name, tensor in each(remove_duplicate=False)}  # fmt: skip


def without_memory(module):
    """Names of the tensors that have no memory: not yet, or because they are elsewhere."""

    def has_memory(tensor):
        try:
            return tensor.data_ptr() != 0
        except RuntimeError:
            return False

    return {name for name, tensor in tensors_of(module).items() if not has_memory(tensor)}


def fork_ranks(count, run, environment):
    """Calls run() on as many processes as ranks, with torchrun's variables; what they wrote to stderr, if one has failed.

    Forks are ready at once, where a process of its own first imports torch for seconds. So smp must be without a job here.
    """
    with job_environments(count) as environments, tempfile.TemporaryFile() as errors:
        ranks = []
        for own in environments:
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.dup2(errors.fileno(), 2)
                os.environ.update({**environment, **own})
                _run_and_end(run)
        codes = exit_codes(ranks)
        errors.seek(0)
        return errors.read().decode() or f"exit codes {codes}" if any(codes) else ""


def exit_codes(children):
    """By child. Each is gone at once when it has ended, as launchers see to: others wait for that, to end behind it."""
    ends = {os.pidfd_open(child): child for child in children}
    codes = {}
    while ends:
        for end in select.select(ends, [], [])[0]:
            child = ends.pop(end)
            os.close(end)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [codes[child] for child in children]


def _run_and_end(run):
    """As the interpreter ends, but for what the parent does at its own end, as to remove temporary folders."""
    gc.freeze()  # else each DistributedModel, which collects, goes through all that the parent has imported: half of most tests
    try:
        run()
        if smp.is_initialized():
            smp.shutdown()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # smp's ends here
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main():
    """unittest.main, where a failure on one rank ends the job: the others wait for it."""
    gc.freeze()  # as in _run_and_end
    program = unittest.main(exit=False, verbosity=0, failfast=True, module="__main__")
    if not program.result.wasSuccessful():
        sys.stderr.flush()
        os._exit(1)
