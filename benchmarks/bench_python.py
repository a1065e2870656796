"""What the engine gains and costs under Python, on one process and one thread, each against plain torch in turns.

python bench_python.py [MEASURE]

Prints "name value unit" and the raw figures, as the programs beside it do. The models are transformers', built from
configurations.
"""
import os
import statistics
import sys
import time
import warnings

import torch
import transformers

import smdistributed.modelparallel.torch as smp

ROUNDS, WARM_UP = 21, 3
MICROBATCHES = 4
now = time.perf_counter


def report(name, value, unit, **raw):
    print(f"{name} {value:.4g} {unit} ({', '.join(f'{key} {figure:.4g}' for key, figure in raw.items())})", flush=True)


def compare(first, second):
    """Seconds of a call of each, medians over rounds in which both take turns, and the median of the rounds' ratios."""
    pairs = []
    for round_ in range(-2, ROUNDS):  # two before them do not count
        times = {}
        for work in (first, second) if round_ % 2 else (second, first):
            begin = now()
            work()
            times[work] = now() - begin
        if round_ >= 0:
            pairs.append((times[first], times[second]))
    return (*(statistics.median(column) for column in zip(*pairs)), statistics.median(a / b for a, b in pairs))


def gpt2(layers, width, length):
    config = transformers.GPT2Config(vocab_size=200, n_positions=length, n_embd=width, n_layer=layers, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def bert(layers, width, length):
    config = transformers.BertConfig(vocab_size=200, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
                                     intermediate_size=4 * width, max_position_embeddings=length)
    return transformers.BertForMaskedLM(config)


def llama(layers, width, length):
    config = transformers.LlamaConfig(vocab_size=200, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
                                      intermediate_size=4 * width, max_position_embeddings=length)
    return transformers.LlamaForCausalLM(config)


def make(build, *size, rows):
    torch.manual_seed(1)
    model = build(*size)
    return model, torch.randint(200, (rows, size[-1]))


@smp.step
def train_step(model, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


def plain_step(model, tokens):
    """The loop that accumulates the same microbatches."""
    losses = []
    for part in tokens.chunk(MICROBATCHES):
        loss = model(input_ids=part, labels=part).loss
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return losses


def require_same(name, build, size, rows):
    """Without dropout: losses and gradients of the taped step are those of the plain loop, to the bit."""
    (plain, tokens), (wrapped, _) = make(build, *size, rows=rows), make(build, *size, rows=rows)
    wrapped = smp.DistributedModel(wrapped)
    plain.eval(), wrapped.eval()
    for _ in range(WARM_UP):
        plain.zero_grad(), wrapped.zero_grad()
        wanted, got = plain_step(plain, tokens), train_step(wrapped, tokens)
    pairs = [*zip(wanted, got), *((a.grad, b.grad) for a, b in zip(plain.parameters(), wrapped.parameters()))]
    if not all(torch.equal(a, b) for a, b in pairs):
        raise SystemExit(f"{name}: expected the losses and gradients of the plain loop, got others")


def tape_vs_eager(name, build, *size, rows=2):
    rows *= MICROBATCHES
    require_same(name, build, size, rows)
    model, tokens = make(build, *size, rows=rows)
    compiled_model, _ = make(build, *size, rows=rows)
    compiled_model = torch.compile(compiled_model)
    wrapped = smp.DistributedModel(make(build, *size, rows=rows)[0])
    for step, net in ((train_step, wrapped), (plain_step, compiled_model)):
        for _ in range(WARM_UP):
            step(net, tokens)
    eager, taped, ratio = compare(lambda: plain_step(model, tokens), lambda: train_step(wrapped, tokens))
    _, compiled, of_compiled = compare(lambda: plain_step(model, tokens), lambda: plain_step(compiled_model, tokens))
    report(name, ratio, "x", **{"eager ms": eager * 1e3, "tape ms": taped * 1e3, "torch.compile ms": compiled * 1e3,
                                "torch.compile x": of_compiled})


def gpt2_of_12_layers():
    return make(gpt2, 12, 64, 8, rows=2 * MICROBATCHES)


def body_us(name):
    """The leader's Python per microbatch: model, loss and backward, matched against the recording."""
    model, tokens = gpt2_of_12_layers()
    wrapped = smp.DistributedModel(model)
    spent = []

    @smp.step
    def timed(model, tokens):
        begin = now()
        loss = model(input_ids=tokens, labels=tokens).loss
        model.backward(loss)
        spent.append(now() - begin)
        return loss

    for _ in range(WARM_UP + ROUNDS):
        timed(wrapped, tokens)
    report(name, statistics.median(spent[WARM_UP * MICROBATCHES:]) * 1e6, "us")


def match_vs_eager(name):
    """A forward that is matched against its recording, by the bodies of a step, over one that computes."""
    model, tokens = gpt2_of_12_layers()
    wrapped = smp.DistributedModel(gpt2_of_12_layers()[0])
    parts = tokens.chunk(MICROBATCHES)
    matched = []

    @smp.step
    def forward(model, tokens):
        begin = now()
        loss = model(input_ids=tokens, labels=tokens).loss
        matched.append(now() - begin)
        model.backward(loss)
        return loss

    def eager():
        begin = now()
        for part in parts:
            model(input_ids=part, labels=part)
        return (now() - begin) / MICROBATCHES

    for _ in range(WARM_UP):
        forward(wrapped, tokens), eager()
    rounds = []
    for _ in range(ROUNDS):
        matched.clear()
        forward(wrapped, tokens)
        rounds.append((statistics.fmean(matched), eager()))
    of_match, of_eager = (statistics.median(column) * 1e6 for column in zip(*rounds))
    report(name, statistics.median(a / b for a, b in rounds), "x", **{"matched us": of_match, "eager us": of_eager})


def first_step(name):
    """Capture, plan and distribution of GPT-2 with 12 layers of its own width, and the step itself."""
    model, tokens = make(gpt2, 12, 768, 16, rows=MICROBATCHES)
    begin = now()
    train_step(smp.DistributedModel(model), tokens)
    report(name, now() - begin, "s")


MEASURES = {
    "tape_vs_eager_py_gpt2_64": lambda name: tape_vs_eager(name, gpt2, 4, 64, 16),
    "tape_vs_eager_py_bert_64": lambda name: tape_vs_eager(name, bert, 4, 64, 16),
    "tape_vs_eager_py_llama_64": lambda name: tape_vs_eager(name, llama, 4, 64, 16),
    "tape_vs_eager_py_gpt2_256": lambda name: tape_vs_eager(name, gpt2, 8, 256, 128, rows=1),
    "body_us": body_us,
    "match_vs_eager_gpt2": match_vs_eager,
    "first_step_gpt2_s": first_step,
}


def main():
    wanted = sys.argv[1:] or list(MEASURES)
    unknown = sorted(set(wanted) - set(MEASURES))
    if unknown:
        raise SystemExit(f"bench_python.py: expected some of {', '.join(MEASURES)}, got {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(1)
    smp.init({"microbatches": MICROBATCHES, "log_level": "off"})
    for name in wanted:
        MEASURES[name](name)


if __name__ == "__main__":
    main()
