"""Peak memory and time of a training step with activation checkpointing, beside torch's own ways, in one process.

python bench_memory.py [MEASURE]

Prints "name value unit" and the raw figures: the step relative to eager torch, in turns, and peaks in MiB above what rests. The
model is a transformer of 12 layers of width 512, on 2 rows of 256 tokens.
"""

import ctypes
import functools
import gc
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import smdistributed.modelparallel.torch as smp

ROUNDS = 5
MIB = 1 << 20
# A limit in MiB above the parameters, of which 151 are gradients.
MEASURES = {"memory_vs_eager": None, "memory_marked_vs_eager": None, "memory_190_vs_eager": 190, "memory_170_vs_eager": 170}


def status_mib(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(key))


def peak_mib(step):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark begins anew
    before = status_mib("VmRSS")
    step()
    return status_mib("VmHWM") - before


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Net(nn.Module):
    def __init__(self, around=lambda block, x: block(x), layers=12, width=512, heads=8, vocabulary=2000, tokens=256):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.around = around

    def forward(self, ids):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(self.norm(x))


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def make(**options):
    torch.manual_seed(1)
    return Net(**options)


def plain(net, ids):
    def step():
        loss = loss_of(net, ids)
        loss.backward()
        net.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ours(net, ids, mark=lambda net: None):
    mark(net)
    model = smp.DistributedModel(net)

    @smp.step
    def train_step(model, ids):
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    def step():
        loss = train_step(model, ids).reduce_mean()
        model.zero_grad()
        return loss

    return step


def measured(contenders):
    """(peak, step seconds, loss) by name. Steps of smp run from tapes when they are measured."""
    for _ in range(4):
        losses = {name: step() for name, step in contenders.items()}
    peaks = {name: peak_mib(step) for name, step in contenders.items()}
    seconds = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, step in contenders.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    return {name: (peaks[name], statistics.median(seconds[name]), losses[name]) for name in contenders}


def selective():
    kept = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def main():
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # else what is resident is what lies between tensors, for all alike
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB // 16)})
    wanted = sys.argv[1:] or list(MEASURES)
    unknown = sorted(set(wanted) - set(MEASURES))
    if unknown:
        raise SystemExit(f"bench_memory.py: expected some of {', '.join(MEASURES)}, got {', '.join(unknown)}")
    torch.set_num_threads(1)
    ids = torch.randint(2000, (2, 256), generator=torch.Generator().manual_seed(0))
    parameters = sum(p.nbytes for p in make().parameters())
    for name in wanted:
        config = {"log_level": "off", "keep_memory": False}  # else what is freed stays resident
        if MEASURES[name] is not None:
            config["memory_limit_mb"] = MEASURES[name] + parameters // MIB
        smp.init(config)
        contenders = {"eager": plain(make(), ids)}
        if name == "memory_marked_vs_eager":
            contenders["checkpointed"] = plain(make(around=functools.partial(checkpoint, use_reentrant=False)), ids)
            around = functools.partial(checkpoint, use_reentrant=False, context_fn=selective())
            contenders["selective"] = plain(make(around=around), ids)
        mark = (lambda net: smp.set_activation_checkpointing(net.blocks)) if "marked" in name else lambda net: None
        contenders["smp"] = ours(make(), ids, mark)
        results = measured(contenders)
        (eager_peak, eager_s, loss), (peak, seconds, _) = results["eager"], results["smp"]
        assert all(torch.equal(other, loss) for _, _, other in results.values()), f"losses differ: {results}"
        raw = ", ".join(f"{one} {mib:.0f} MiB {s / eager_s:.3f} x" for one, (mib, s, _) in results.items())
        print(f"{name} {seconds / eager_s:.3f} x (peak {peak:.0f} of {eager_peak:.0f} MiB; {raw})", flush=True)
        smp.shutdown()


if __name__ == "__main__":
    main()
