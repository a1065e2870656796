"""Random programs of what people write in Python, on 1 to 3 ranks: the bits of a plain loop over the microbatches, what it throws,
or a refusal with a way out."""

import collections
import os
import random
import types
import unittest
import warnings

import numpy
import support
import torch
import torch._dynamo  # which the first optimizer loads, here once for all forks
import torch.nn.functional as F
from random_beside import Net
from random_parts import FORWARD, HOOKS, WIDTH

import smdistributed.modelparallel.torch as smp

NUM_PROGRAMS, STEPS = 100, 6

Program = collections.namedtuple("Program", "seed forward body hooks rows changes_rows optimizer clips schedules evaluates between")


def random_program(seed):
    draw = random.Random(seed)
    return Program(
        seed=seed,
        forward=draw.choices(list(FORWARD), k=draw.randint(1, 4)),
        body=draw.choices(list(BODY), k=draw.randint(0, 2)),
        hooks=draw.sample(list(HOOKS), k=draw.choice([0, 0, 1, 2])),
        rows=draw.randint(2, 4),
        changes_rows=draw.random() < 0.2,
        optimizer=draw.choice([("SGD", {"lr": 0.05, "momentum": 0.5}), ("Adam", {"lr": 1e-3}), ("AdamW", {"lr": 1e-3})]),
        clips=draw.random() < 0.3,
        schedules=draw.random() < 0.3,
        evaluates=draw.random() < 0.3,
        between=draw.choice([None, None, None, "freeze", "write data", "zero gradients"]),
    )


def metric(run, output, loss):
    with torch.no_grad():
        run.log.append((output.argmax(1) == run.tokens).float().mean().item())
    return loss


def target_without_gradient(run, output, loss):
    with torch.no_grad():
        target = run.model(run.x * 0.5, run.y, run.tokens)
    return loss + F.mse_loss(output, target)


def backward_of_its_own(run, output, loss):
    run.backward(output.mean())
    return loss


def value_kept(run, output, loss):
    before, run.kept = run.kept, loss.item()
    return loss if before is None else loss + 0.01 * before


def tensor_kept(run, output, loss):
    before, run.kept = run.kept, output.detach().mean()
    return loss if before is None else loss + 0.01 * before


def under_autocast(run, output, loss):
    with torch.autocast("cpu", torch.bfloat16):
        similarity = output @ run.net.linears[1].weight
    return loss + similarity.float().mean() * 0.1


def buffer_written(run, output, loss):
    with torch.no_grad():
        run.net.running.copy_(0.9 * run.net.running + 0.1 * output.mean(0))
    return loss


def classes(run):
    return run.tokens.clamp(max=WIDTH - 1)


BODY = {
    "read": lambda run, output, loss: loss * 0.5 if loss.item() > 1 else loss,
    "logged": lambda run, output, loss: run.log.append(f"{loss:.6f} {output.detach().argmax(1).tolist()}") or loss,
    "counted by numpy": lambda run, output, loss: run.log.append(numpy.bincount(output.argmax(-1).numpy()).tolist()) or loss,
    "weighted by a value": lambda run, output, loss: loss / max(loss.detach().item(), 1e-3),
    "guarded": lambda run, output, loss: loss if torch.isfinite(loss) else torch.nan_to_num(loss),
    "penalty": lambda run, output, loss: loss + 1e-3 * sum(p.square().sum() for p in run.net.linears.parameters()),
    "penalty by names": lambda run, output, loss: (
        loss + 1e-3 * torch.stack([p.norm() for name, p in run.net.named_parameters() if name.endswith("weight")]).sum()
    ),
    "cross entropy": lambda run, output, loss: loss + F.cross_entropy(output, classes(run), label_smoothing=0.1),
    "some ignored": lambda run, output, loss: loss + F.cross_entropy(output, classes(run).masked_fill(run.tokens == 1, -100)),
    "called again": lambda run, output, loss: loss + (run.model(output.detach(), run.y, run.tokens) - output).square().mean(),
    "rows": lambda run, output, loss: loss + sum(F.mse_loss(a, b) for a, b in zip(output, run.y, strict=True)) * 0.1,
    "distribution": lambda run, output, loss: loss - torch.distributions.Categorical(logits=output).log_prob(classes(run)).mean(),
    **{f.__name__: f for f in (metric, target_without_gradient, backward_of_its_own, value_kept, tensor_kept, under_autocast)},
    "buffer_written": buffer_written,
}


def arguments(program, step, microbatches):
    rows = (program.rows + (step % 3 if program.changes_rows else 0)) * microbatches
    numbers = torch.Generator().manual_seed(step)
    x, y = (torch.randn(rows, WIDTH, generator=numbers) for _ in range(2))
    return x, y, torch.randint(0, 10, (rows,), generator=numbers)


def run_body(program, run, x, y, tokens):
    run.x, run.y, run.tokens = x, y, tokens
    output = run.model(x, y, tokens)
    loss = output.square().mean()
    for name in program.body:
        loss = BODY[name](run, output, loss)
    run.backward(loss)
    return loss, output


