"""Reads handwritten digits, in the style of SageMaker's example scripts.

    smp run -np 2 python examples/mnist_sagemaker/train.py --epochs 2
    SM_HP_MP_PARAMETERS='{"partitions": 2, "microbatches": 4, "auto_partition": false}' \\
        mpirun -np 2 python examples/mnist_sagemaker/train.py --partition manual

The digits are the 1,797 of 8 x 8 pixels that scikit-learn carries.
"""

import argparse
import contextlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smdistributed.modelparallel.torch as smp

try:
    from tqdm import tqdm
except ImportError:  # no progress bar then

    def tqdm(batches, **_):
        return batches


NUM_TRAIN = 1437


class Net(nn.Module):
    def __init__(self, by_hand):
        super().__init__()

        def stage(index):
            return smp.partition(index) if by_hand else contextlib.nullcontext()

        with stage(0):
            self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
            self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        with stage(smp.pp_size() - 1):
            self.fc1 = nn.Linear(64 * 4 * 4, 128)
            self.fc2 = nn.Linear(128, 10)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)

    def forward(self, images):
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


@smp.step
def train_step(model, images, labels):
    loss = F.nll_loss(model(images), labels)
    model.backward(loss)
    return loss


@smp.step
def test_step(model, images, labels):
    scores = model(images)
    return F.nll_loss(scores, labels, reduction="sum"), scores.argmax(1).eq(labels).sum()


def train(model, optimizer, loader, epoch):
    model.train()
    losses = []
    for images, labels in tqdm(loader, disable=smp.rank() != 0, leave=False):
        optimizer.zero_grad()
        losses.append(train_step(model, images, labels).reduce_mean().item())
        optimizer.step()
    if smp.rank() == 0:
        print(f"epoch {epoch} | training loss {sum(losses) / len(losses):.4f}", flush=True)


def test(model, loader):
    model.eval()
    loss, num_right, num_images = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            batch_loss, batch_right = test_step(model, images, labels)
            loss += batch_loss.reduce_sum().item()
            num_right += batch_right.reduce_sum().item()
            num_images += len(labels)
    if smp.rank() == 0:
        percent = 100 * num_right / num_images
        print(f"test loss {loss / num_images:.4f}, {num_right} of {num_images} images are read rightly, {percent:.1f} %", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--partition", choices=["auto", "manual"], default="auto")
    args, _ = parser.parse_known_args()

    smp.init({"microbatches": 4})
    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    images, labels = images[order], labels[order]
    share = slice(smp.dp_rank(), None, smp.dp_size())  # replicas get different images
    trained = TensorDataset(images[:NUM_TRAIN][share], labels[:NUM_TRAIN][share])
    generator = torch.Generator().manual_seed(args.seed)  # the same order on all ranks of a pipeline
    train_loader = DataLoader(trained, args.batch_size, shuffle=True, drop_last=True, generator=generator)
    test_loader = DataLoader(TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:]), 360)

    model = smp.DistributedModel(Net(args.partition == "manual"))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=args.lr))
    for epoch in range(1, args.epochs + 1):
        train(model, optimizer, train_loader, epoch)
        test(model, test_loader)


if __name__ == "__main__":
    main()
