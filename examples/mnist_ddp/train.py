"""Reads handwritten digits: a training script for DistributedDataParallel, ported. What a line was is said beside it.

    smp run -np 4 python examples/mnist_ddp/train.py                                             four replicas
    SMP_CONFIG='{"partitions": 2}' smp run -np 4 python examples/mnist_ddp/train.py              two, of two stages each

The digits are the 1,797 of 8 x 8 pixels that scikit-learn carries.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.modelparallel.torch as smp  # import torch.distributed as dist

try:
    from tqdm import tqdm
except ImportError:  # no progress bar then

    def tqdm(batches, **_):
        return batches


NUM_TRAIN = 1437


class Net(nn.Module):
    """Without dropout, so that replicas, which draw their own, train as one process does."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


@smp.step  # these lines stood in the loop
def train_step(model, images, labels):
    loss = F.nll_loss(model(images), labels)
    model.backward(loss)  # loss.backward()
    return loss


@smp.step
def test_step(model, images, labels):
    scores = model(images)
    return F.nll_loss(scores, labels, reduction="sum"), scores.argmax(1).eq(labels).sum()


def mean_over_replicas(value):
    return sum(smp.allgather(value, smp.DP_GROUP)) / smp.dp_size()  # dist.all_reduce(value), and a division


def train(model, loader, optimizer, epoch):
    model.train()
    loader.sampler.set_epoch(epoch)
    losses = []
    for images, labels in tqdm(loader, disable=smp.rank() != 0, leave=False):
        optimizer.zero_grad()
        losses.append(train_step(model, images, labels).reduce_mean().item())
        optimizer.step()
    mean = mean_over_replicas(sum(losses) / len(losses))
    if smp.rank() == 0:  # dist.get_rank()
        print(f"epoch {epoch} | training loss {mean:.4f}", flush=True)


def test(model, loader):
    model.eval()
    loss, num_right = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            batch_loss, batch_right = test_step(model, images, labels)
            loss += batch_loss.reduce_sum().item()
            num_right += batch_right.reduce_sum().item()
    num_images = len(loader.dataset)
    if smp.rank() == 0:
        print(f"test loss {loss / num_images:.4f}, {num_right} of {num_images} images are read rightly", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", help="a file for the trained weights")
    args, _ = parser.parse_known_args()

    smp.init({"partitions": 1, "ddp": True, "microbatches": 2})  # dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train_set = TensorDataset(images[order[:NUM_TRAIN]], labels[order[:NUM_TRAIN]])
    test_set = TensorDataset(images[order[NUM_TRAIN:]], labels[order[NUM_TRAIN:]])
    # num_replicas=dist.get_world_size(), rank=dist.get_rank(): all ranks of a pipeline load the same
    sampler = DistributedSampler(train_set, num_replicas=smp.dp_size(), rank=smp.dp_rank(), seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size // smp.dp_size(), sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, 360)

    model = smp.DistributedModel(Net())  # DistributedDataParallel(Net())
    optimizer = smp.DistributedOptimizer(optim.Adam(model.parameters(), lr=args.lr))
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    state = model.state_dict()  # model.module.state_dict(); on all ranks, since each has a part
    if args.save and smp.rank() == 0:
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
