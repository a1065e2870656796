"""The first step of a job imports nothing: torch's own meta kernels for Python load 870 modules, seconds on every rank."""

import sys
import unittest

import support
import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp


class Net(nn.Module):
    """Of the operators whose sizes torch in Python finds by its own functions, some of each kind."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(11, 16)
        self.convolutions = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2))
        self.upsample = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, stride=2), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(4))
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.lstm = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Hardtanh(), nn.Linear(16, 5), nn.Dropout(0.1))

    def forward(self, images, tokens):
        image = self.upsample(self.convolutions(images)).flatten(2)
        rows = self.attention(torch.cat([image, self.embedding(tokens).unsqueeze(1)], 1))
        rows, _ = self.lstm(rows.masked_fill(rows.abs() > 9, 0.0))
        rows = torch.where(rows > 0, rows, rows.exp() - 1).clamp(-4, 4).roll(1, 1)
        top = rows.topk(3, 1).values + rows.cumsum(1)[:, :3] + F.pad(rows, (0, 0, 1, 0))[:, :3]
        return self.head((top / top.norm(dim=-1, keepdim=True)).mean(1))


class FirstStep(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})
        torch.manual_seed(0)

    def test_imports_nothing(self):
        model = smp.DistributedModel(Net())

        @smp.step
        def train_step(model, images, tokens, labels):
            loss = F.cross_entropy(model(images, tokens), labels)
            model.backward(loss)
            return loss

        labels = torch.arange(16) % 5
        batch = (torch.randn(16, 1, 8, 8), torch.arange(48).reshape(16, 3) % 11, labels)
        before = set(sys.modules)
        train_step(model, *batch)
        self.assertEqual(sorted(set(sys.modules) - before), [])

    def test_knows_sizes_that_no_value_decides(self):
        def loss_of(model, x, y):
            rows = torch.segment_reduce(model(x), "sum", lengths=y[:2].abs().clamp(2, 2), axis=0)
            return (rows * torch.linspace(y[0], y[1], 3) + torch.logspace(y[0].float(), 1, 3)).sum()

        @smp.step
        def train_step(model, x, y):
            loss = loss_of(model, x, y)
            model.backward(loss)
            return loss

        net, plain = nn.Linear(6, 3), nn.Linear(6, 3)
        plain.load_state_dict(net.state_dict())
        batch = support.batch(), torch.arange(16)
        ours = train_step(smp.DistributedModel(net), *batch).outputs
        support.same_bits(self, ours, support.plain_step(plain, loss_of, *batch), "losses")
        support.same_bits(self, [net.weight.grad], [plain.weight.grad], "gradient")


if __name__ == "__main__":
    support.main()
