"""What CUDA scripts call beside training with smp, as cpu_test.py runs it without a GPU, with what they expect."""

import copy
import io

import torch
from torch import nn

CPU = torch.zeros(1).device


class Scaled(torch.autograd.Function):
    """A backward that computes on the GPU by name."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        ctx.saw_autocast = torch.is_autocast_enabled()
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        assert ctx.saw_autocast == torch.is_autocast_enabled("cuda")
        return gradient * torch.full((1,), 2.0, device="cuda")


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd(cast_inputs=torch.bfloat16)
    def forward(ctx, x):
        assert not torch.is_autocast_enabled()
        return x

    @staticmethod
    @torch.cuda.amp.custom_bwd
    def backward(ctx, gradient):
        return gradient


# A backward of the script's own: functions, hooks, torch.autograd.grad.
x = torch.ones(3, device="cuda:0", requires_grad=True)
seen = []
x.register_hook(lambda gradient: seen.append(torch.zeros(1, device="cuda").device))
Scaled.apply(x).sum().backward()
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert torch.is_autocast_enabled() and torch.get_autocast_gpu_dtype() is torch.bfloat16
    y = Scaled.apply(x).sum()
    assert Cast.apply(x).dtype is torch.bfloat16
(gradient,) = torch.autograd.grad(y, x)
assert x.grad.tolist() == gradient.tolist() == [2, 2, 2] and seen == [CPU, CPU]

# Devices by number.
assert x.to(0).device == torch.ones(1, device=0).device == x.to(device=1).device == torch.device(0) == CPU
assert x.to(0, torch.float64).dtype is torch.float64 and torch.ones(2, 3).sum(1).tolist() == [3, 3]
assert next(nn.Linear(2, 2).to(0).parameters()).device == next(nn.Linear(2, 2, device=0).parameters()).device == CPU

# Random numbers.
generator = torch.Generator("cuda").manual_seed(5)
assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
drawn = torch.randn(3, device="cuda", generator=generator)
assert torch.equal(drawn, torch.randn(3, generator=torch.Generator(device=torch.device("cuda", 1)).manual_seed(5)))
with torch.random.fork_rng(devices=[0, torch.device("cuda", 1)]):
    inside = torch.randn(3, device="cuda")
assert torch.equal(torch.randn(3), inside)
kept = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all(), torch.cuda.random.get_rng_state(0)
drawn = torch.randn(3)
for restore in (
    lambda: torch.cuda.set_rng_state(kept[0], device=0),
    lambda: torch.cuda.set_rng_state_all(kept[1]),
    lambda: torch.cuda.random.set_rng_state(kept[2]),
):
    restore()
    assert torch.equal(torch.randn(3), drawn)

# A scaler, with and without overflow, and what it would be without one.
net = nn.Linear(3, 1).cuda()
plain = copy.deepcopy(net)
for make in (torch.cuda.amp.GradScaler, lambda: torch.amp.GradScaler("cuda")):
    scaler, optimizer = make(), torch.optim.SGD(net.parameters(), lr=0.5)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 3, device=0)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    plain.zero_grad()
    plain(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert torch.equal(net.weight, plain.weight) and torch.equal(net.bias, plain.bias)
    assert scaler.is_enabled() and scaler.get_scale() == 2.0**15

# Streams and events: one order of work.
first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
stream = torch.cuda.Stream(device=0, priority=-1)
with torch.cuda.stream(stream), torch.cuda.device(0):
    first.record(stream)
    stream.wait_stream(torch.cuda.default_stream())
    drawn.record_stream(stream)
    stream.record_event(second)
stream.wait_event(second)
second.wait()
second.synchronize()
assert first.query() and stream.query() and first.elapsed_time(second) >= 0
# Files that were written on a GPU.
file = io.BytesIO()
tag, torch.serialization.location_tag = torch.serialization.location_tag, lambda storage: "cuda:0"
torch.save(x.detach(), file)
torch.serialization.location_tag = tag
for where in (None, {"cuda:0": "cuda:1"}, "cuda:1", torch.device("cuda"), lambda storage, location: storage.cuda(1)):
    file.seek(0)
    assert torch.load(file, map_location=where).device == CPU
file.seek(0)
assert torch.load(file).device == CPU

# What is asked of the device, and defaults.
properties = torch.cuda.get_device_properties(0)
free, total = torch.cuda.mem_get_info()
assert properties.total_memory == total > free > 0 and not torch.cuda.is_current_stream_capturing()
torch.cuda.set_per_process_memory_fraction(0.5)
for kind in ("torch.cuda.DoubleTensor", torch.cuda.DoubleTensor):
    torch.set_default_tensor_type(kind)
    assert torch.ones(1).dtype is torch.float64
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.ones(1).dtype is torch.float32
assert torch.amp.GradScaler().is_enabled()
assert torch.compile(lambda y: y.cuda() + torch.ones(3, device="cuda"), backend="eager")(x.detach()).tolist() == [2, 2, 2]

print("all called")
