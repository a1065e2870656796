"""Trains BERT of transformers from scratch: masked words in the documentation that Python carries, with padding.

    python examples/bert/train.py --steps 20
    smp run -np 4 python examples/bert/train.py
"""

import argparse
import itertools
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


@smp.step
def test_step(model, batch):
    output = model(**batch)
    chosen = batch["labels"] != -100
    return (output.logits.argmax(2).eq(batch["labels"]) & chosen).sum(), chosen.sum()


PAD, MASK = 0, 1


def tokenized(vocab, length):
    """The paragraphs, each one row, padded or cut to `length` tokens."""
    paragraphs = [each for name in sorted(topics) for each in topics[name].split("\n\n") if len(each) > 80]
    tokenizer = ByteLevelBPETokenizer()  # trains to the same words on every rank, which BERT's WordPiece does not
    tokenizer.train_from_iterator(paragraphs, vocab_size=vocab, special_tokens=["[PAD]", "[MASK]"], show_progress=False)
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(pad_id=PAD, pad_token="[PAD]", length=length)
    return torch.tensor([each.ids for each in tokenizer.encode_batch(paragraphs)])


def masked(rows, generator):
    """What the model gets: for 15 % of the words it sees [MASK], and is to say what stood there."""
    chosen = (rows != PAD) & (torch.rand(rows.shape, generator=generator) < 0.15)
    return {
        "input_ids": rows.masked_fill(chosen, MASK),
        "attention_mask": (rows != PAD).long(),
        "labels": rows.masked_fill(~chosen, -100),  # -100: no loss there
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens of a paragraph")
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--print-every", type=int, default=20)
    args, _ = parser.parse_known_args()

    # The embedding is the decoder too. Where they are on two stages, losses are those of one process all the same, to the bit.
    smp.init({"microbatches": 4, "seed": args.seed})
    rows = tokenized(args.vocab, args.length)
    generator = torch.Generator().manual_seed(args.seed)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    num_test = 4 * args.batch_size
    test_batch = masked(rows[:num_test], generator)
    share = rows[num_test:][smp.dp_rank() :: smp.dp_size()]  # replicas get different rows
    loader = DataLoader(share, args.batch_size, shuffle=True, drop_last=True, generator=generator)

    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        intermediate_size=4 * args.width,
        max_position_embeddings=args.length,
    )
    model = smp.DistributedModel(BertForMaskedLM(config))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))
    model.train()
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), args.steps)  # epoch after epoch
    losses = []
    for step, batch in enumerate(tqdm(batches, total=args.steps, disable=smp.rank() != 0, leave=False), 1):
        optimizer.zero_grad()
        losses.append(train_step(model, masked(batch, generator)).reduce_mean().item())
        optimizer.step()
        if step % args.print_every == 0 and smp.rank() == 0:
            print(f"step {step} | loss {sum(losses) / len(losses):.4f}", flush=True)
            losses.clear()

    model.eval()
    with torch.no_grad():
        num_right, num_words = (each.reduce_sum().item() for each in test_step(model, test_batch))
    if smp.rank() == 0:
        print(f"{num_right} of {num_words} masked words are found, {100 * num_right / num_words:.1f} %", flush=True)


if __name__ == "__main__":
    main()
