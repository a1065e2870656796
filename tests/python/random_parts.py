"""Parts of random training programs: what people write in modules and in bodies of steps."""

import collections
import contextlib
import copy
import functools
import itertools
import math

import numpy
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations

WIDTH = 8

Pair = collections.namedtuple("Pair", "first second")


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return -gradient * ctx.saved_tensors[0].sign()


class ViewOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        index = x.argmax(1, keepdim=True)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(y)
        return x + y, index

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient, gradient * ctx.saved_tensors[0]


class Block(nn.Module):
    """With a dictionary, more arguments and keywords."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, held, *more, scale=1.0, **rest):
        self.calls += 1
        h = self.linear(held["h"]) * scale
        for other in more:
            h = h + other * 0.1
        return Pair(h, {"extra": sum(rest.values())})


class Net(nn.Module):
    """Linear layers with the parts of a program between them, which find x, y and tokens of the call here."""

    def __init__(self, parts, hooks):
        super().__init__()
        self.parts = parts
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.block, self.norm, self.layer_norm = Block(), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.embedding = nn.Embedding(10, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(10, WIDTH, mode="mean")
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gru, self.lstm = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.LSTMCell(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.linears[1].weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.experts = nn.ParameterDict({name: torch.randn(WIDTH, WIDTH) * 0.3 for name in "ab"})
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril(), persistent=False)
        self.kept, self.count, self.table = None, 0, torch.linspace(-1, 1, WIDTH)
        for name in hooks:
            HOOKS[name](self)

    def forward(self, x, y, tokens):
        self.x, self.y, self.tokens = x, y, tokens
        h = self.linears[0](x)
        for name in self.parts:
            h = FORWARD[name](self, h)
        del self.x, self.y, self.tokens
        return self.linears[3](h)

    def counted(self, *_):
        self.count += 1


HOOKS = {
    "scaled output": lambda net: net.linears[0].register_forward_hook(lambda module, args, output: output * 0.5),
    "scaled input": lambda net: net.linears[3].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
    "keywords": lambda net: net.layer_norm.register_forward_hook(lambda m, args, kwargs, output: output + 0.1, with_kwargs=True),
    "counted": lambda net: net.linears[1].register_forward_hook(net.counted),
}


def like(h, x):  # any shape in that of h
    return h + 0.1 * x.mean()


FORWARD = {
    # modules
    "linear": lambda net, h: F.gelu(net.linears[2](h)),
    "relu in place": lambda net, h: F.relu(net.linears[1](h), inplace=True),
    "twice": lambda net, h: net.linears[1](torch.tanh(net.linears[1](h))),
    "batch norm": lambda net, h: net.norm(h),
    "batch norm twice": lambda net, h: net.norm(net.norm(h) + net.y),
    "layer norm": lambda net, h: net.layer_norm(h),
    "embedding": lambda net, h: h + net.embedding(net.tokens),
    "embedding of largest norm": lambda net, h: h + F.embedding(net.tokens, net.embedding.weight, max_norm=1.0),
    "bag": lambda net, h: h * net.bag(net.tokens.unsqueeze(1)),
    "attention": lambda net, h: net.attention(*[h.unsqueeze(1).expand(-1, 3, -1)] * 3, need_weights=False)[0].mean(1),
    "sdpa": lambda net, h: F.scaled_dot_product_attention(h[None, None], net.y[None, None], h[None, None], is_causal=True)[0, 0],
    "transformer": lambda net, h: net.layer(
        h.unsqueeze(0), is_causal=True, src_mask=nn.Transformer.generate_square_subsequent_mask(len(h))
    ).squeeze(0),
    "gru": lambda net, h: net.gru(h.unsqueeze(0))[0].squeeze(0),
    "convolution": lambda net, h: net.convolution(h.unsqueeze(1)).amax(1),
    "weight norm": lambda net, h: net.normed(h).tanh(),
    "tied": lambda net, h: torch.tanh(net.tied(h)),
    "parameters of a dict": lambda net, h: sum(h @ weight for weight in net.experts.values()) * net.scale,
    "frozen": lambda net, h: torch.sigmoid(net.frozen(h)) * h,
    "masked weight": lambda net, h: h @ (net.mask * net.linears[1].weight),
    "slices of a weight": lambda net, h: (
        F.linear(h[:, :4], net.linears[2].weight[:, :4]) + h @ net.linears[2].weight[:4].T.mean(1, keepdim=True)
    ),
    "stacked weights": lambda net, h: torch.einsum("bi,eij->bej", h, torch.stack([l.weight for l in net.linears])).mean(1),
    "functional_call": lambda net, h: torch.func.functional_call(
        net.linears[2], {name: value * 0.5 for name, value in net.linears[2].named_parameters()}, (h,)
    ),
    "checkpoint": lambda net, h: torch.utils.checkpoint.checkpoint(lambda z: net.linears[2](z).tanh(), h, use_reentrant=False),
    "copy of a module": lambda net, h: copy.deepcopy(net.linears[1])(h) + net.linears[1](h),
    "module of its own": lambda net, h: nn.LayerNorm(WIDTH)(h),
    # functions
    "reverse": lambda net, h: Reverse.apply(h),
    "reverse of a parameter": lambda net, h: h * Reverse.apply(net.scale),
    "view function": lambda net, h: ViewOf.apply(h),
    "two results": lambda net, h: sum(part * scale for part, scale in zip(Two.apply(h, net.y), (1, 0.01), strict=True)),
    "vmap": lambda net, h: torch.vmap(lambda row: row * row.sum())(h),
    "func.grad": lambda net, h: h + 0.1 * torch.func.grad(lambda z: z.pow(3).sum())(h),
    "partial": lambda net, h: functools.partial(torch.add, alpha=0.5, other=net.y)(h).tanh(),
    # values
    "item": lambda net, h: h * (1 + 0.1 * math.tanh(h.mean().item())),
    "largest": lambda net, h: h / max(1.0, float(h.detach().abs().max())),
    "norm of a weight": lambda net, h: h / max(1.0, net.linears[1].weight.norm().item()),
    "expert by value": lambda net, h: h @ net.experts["a" if h.mean() > 0 else "b"],
    "branch": lambda net, h: h.clamp(max=1) if (h > 1).any() else h,
    "not": lambda net, h: h if not (h[0, 0] > 0) else -h,
    "two compared": lambda net, h: h * 2 if h.max() > net.y.min() else h * 3,
    "allclose": lambda net, h: h * 2 if torch.allclose(h, torch.zeros(WIDTH), atol=5.0) else h,
    "equal": lambda net, h: h if torch.equal(h, net.y) else h - net.y,
    "buffer read": lambda net, h: h * 0.5 if net.steps.item() % 2 else h,
    "numpy": lambda net, h: h[:, numpy.argsort(h.detach().numpy()[0]).copy()],
    "numpy and back": lambda net, h: h + torch.from_numpy(numpy.tanh(h.detach().cpu().numpy())),
    "asarray": lambda net, h: h + torch.as_tensor(numpy.asarray(h.detach())).flip(0),
    "tolist": lambda net, h: h * torch.tensor([1 + token % 3 for token in net.tokens.tolist()]).unsqueeze(1),
    "index by a value": lambda net, h: h + h[:, int(h[0].argmax())].unsqueeze(1) + h[:, h[0].argmin()].unsqueeze(1),
    "slice by a tensor": lambda net, h: like(h, h[:, : net.tokens[0] % 3 + 1]),
    "sorted list": lambda net, h: torch.stack(sorted(h.unbind(0), key=lambda row: row.norm().item())),
    "as many as there are": lambda net, h: h + h[h > 0].sum() * 0.01,
    # shapes and dtypes
    "einsum": lambda net, h: torch.einsum("bi,ij,bj->bi", h, net.linears[2].weight, net.y),
    "where": lambda net, h: torch.where(h > 0, h, net.table * h),
    "rows": lambda net, h: torch.stack([row * (i + 1) for i, row in enumerate(h)]),
    "columns": lambda net, h: torch.stack([a - b for a, b in itertools.pairwise(h.unbind(1))] + [h[:, 0]], dim=-1),
    "lists as indices": lambda net, h: like(h, h[[0, 1], [2, 3]]) + like(h, h[:, [1, 2, 1]]) + h[None, ..., None][0, :, :, 0],
    "float64": lambda net, h: (h.double() @ net.linears[1].weight.double().t()).to(h.dtype),
    "bfloat16": lambda net, h: F.linear(h.bfloat16(), net.linears[2].weight.bfloat16()).to(h),
    "integers and back": lambda net, h: h + h.to(torch.int32).to(h.dtype) + h.half().float() + h.long().bool().float(),
    "complex": lambda net, h: torch.fft.ifft(torch.fft.fft(h) * torch.exp(1j * net.table)).real,
    "straight through": lambda net, h: h + (h.round() - h).detach(),
    "sort": lambda net, h: h.sort(dim=1, descending=True)[0] + h.gather(1, h.argsort(1)),
    "topk": lambda net, h: torch.zeros_like(h).scatter(1, h.topk(3, dim=1)[1], h.topk(3, dim=1)[0].softmax(1)),
    "one hot": lambda net, h: h + F.one_hot(net.tokens, 10).float() @ net.embedding.weight,
    "pad": lambda net, h: F.pad(h, (1, 1))[:, 1:-1].roll(1, 0).flip(1),
    "as_strided": lambda net, h: h.t().contiguous().view(-1)[: h.numel()].as_strided(h.shape, (1, len(h))) * 2,
    "split": lambda net, h: torch.cat(h.split([2, 4, 2], dim=1)[::-1], 1),
    "cumulated": lambda net, h: h.cumsum(1) / torch.arange(1, WIDTH + 1) + h.cummax(1).values + h.logcumsumexp(0),
    "deviation": lambda net, h: F.normalize(h, dim=1) + h.std(1, keepdim=True) + h.var(dim=0),
    "inverse": lambda net, h: h @ torch.linalg.inv(h.t() @ h + torch.eye(WIDTH)),
    "eigenvalues": lambda net, h: like(h, torch.linalg.eigvalsh(h.t() @ h)) + like(h, torch.linalg.svdvals(h)),
    "foreach": lambda net, h: torch.cat(torch._foreach_mul(list(h.split(2, 1)), [0.5, 1.0, 1.5, 2.0]), 1),
    "index_put accumulated": lambda net, h: h.index_put((net.tokens.clamp(max=1),), net.y, accumulate=True),
    "reduced by tokens": lambda net, h: h.scatter_reduce(0, net.tokens.clamp(max=1)[:, None].expand(-1, WIDTH), net.y, "amax"),
    "losses": lambda net, h: (
        like(h, F.kl_div(h.log_softmax(1), net.y.softmax(1), reduction="batchmean"))
        + like(h, F.nll_loss(h.log_softmax(1), net.tokens.clamp(max=7), ignore_index=3))
        + like(h, F.binary_cross_entropy_with_logits(h, (net.y > 0).float(), pos_weight=torch.full((WIDTH,), 2.0)))
    ),
    "new tensors": lambda net, h: h + h.new_tensor([1.0]) + h.new_zeros(WIDTH).fill_(0.5) + torch.full_like(h, 0.1),
    "constants": lambda net, h: h * torch.tensor([0.1 * i for i in range(WIDTH)]) + torch.as_tensor(numpy.ones(WIDTH, "float32")),
    "by the mode": lambda net, h: h * 2 if net.training else h,
    "by its history": lambda net, h: h * 2 if h.requires_grad and not h.is_leaf and h.grad_fn is not None else h,
}


def forward_part(function):
    FORWARD[function.__name__.replace("_", " ")] = function
    return function


@forward_part
def written_slices(net, h):
    h = h.clone()
    h[:, 1:3] = net.y[:, :2] * 2
    h[:, -1] *= 0.5
    h[0] = 0.25
    h[h < 0] = 0.1
    h[[0, 1]] = h[[1, 0]]
    return h


@forward_part
def written_through_views(net, h):
    h = h * 1
    view = h.view(-1).view(len(h), 2, 4)[:, 1].t()
    view[0] = 0.1
    view += 1
    for row in h.unbind(0):
        row.detach().mul_(0.5)
    return h


@forward_part
def written_argument(net, h):
    h = h + net.y
    net.y.mul_(0.5)
    return h + net.y


@forward_part
def block(net, h):
    pair = net.block({"h": h}, net.y, h, scale=0.5, a=h, b=net.y)
    return pair.first + pair.second["extra"] * 0.1


@forward_part
def lstm_cell(net, h):
    state = None
    for part in (h, net.y, h * 0.5):
        state = net.lstm(part, state)
    return state[0]


@forward_part
def function_without_gradient(net, h):
    with torch.no_grad():
        gate = Reverse.apply(h)
    return h * gate.sigmoid()


@forward_part
def loop_on_a_value(net, h):
    n = 0
    while h.norm() > 3 and n < 5:
        h, n = h * 0.5, n + 1
    return h


@forward_part
def text_of_a_value(net, h):
    assert torch.isfinite(h).all() and f"{h.sum():.3f}" and repr(h)
    return h


@forward_part
def autocast_within(net, h):
    with torch.autocast("cpu", torch.bfloat16):
        h = net.linears[1](h)
    return h.float()


@forward_part
def modes_within_modes(net, h):
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.no_grad())
        modes.enter_context(torch.autocast("cpu", torch.bfloat16))
        gate = net.linears[1](h)
        with torch.enable_grad():
            k = net.linears[2](h)
    return h * gate.float().sigmoid() + k.float()


@forward_part
def running_mean(net, h):
    with torch.no_grad():
        net.running.lerp_(h.mean(0), 0.1)
        net.steps += 1
    return h - net.running


@forward_part
def smallest_so_far(net, h):
    with torch.no_grad():
        torch.minimum(net.running, h.amin(0), out=net.running)
    return h - net.running


@forward_part
def buffer_used_then_written(net, h):
    scale = net.running
    h = h + scale
    net.running.add_(1)
    return h * scale


@forward_part
def ring_of_rows(net, h):
    with torch.no_grad():
        net.mask[:-1] = net.mask[1:].clone()
        net.mask[-1] = h.mean(0)
    return h @ net.mask * 0.1


@forward_part
def moving_average_of_weights(net, h):
    with torch.no_grad():
        for slow, fast in zip(net.frozen.parameters(), net.linears[2].parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
    return h + net.frozen(h)


@forward_part
def clamped_weight(net, h):
    with torch.no_grad():
        net.linears[2].weight.clamp_(-0.3, 0.3)
    return net.linears[2](h)


@forward_part
def data_of_a_weight(net, h):
    net.scale.data.mul_(0.99)
    return h * net.scale


@forward_part
def evaluation_within(net, h):
    net.norm.eval()
    try:
        return net.norm(h)
    finally:
        net.norm.train(net.training)


@forward_part
def shapes_tried(net, h):
    for view in (lambda: h @ net.y, lambda: h.view(3, -1, 7), lambda: h[:, 99]):
        try:
            return view()
        except (RuntimeError, IndexError):
            h = h * 1.1
    return h


@forward_part
def sum_read_in_inference_mode(net, h):
    with torch.inference_mode():
        mean = h.mean().item()
    return h - mean


@forward_part
def counted(net, h):
    net.count += 1
    return h * (1 + 0.1 * (net.count % 3))


@forward_part
def activation_kept(net, h):
    previous, net.kept = net.kept, h.detach()
    return h if previous is None else h + 0.1 * previous.mean()


@forward_part
def freezing_now_and_then(net, h):
    net.count += 1
    net.linears[1].weight.requires_grad_(net.count % 2 == 1)
    return net.linears[1](h)
