"""A script for GPUs only, as cpu_test.py runs it without one: rows of what CUDA scripts call, with what they expect."""

import os
import pickle
import sys
import tempfile

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

assert sys.argv[1:] == ["--epochs", "2"] and __name__ == "__main__"
assert torch.cuda.is_available() and os.environ["SM_NUM_GPUS"] and os.environ["SM_MODEL_DIR"]
smp.init({"microbatches": 2, "log_level": "off"})
torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda", smp.local_rank())
assert isinstance(device, torch.device) and isinstance(torch.device("cuda:0"), torch.device)
torch.cuda.manual_seed(1)
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device).cuda()
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, data):
    with torch.cuda.amp.autocast(enabled=False):
        output = model(data.to(device, non_blocking=True))
    target = torch.zeros(4, device="cuda") + torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    loss = (output - target).square().mean()
    model.backward(loss)
    return loss


start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
losses = []
for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True):
    optimizer.zero_grad()
    loss = train_step(model, batch.cuda(non_blocking=True)).reduce_mean()
    optimizer.step()
    losses.append(loss.item())
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().synchronize()
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0
torch.cuda.reset_max_memory_cached()
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved(device) == 0
assert loss.type() == "torch.cuda.FloatTensor" and isinstance(loss, torch.cuda.FloatTensor)
assert loss.half().type() == "torch.cuda.HalfTensor" and not isinstance(loss, torch.cuda.HalfTensor)
assert torch.equal(torch.cuda.FloatTensor([1, 2]), torch.tensor([1.0, 2.0])) and torch.cuda.IntTensor(2, 3).shape == (2, 3)
assert torch.cuda.FloatTensor(torch.Size([2, 3])).shape == (2, 3) and torch.cuda.FloatTensor().shape == (0,)
assert pickle.loads(pickle.dumps({"device": device})) == {"device": torch.device(type="cuda", index=0)}
with tempfile.TemporaryFile() as file:
    torch.save(nn.Linear(2, 2).state_dict(), file)
    for place in ("cuda:0", device, {"cuda:0": "cuda:1"}):
        file.seek(0)
        torch.load(file, map_location=place)
if smp.rank() == 0:
    print("losses", losses)
