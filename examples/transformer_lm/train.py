"""Trains a transformer language model over all processes: main.cpp in Python, with the same losses but for rounding.

    python examples/transformer_lm/train.py --steps 20
    smp run -np 4 python examples/transformer_lm/train.py --steps 50
"""

import argparse
import math
import pathlib
import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

try:
    from tqdm import tqdm
except ImportError:  # no progress bar then

    def tqdm(batches, **_):
        return batches


LICENCES = pathlib.Path("/usr/share/common-licenses")  # which every Debian carries
UNKNOWN, END_OF_LINE = 0, 1


class TransformerLm(nn.Module):
    """Embedding, sinusoidal positions, encoder layers under a causal mask, linear decoder: [batch, T] -> [batch, T, vocab]."""

    def __init__(self, vocab, width, heads, hidden, layers, dropout, max_tokens):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        place = torch.arange(max_tokens).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        waves = torch.stack([torch.sin(place * rate), torch.cos(place * rate)], 2)
        self.register_buffer("position", waves.reshape(max_tokens, 1, width))
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, hidden, dropout) for _ in range(layers))
        self.decoder = nn.Linear(width, vocab)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens):
        length = tokens.shape[1]
        # The encoder layers want the tokens first: [T, batch, width].
        x = self.embedding(tokens.t()) * math.sqrt(self.embedding.embedding_dim)
        x = self.dropout(x + self.position[:length])
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.encoder:
            x = layer(x, causal)
        return self.decoder(x).transpose(0, 1)


def read_text(path):
    """The training, validation and test text: 90, 5 and 5 % of the file, or of each licence text, cut at ends of lines."""
    files = [path] if path else sorted(each for each in LICENCES.iterdir() if each.is_file() and not each.is_symlink())
    splits = [b"", b"", b""]
    for file in files:
        text = file.read_bytes()
        train = text.find(b"\n", len(text) // 10 * 9) + 1 or len(text)
        valid = text.find(b"\n", max(train, len(text) // 20 * 19)) + 1 or len(text)
        for i, part in enumerate((text[:train], text[train:valid], text[valid:])):
            splits[i] += part
    return splits


def lines_of(text):
    """The words and punctuation marks of each line that has some, in lower case."""
    text = text.replace(b"<br />", b" ").replace(b'"', b"").lower()
    lines = (re.findall(rb"['.,()!?]|[^\s'.,()!?:;]+", line) for line in text.split(b"\n"))
    return [words for words in lines if words]


def columns_of(path, batch_size):
    """Each text as `batch_size` columns of numbers, [tokens / batch_size, batch_size], and the number of words."""
    splits = [lines_of(text) for text in read_text(path)]
    frequency = Counter(word for line in splits[0] for word in line)
    ranking = sorted(frequency, key=lambda word: (-frequency[word], word))
    ids = {word: number for number, word in enumerate(ranking, END_OF_LINE + 1)}
    columns = []
    for lines in splits:
        tokens = [number for line in lines for number in (*(ids.get(word, UNKNOWN) for word in line), END_OF_LINE)]
        rows = len(tokens) // batch_size
        columns.append(torch.tensor(tokens[: rows * batch_size]).view(batch_size, rows).t())
    return columns, len(ids) + 2


def batches_of(columns, bptt):
    """Inputs and targets of at most `bptt` tokens per row; this replica's rows."""
    share = columns.shape[1] // smp.dp_size()
    mine = columns[:, smp.dp_rank() * share : (smp.dp_rank() + 1) * share]
    for first in range(0, len(mine) - 1, bptt):
        last = min(first + bptt, len(mine) - 1)
        yield mine[first:last].t().contiguous(), mine[first + 1 : last + 1].t().contiguous()


def token_loss(logits, target):
    return F.cross_entropy(logits.reshape(-1, logits.shape[2]), target.reshape(-1))


@smp.step
def train_step(model, tokens, target):
    loss = token_loss(model(tokens), target)
    model.backward(loss)
    return loss


@smp.step
def loss_step(model, tokens, target):
    return token_loss(model(tokens), target)


def mean_over_replicas(loss):
    return sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size()


def say(line):
    if smp.rank() == 0:
        print(line, flush=True)


def evaluate(model, columns, bptt):
    """The mean loss of a token, over all replicas."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for tokens, target in batches_of(columns, bptt):  # the last is shorter
            total += loss_step(model, tokens, target).reduce_mean().item() * tokens.shape[1]
    model.train()
    return mean_over_replicas(total / (len(columns) - 1))


def train(model, optimizer, scheduler, train_columns, valid_columns, args):
    """Keeps the weights of the epoch with the lowest validation loss: each rank its own, so none holds the whole model."""
    best_loss, best = math.inf, {}
    losses, step = [], 0
    for epoch in range(1, args.epochs + 1):
        batches = list(batches_of(train_columns, args.bptt))
        for batch, (tokens, target) in enumerate(tqdm(batches, disable=smp.rank() != 0, leave=False), 1):
            if step == args.steps:
                break
            step += 1
            optimizer.zero_grad()
            loss = train_step(model, tokens, target).reduce_mean()
            model.clip_grad_norm_(0.5)
            optimizer.step()
            losses.append(mean_over_replicas(loss.item()))
            if args.print_every and step % args.print_every == 0:
                mean, losses = sum(losses) / len(losses), []
                rate = scheduler.get_last_lr()[0]
                place = f"epoch {epoch} | {batch}/{len(batches)} | lr {rate:.3g}"
                say(f"{place} | loss {mean:.3f} | perplexity {math.exp(mean):.1f}")
        scheduler.step()
        if not args.no_evaluation:
            loss = evaluate(model, valid_columns, args.bptt)
            say(f"epoch {epoch} | valid loss {loss:.3f} | valid perplexity {math.exp(loss):.1f}")
            if loss < best_loss:
                best_loss = loss
                best = {name: each.detach().clone() for name, each in model.local_named_parameters()}
        if step == args.steps:
            break
    with torch.no_grad():
        for name, parameter in model.local_named_parameters():
            parameter.copy_(best.get(name, parameter))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=None, help="training ends after so many")
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--batch-size", type=int, default=16, help="of all replicas together")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=pathlib.Path, help="a text file; without it, the licence texts of Debian")
    parser.add_argument("--bptt", type=int, default=32, help="tokens per row of a batch")
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=800)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--print-every", type=int, default=20, help="steps between lines; 0: none")
    parser.add_argument("--no-evaluation", action="store_true")
    return parser.parse_known_args()[0]


def main():
    args = parse()
    smp.init({"microbatches": args.microbatches, "seed": args.seed})
    (train_columns, valid_columns, test_columns), vocab = columns_of(args.data, args.batch_size)
    torch.manual_seed(args.seed)
    net = TransformerLm(vocab, args.width, args.heads, args.hidden, args.layers, args.dropout, args.bptt)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=args.lr))
    # LibTorch's StepLR, which main.cpp has, lowers the rate from its second call on only.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epochs: 0.95 ** max(epochs - 1, 0))
    train(model, optimizer, scheduler, train_columns, valid_columns, args)
    if not args.no_evaluation:
        loss = evaluate(model, test_columns, args.bptt)
        say(f"test loss {loss:.3f} | test perplexity {math.exp(loss):.1f}")


if __name__ == "__main__":
    main()
