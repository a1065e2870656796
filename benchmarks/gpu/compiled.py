"""torch.compile on the GPU, for bench_gpu's models: forward and backward of four microbatches a step, bf16 autocast.

  python benchmarks/gpu/compiled.py [DEVICE]     DEVICE: cuda without it; cpu is a small model, to see that this runs

Prints "name value unit" for each model as it is compiled by default and with CUDA graphs ("reduce-overhead"): the least of five
series, as bench_gpu takes it.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

MICROBATCHES, VOCAB, SERIES = 4, 8192, 5


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.attend(self.norm1(x)).chunk(3, -1)
        heads = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.shrink(functional.gelu(self.grow(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """tests/support/language_model.h in Python."""

    def __init__(self, width, layers, tokens):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, width), nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens, targets):
        logits = self.head(self.blocks(self.embedding(tokens) + self.positions))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def time_of(step, steps, wait):
    """Milliseconds per step."""
    for _ in range(6):
        step()
    least = float("inf")
    for _ in range(SERIES):
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        least = min(least, (time.perf_counter() - begin) * 1e3 / steps)
    return least


def measure(name, device, width, layers, tokens, rows, steps):
    for mode, suffix in (("default", ""), ("reduce-overhead", "_graphs")):
        torch.compiler.reset()
        with torch.device(device):
            net = Gpt(width, layers, tokens)
            batches = torch.randint(VOCAB, (2, MICROBATCHES, rows, tokens))
        compiled = torch.compile(net, mode=mode)

        def step(net=net, compiled=compiled, batches=batches):
            net.zero_grad(set_to_none=not suffix)  # CUDA graphs add to gradients that stay
            for batch, targets in zip(*batches, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                with torch.autocast(device, torch.bfloat16):
                    loss = compiled(batch, targets)
                (loss / MICROBATCHES).backward()

        milliseconds = time_of(step, steps, torch.cuda.synchronize if device == "cuda" else lambda: None)
        print(f"gpu_compiled{suffix}_{name} {milliseconds:.4g} ms", flush=True)


def main(device="cuda"):
    if device == "cuda":
        measure("small", device, width=256, layers=12, tokens=128, rows=8, steps=40)
        measure("large", device, width=2048, layers=12, tokens=1024, rows=4, steps=10)
    else:
        measure("tiny", device, width=64, layers=2, tokens=16, rows=2, steps=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
