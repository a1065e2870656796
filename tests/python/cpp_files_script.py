"""Takes turns with tests/mpi/resume.cpp, whose model, data and optimizers it has. Usage: FOLDER FIRST LAST OPTIMIZER."""

import sys

import torch
from torch import nn, optim

import smdistributed.modelparallel.torch as smp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens))
        hidden = self.dropout(self.norm(hidden.flatten(0, 1)))
        return self.head(torch.relu(self.dropout(self.middle(hidden))))


OPTIMIZERS = {
    "SGD": lambda all: optim.SGD(all, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "RMSprop": lambda all: optim.RMSprop(all, lr=0.01, momentum=0.9),
    "Adagrad": lambda all: optim.Adagrad(all, lr=0.1, lr_decay=0.01),
    "AdamW": lambda all: optim.AdamW(all, lr=0.01, amsgrad=True),
}


@smp.step
def train_step(model, tokens):
    loss = nn.functional.cross_entropy(model(tokens), tokens.flatten())
    model.backward(loss)
    return loss


def main(folder, first, last, kind):
    smp.init()
    torch.manual_seed(first)  # what is not loaded differs
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    if first > 0:
        for _ in range(first - 1):
            scheduler.step()
        assert smp.load_state(folder, model, optimizer=optimizer) == {"step": str(first)}
    for step in range(first, last):
        tokens = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(100 + step))
        optimizer.zero_grad()
        loss = train_step(model, tokens.chunk(smp.dp_size())[smp.dp_rank()]).reduce_mean()
        optimizer.step()
        if step > 0:  # LibTorch's StepLR lowers the rate one step later
            scheduler.step()
        loss = sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size()
        if smp.rank() == 0:
            print("loss", step, loss.item().hex())
    smp.save_state(folder, model, {"step": str(last)}, optimizer=optimizer)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