def train(program, run, optimizer):
    """What each step leaves behind, up to the one that throws; the error."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if program.schedules else None
    behind = []
    try:
        for number in range(STEPS):
            if program.between == "freeze" and number in (2, 4):
                run.net.linears[1].weight.requires_grad_(number == 4)
            if program.between == "write data" and number == 3:
                for parameter in run.own_parameters():
                    parameter.data.mul_(0.5)
            optimizer.zero_grad(set_to_none=program.between != "zero gradients" or number % 2 == 0)
            seen = run.step(number)
            norm = run.clip(1.0) if program.clips else None
            optimizer.step()
            if scheduler:
                scheduler.step()
            if program.evaluates and number % 2:
                run.model.eval()
                with torch.no_grad():
                    seen += run.evaluate(number)
                run.model.train()
            tensors = {name: tensor.detach().clone() for name, tensor in run.own_tensors().items()}
            behind.append(types.SimpleNamespace(results=seen, norm=norm, tensors=tensors, log=list(run.log)))
    except Exception as error:  # of any kind: it is compared
        return behind, error
    return behind, None


def make_run(program):
    torch.manual_seed(program.seed)
    return types.SimpleNamespace(net=Net(program.forward, program.hooks), log=[], kept=None)


def train_plainly(program, microbatches):
    run = make_run(program)
    run.model = run.net
    run.backward = lambda loss: (loss / microbatches).backward(retain_graph=True)
    run.clip = lambda norm: torch.nn.utils.clip_grad_norm_(run.net.parameters(), norm)
    run.own_parameters = run.net.parameters
    run.own_tensors = lambda: support.tensors_of(run.net)

    def results_of(number, function):
        parts = zip(*(each.chunk(microbatches) for each in arguments(program, number, microbatches)), strict=True)
        return [each.detach().clone() for part in parts for each in function(*(piece.clone() for piece in part))]

    run.step = lambda number: results_of(number, lambda *part: run_body(program, run, *part))
    run.evaluate = lambda number: results_of(number, lambda *part: [run.net(*part)])
    name, options = program.optimizer
    return train(program, run, getattr(torch.optim, name)(run.net.parameters(), **options))


def train_by_smp(program, microbatches):
    run = make_run(program)
    run.model = smp.DistributedModel(run.net)
    run.backward, run.clip, run.own_parameters = run.model.backward, run.model.clip_grad_norm_, run.model.local_parameters
    run.own_tensors = lambda: dict([*run.model.local_named_parameters(), *run.model.local_named_buffers()])

    @smp.step
    def train_step(x, y, tokens):
        return run_body(program, run, x, y, tokens)

    @smp.step
    def evaluation(x, y, tokens):
        return [run.model(x, y, tokens)]

    def results_of(number, function):
        results = function(*arguments(program, number, microbatches))
        return [each for microbatch in zip(*(result.outputs for result in results), strict=True) for each in microbatch]

    run.step = lambda number: results_of(number, train_step)
    run.evaluate = lambda number: results_of(number, evaluation)
    name, options = program.optimizer
    optimizer = smp.DistributedOptimizer(getattr(torch.optim, name)(run.net.parameters(), **options))
    return train(program, run, optimizer)


def difference(ours, theirs):
    def differs(a, b):
        return a.dtype != b.dtype or not torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))

    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        for index, (p, q) in enumerate(zip(a.results, b.results, strict=True)):
            if differs(p, q):
                return f"step {number}, result {index}: {p} and {q}"
        for name, tensor in a.tensors.items():
            if differs(tensor, b.tensors[name]):
                return f"step {number}, {name}: {tensor} and {b.tensors[name]}"
        if smp.rank() == 0 and a.log != b.log:  # where the body runs
            return f"step {number}, log: {a.log} and {b.log}"
        if a.norm is not None and abs(a.norm - b.norm) > 1e-5 * (1 + b.norm):
            return f"step {number}, norm: {a.norm} and {b.norm}"
    return ""


# How a text of ours goes on behind what was expected.
WAYS_OUT = "Call carry Compute Evaluate Give Hook Leave Make Register Return Set Train Use Write".split()


def has_way_out(text):
    return any(f" {way} " in text for way in WAYS_OUT) and "INTERNAL ASSERT" not in text


def run_program(program, microbatches, report):
    """On one of the ranks; what has become of it goes to the pipe `report` from rank 0, differences are raised on each."""
    warnings.simplefilter("ignore")
    smp.init({"microbatches": microbatches, "log_level": "off", "nonfinite": "ignore", "timeout_s": 60})
    theirs, their_error = train_plainly(program, microbatches)
    ours, our_error = train_by_smp(program, microbatches)
    text = difference(ours, theirs)
    if text:
        raise AssertionError(f"{program} on {smp.size()} ranks: {text}")
    if smp.rank() == 0:
        if their_error and not our_error:
            raise AssertionError(f"{program}: smp goes on where torch throws {their_error!r}")
        if our_error and not their_error and not has_way_out(str(our_error)):
            raise AssertionError(f"{program}: an error without a way out: {our_error!r}")
        os.write(report, b"t" if their_error else b"r" if our_error else b"e")
    if our_error:
        os._exit(0)  # the ranks that are behind have nobody to wait for


class RandomPrograms(unittest.TestCase):
    def test_equal_a_plain_loop_or_are_refused(self):
        torch.backends.mha.set_fastpath_enabled(False)  # whose last digits differ
        reading, report = os.pipe()
        for seed in range(NUM_PROGRAMS):
            program, microbatches = random_program(seed), 1 + seed % 3
            errors = support.fork_ranks(1 + seed // 3 % 3, lambda: run_program(program, microbatches, report), {})  # noqa: B023
            self.assertFalse(errors, f"seed {seed}: {errors}")
        os.close(report)
        with os.fdopen(reading, "rb") as file:
            seen = collections.Counter(file.read().decode())
        print(f"{seen['e']} equal, {seen['t']} throw in a plain loop and here, {seen['r']} refused")
        self.assertEqual(seen.total(), NUM_PROGRAMS)
        self.assertGreaterEqual(seen["e"], NUM_PROGRAMS // 2)


if __name__ == "__main__":
    support.main()
