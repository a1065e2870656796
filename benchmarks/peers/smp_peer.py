"""One side of a comparison, as smp_peer.cpp is, in Python: models.py trained with smp, timed whenever run.py asks for it.

smp run -np 2 python smp_peer.py MODEL MICROBATCHES pipeline|auto

Reads lines "N" on the first process: N steps, answered by the seconds of each in one line. Ends with its input.
"""
import sys
import time

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from models import make

WARM_UP = 4  # steps


class Training:
    def __init__(self, name):
        layers, self.x, self.y, self.loss_of = make(name)
        self.model = smp.DistributedModel(nn.Sequential(*layers))

        @smp.step
        def train(x, y):
            loss = self.loss_of(self.model(x), y)
            self.model.backward(loss)
            return loss

        @smp.step
        def evaluate(x, y):
            return self.loss_of(self.model(x), y)

        self.train, self.evaluate = train, evaluate

    def step(self):
        self.model.zero_grad(set_to_none=True)
        return self.train(self.x, self.y)

    def check(self, name, microbatches):
        """After so many steps as in the warm-up: in evaluation, where nothing is random, the losses are those of the plain loop."""
        layers, *batch, loss_of = make(name)
        net = nn.Sequential(*layers)
        x, y = (value.chunk(microbatches) for value in batch)
        with torch.no_grad():
            for _ in range(WARM_UP):  # statistics of norms
                for part in x:
                    net(part)
            net.eval()
            wanted = torch.stack([loss_of(net(a), b) for a, b in zip(x, y)])
            self.model.eval()
            losses = self.evaluate(self.x, self.y).stack()
            self.model.train()
        if not torch.allclose(losses, wanted, rtol=1e-5):
            raise SystemExit(f"smp_peer.py: expected the losses of the plain loop, {wanted.tolist()}, got {losses.tolist()}")


def seconds_together(training):
    """From the last process that begins to the last that ends: the clock is one on a host."""
    smp.barrier()
    begin = time.perf_counter()
    training.step()
    times = smp.allgather((begin, time.perf_counter()), smp.WORLD)
    return max(end for _, end in times) - max(begin for begin, _ in times)


def next_request():
    """The line, on every process; empty at the end."""
    if smp.rank() != 0:
        return smp.recv_from(0, smp.RankType.WORLD_RANK)
    line = sys.stdin.readline()
    smp.broadcast(line, smp.WORLD)
    return line


def main():
    name, microbatches, layout = sys.argv[1:]
    torch.set_num_threads(1)
    smp.init({
        "microbatches": microbatches if microbatches == "auto" else int(microbatches),
        **({"parallelism": "auto"} if layout == "auto" else {}),
        "virtual_stages": "auto",
        "cost": "measured",
        "cost_cache": "off",
        "log_level": "off",
        "timeout_s": 24 * 3600,  # stopped most of the time
    })
    training = Training(name)
    for _ in range(WARM_UP):
        losses = training.step()
    if layout == "pipeline":
        training.check(name, int(microbatches))
    if smp.rank() == 0:
        print(f"ready {smp.dp_size()}x{smp.pp_size()}x{len(losses)}", flush=True)
    while line := next_request():
        seconds = [seconds_together(training) for _ in range(int(line))]
        if smp.rank() == 0:
            print(*seconds, flush=True)


if __name__ == "__main__":
    main()
