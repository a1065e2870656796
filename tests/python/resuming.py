"""Trains some of six steps and leaves in a folder what came of it.

whole: all of them; first: three, then checkpoints; partial,full: twice those that are left, from a checkpoint of each kind.
"""

import os

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

STEPS = 6


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 12), nn.Dropout(0.3),
        nn.Linear(12, 3),
    )  # fmt: skip


@smp.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


class Training:
    def __init__(self):
        self.model = smp.DistributedModel(make_net())
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.05))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.losses = []

    def run(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + smp.dp_rank())
            self.optimizer.zero_grad()
            self.losses += train_step(self.model, torch.randn(16, 6, generator=generator)).outputs
            self.optimizer.step()
            self.scheduler.step()

    def save(self, folder):
        objects = {"model": self.model, "optimizer": self.optimizer}
        content = {"step": STEPS // 2, "scheduler": self.scheduler.state_dict()}
        smp.save_checkpoint(folder, tag="partial", user_content=content, **objects)
        smp.save_checkpoint(folder, tag="full", partial=False, user_content=content, **objects)
        state = self.optimizer.state_dict()
        if smp.rank() == 0:
            smp.save(state, os.path.join(folder, "optimizer.pt"), partial=False)

    def resume(self, folder, tag):
        objects = {"model": self.model, "optimizer": self.optimizer}
        content = smp.resume_from_checkpoint(folder, tag=tag, partial=tag == "partial", **objects)
        if tag == "full":
            self.optimizer.load_state_dict(smp.load(os.path.join(folder, "optimizer.pt"), partial=False))
        self.scheduler.load_state_dict(content["scheduler"])
        self.run(content["step"], STEPS)

    def leave(self, path):
        state = {"losses": self.losses[-4 * STEPS // 2 :], "model": self.model.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "rates": self.scheduler.state_dict()}
        if smp.rank() == 0:
            torch.save(state, path)


def main(action, folder):
    smp.init({"microbatches": 4, "ddp": True, "log_level": "off"})
    if action == "whole":
        training = Training()
        training.run(0, STEPS)
        training.leave(os.path.join(folder, "whole.pt"))
    elif action == "first":
        training = Training()
        training.run(0, STEPS // 2)
        training.save(folder)
    else:
        for tag in action.split(","):
            training = Training()
            training.resume(folder, tag)
            training.leave(os.path.join(folder, f"{tag}.pt"))
