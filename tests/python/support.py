"""What tests of the Python package share: the plain loop that a step is compared with."""

import os
import sys
import unittest

import torch

MICROBATCHES = 4


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
        test.assertTrue(torch.equal(a, b), f"{what}: {list(ours)[index] if isinstance(ours, dict) else index}: {a} and {b}")


def main():
    """unittest.main, where a failure on one rank ends the job: the others wait for it."""
    program = unittest.main(exit=False, verbosity=0, failfast=True, module="__main__")
    if not program.result.wasSuccessful():
        sys.stderr.flush()
        os._exit(1)
