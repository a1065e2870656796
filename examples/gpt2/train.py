"""Trains GPT-2 of transformers from scratch, on the documentation that Python carries: a tokenizer first, then the model.

    python examples/gpt2/train.py --steps 20
    smp run -np 4 python examples/gpt2/train.py
"""

import argparse
import itertools
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


@smp.step
def test_step(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def tokenized(vocab, length):
    """The text as rows of `length` tokens, [rows, length]."""
    texts = [topics[name] for name in sorted(topics)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab, special_tokens=["<|endoftext|>"], show_progress=False)
    tokens = tokenizer.encode("<|endoftext|>".join(texts)).ids
    rows = len(tokens) // length
    return torch.tensor(tokens[: rows * length]).view(rows, length)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--print-every", type=int, default=20)
    args, _ = parser.parse_known_args()

    # The embedding is the decoder too. Where they are on two stages, losses are those of one process all the same, to the bit.
    smp.init({"microbatches": 4, "seed": args.seed})
    rows = tokenized(args.vocab, args.length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed))
    test_rows, train_rows = rows[order[: args.batch_size]], rows[order[args.batch_size :]]
    share = train_rows[smp.dp_rank() :: smp.dp_size()]  # replicas get different rows
    generator = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(share, args.batch_size, shuffle=True, drop_last=True, generator=generator)

    torch.manual_seed(args.seed)
    config = GPT2Config(vocab_size=args.vocab, n_positions=args.length, n_embd=args.width, n_layer=args.layers, n_head=4)
    model = smp.DistributedModel(GPT2LMHeadModel(config))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))
    model.train()
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), args.steps)  # epoch after epoch
    losses = []
    for step, tokens in enumerate(tqdm(batches, total=args.steps, disable=smp.rank() != 0, leave=False), 1):
        optimizer.zero_grad()
        losses.append(train_step(model, tokens).reduce_mean().item())
        optimizer.step()
        if step % args.print_every == 0 and smp.rank() == 0:
            print(f"step {step} | loss {sum(losses) / len(losses):.4f}", flush=True)
            losses.clear()

    model.eval()
    with torch.no_grad():
        loss = test_step(model, test_rows).reduce_mean()
    if smp.rank() == 0:
        print(f"test loss {loss.item():.4f}, perplexity {loss.exp().item():.1f}", flush=True)


if __name__ == "__main__":
    main()
