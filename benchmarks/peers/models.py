"""The six models, each a list of layers so that a cut is an index; models.cpp has the same for smp.

make(name) -> (layers, x, y, loss): the full batch, and the loss of one microbatch.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn


class Embed(nn.Module):
    def __init__(self, vocabulary, width, length):
        super().__init__()
        self.width, self.table = width, nn.Embedding(vocabulary, width)
        at = torch.arange(length).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        positions = torch.zeros(1, length, width)
        positions[0, :, 0::2], positions[0, :, 1::2] = torch.sin(at * frequency), torch.cos(at * frequency)
        self.register_buffer("positions", positions)

    def forward(self, x):
        return self.table(x) * math.sqrt(self.width) + self.positions


class EncoderLayer(nn.Module):
    """One encoder layer with the causal mask of a language model."""

    def __init__(self, width, heads, hidden, length):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.2, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x):
        return self.body(x, src_mask=self.mask, is_causal=True)


class BasicBlock(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.b, self.norm_b = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        is_same = before == after and stride == 1
        self.skip = nn.Identity() if is_same else nn.Conv2d(before, after, 1, stride)

    def forward(self, x):
        return F.relu(self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))) + self.skip(x))


def tokens(vocabulary, batch, length):
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


def token_loss(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def language_model(width, heads, hidden, depth, batch=32, vocabulary=10000, length=35):
    layers = [Embed(vocabulary, width, length)]
    layers += [EncoderLayer(width, heads, hidden, length) for _ in range(depth)]
    return (layers + [nn.Linear(width, vocabulary)], *tokens(vocabulary, batch, length), token_loss)


def mlp(width, depth, batch):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return layers, torch.randn(batch, width), torch.randn(batch, width), F.mse_loss


def gpt2(width=256, heads=4, depth=8, batch=8, vocabulary=10000, length=128):
    from transformers import GPT2Config, GPT2LMHeadModel  # pip install transformers

    class Input(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.words, self.positions, self.drop = body.wte, body.wpe, body.drop

        def forward(self, x):
            return self.drop(self.words(x) + self.positions(torch.arange(x.shape[1])))

    class Block(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            out = self.block(x)
            return out[0] if isinstance(out, tuple) else out

    net = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=depth,
                                     n_head=heads, tie_word_embeddings=False, use_cache=False))
    body = net.transformer
    layers = [Input(body)] + [Block(block) for block in body.h] + [nn.Sequential(body.ln_f, net.lm_head)]
    return (layers, *tokens(vocabulary, batch, length), token_loss)


def resnet(width=32, batch=64):
    layers = [nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())]
    before = width
    for factor in (1, 1, 1, 2, 2, 2, 4, 4, 4):
        after = factor * width
        layers.append(BasicBlock(before, after, 1 if before == after else 2))
        before = after
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)))
    return layers, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)), F.cross_entropy


MODELS = {
    "lm-small": lambda: language_model(200, 4, 200, 2),
    "lm-medium": lambda: language_model(256, 4, 1024, 8),
    "mlp-tiny": lambda: mlp(64, 64, 256),
    "mlp-wide": lambda: mlp(512, 16, 512),
    "gpt2": gpt2,
    "resnet": resnet,
}


def make(name):
    torch.manual_seed(7)
    return MODELS[name]()
