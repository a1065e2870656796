"""The other side of a comparison: torch on the models of models.py, timed whenever run.py asks for it.

python peer.py RANK PORT MODEL MICROBATCHES CONTENDER...

Contenders: gpipe, 1f1b, interleaved (torch.distributed.pipelining on two ranks, the best cut by measured time), ddp
(two replicas, gloo), ddp-compiled (the same over torch.compile) and one (a single process). Reads lines "CONTENDER N" on
rank 0: N steps, answered by the seconds of each in one line. Ends with its input.
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from models import make

WORLD = 2
SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}
now = time.perf_counter  # CLOCK_MONOTONIC: one clock on a host


def accumulate(model, loss, x, y, microbatches):
    """The unsplit step: gradients of all microbatches, summed."""
    def step():
        model.zero_grad(set_to_none=True)
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches)):
            (loss(model(a), b) / microbatches).backward()
    return step


def profile(layers, loss, x, y, repeats=9):
    """Median seconds, forward and backward, of each layer on one microbatch."""
    costs = [[] for _ in layers]
    for _ in range(repeats):
        value, edges = x, []
        for i, layer in enumerate(layers):
            if value.is_floating_point():
                value = value.detach().requires_grad_()
            begin = now()
            out = layer(value)
            if i + 1 == len(layers):
                result = loss(out, y)
            costs[i].append(now() - begin)
            edges.append((value, out))
            value = out
        gradient = None
        for i, (value, out) in reversed(list(enumerate(edges))):
            begin = now()
            result.backward() if gradient is None else out.backward(gradient)
            costs[i][-1] += now() - begin
            gradient = value.grad
        for layer in layers:
            layer.zero_grad(set_to_none=True)
    return [statistics.median(c) for c in costs]


def best_cuts(costs, parts):
    """The parts - 1 indices that minimise the slowest of contiguous parts, exactly."""
    best = {0: (0.0, ())}
    for left in range(parts, 0, -1):
        longer = {}
        for begin, (worst, at) in best.items():
            for end in range(begin + 1, len(costs) - left + 2) if left > 1 else (len(costs),):
                trial = (max(worst, sum(costs[begin:end])), at + (end,))
                if end not in longer or trial < longer[end]:
                    longer[end] = trial
        best = longer
    return best[len(costs)][1][:-1]


def pipelined(kind, visits, rank, model, microbatches):
    """One step of a schedule of torch.distributed.pipelining, cut where that is fastest."""
    layers, x, y, loss = make(model)
    stages = WORLD * visits
    plan = [None]
    if rank == 0:
        plan = [best_cuts(profile(layers, loss, x.chunk(microbatches)[0], y.chunk(microbatches)[0]), stages)]
    dist.broadcast_object_list(plan)
    bounds = [0, *plan[0], len(layers)]
    mine = range(rank, stages, WORLD)
    parts = [nn.Sequential(*layers[bounds[i]:bounds[i + 1]]) for i in mine]
    made = [PipelineStage(part, i, stages, torch.device("cpu")) for part, i in zip(parts, mine)]
    schedule = kind(made if visits > 1 else made[0], microbatches, loss_fn=loss)

    def step():
        for part in parts:
            part.zero_grad(set_to_none=True)
        arguments = (x,) if 0 in mine else ()
        schedule.step(*arguments, target=y, losses=[]) if stages - 1 in mine else schedule.step(*arguments)
    return step


def replicated(rank, model, is_compiled=False):
    """DDP at its best: half of the batch at once, buckets in which the gradients live."""
    layers, x, y, loss = make(model)
    net = nn.Sequential(*layers)
    net = DistributedDataParallel(torch.compile(net) if is_compiled else net, gradient_as_bucket_view=True)
    return accumulate(net, loss, x.chunk(WORLD)[rank], y.chunk(WORLD)[rank], 1)


def alone(rank, model):
    """One process with the whole batch."""
    layers, x, y, loss = make(model)
    step = accumulate(nn.Sequential(*layers), loss, x, y, 1)
    return step if rank == 0 else lambda: None


def seconds_together(step):
    """From the last rank that begins to the last that ends."""
    dist.barrier()
    begin = now()
    step()
    times = [None] * WORLD
    dist.all_gather_object(times, (begin, now()))
    return max(end for _, end in times) - max(begin for begin, _ in times)


def main():
    rank, port, model, microbatches, *contenders = sys.argv[1:]
    rank, microbatches = int(rank), int(microbatches)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    steps = {}
    for name in contenders:
        if name in SCHEDULES:
            steps[name] = pipelined(*SCHEDULES[name], rank, model, microbatches)
        else:
            steps[name] = alone(rank, model) if name == "one" else replicated(rank, model, name == "ddp-compiled")
        for _ in range(3):
            steps[name]()
    if rank == 0:
        print("ready", flush=True)
    while True:
        request = [sys.stdin.readline().split() if rank == 0 else None]
        dist.broadcast_object_list(request)
        if not request[0]:
            break
        name, count = request[0]
        seconds = [seconds_together(steps[name]) for _ in range(int(count))]
        if rank == 0:
            print(*seconds, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
