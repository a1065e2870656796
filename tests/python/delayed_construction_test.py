"""What constructors do, under delay_param_initialization and without: the same values, bit for bit."""

import copy
import math
import unittest
import unittest.mock

import support
import torch
from support import made, tensors_of, without_memory
from torch import nn
from torch.nn.utils import parametrizations

import smdistributed.modelparallel.torch as smp


def setUpModule():
    smp.init({"log_level": "off"})


class Layers(nn.Module):
    """torch's, with what their constructors do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3), nn.GroupNorm(2, 4))
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.bag = nn.EmbeddingBag(7, 5)
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
        self.gru = nn.GRUCell(6, 5)
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.prelu = nn.PReLU(3)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1)
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True)
        self.copies = nn.ModuleList(copy.deepcopy(self.conv[1]) for _ in range(2))
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.double = nn.Linear(4, 4, dtype=torch.float64)
        self.channels_last = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        self.weight_norm = parametrizations.weight_norm(nn.Linear(5, 4))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(5, 4))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(5, 5))
        self.old_weight_norm = torch.nn.utils.weight_norm(nn.Linear(5, 4))
        self.old_spectral_norm = torch.nn.utils.spectral_norm(nn.Linear(5, 4))


class Initialisers(nn.Module):
    """torch.nn.init, on tensors and on parts of them."""

    def __init__(self):
        super().__init__()
        for number, (initialise, sizes) in enumerate((
            (lambda w: nn.init.uniform_(w, -1, 2), (7, 9)), (nn.init.normal_, (33,)), (nn.init.eye_, (4, 6)),
            (nn.init.dirac_, (4, 4, 3)), (nn.init.xavier_uniform_, (5, 6)), (nn.init.xavier_normal_, (5, 6)),
            (nn.init.kaiming_uniform_, (5, 6)), (nn.init.kaiming_normal_, (5, 6)), (nn.init.orthogonal_, (6, 5)),
            (lambda w: nn.init.trunc_normal_(w, std=0.02), (20, 30)), (lambda w: nn.init.sparse_(w, 0.5), (8, 5)),
            (lambda w: nn.init.normal_(w[1:3]), (5, 4)), (lambda w: nn.init.normal_(w.t()), (5, 40)),
            (lambda w: nn.init.uniform_(w[:, ::2]), (5, 6)), (lambda w: w.data[2].zero_(), (5, 4)),
        )):  # fmt: skip
            weight = nn.Parameter(torch.ones(sizes))
            initialise(weight)
            self.register_parameter(f"weight{number}", weight)


class Tricks(nn.Module):
    """What constructors do beside layers and initialisers."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(16, 8) * 0.02)
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1), persistent=False)
        self.register_buffer("literal", torch.tensor([0.5, 1.5]))
        self.register_buffer("scalar", torch.tensor(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.scaled  # tied
        self.replaced = nn.Linear(8, 4)
        self.replaced.weight.data = torch.randn(4, 8).mul_(2)
        self.replaced.bias.data.copy_(torch.arange(4.0))
        self.largest = self.scaled.abs().max().item()
        self.divided = nn.Parameter(torch.rand(6) / self.largest)
        self.listed = self.divided.tolist()
        self.from_list = nn.Parameter(torch.tensor(self.listed) + self.divided)
        self.from_array = nn.Parameter(torch.from_numpy(self.divided.detach().numpy().copy()))
        self.text = repr(self.divided)
        with torch.no_grad():
            self.scaled[3:5] = 1.0
            self.scaled[:, 0] += self.replaced.weight[0, 0]
            if self.scaled[0, 1] > 0 or torch.equal(self.scaled[0], self.scaled[1]):
                self.scaled[0, 2].fill_(9.0)
        order = torch.randperm(6)
        self.register_buffer("permuted", self.divided.detach()[order])
        own = torch.Generator().manual_seed(3)
        self.drawn = nn.Parameter(torch.empty(40).uniform_(generator=own))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.forked = nn.Parameter(torch.randn(3))
        self.taken_over = nn.Parameter(torch.zeros(2, 2))
        with torch.no_grad():
            self.taken_over.set_(torch.rand(5))
        self.legacy = nn.Parameter(torch.Tensor(4, 3).exponential_())
        self.out_of_place = nn.Parameter(torch.normal(0.0, torch.rand(5)))
        shared = torch.rand(4, 4)
        self.register_buffer("whole", shared)
        self.register_buffer("row", shared[1])
        self.again = copy.deepcopy(nn.ParameterList([self.drawn]))
        views = copy.deepcopy([shared[:2], shared[1]])
        self.register_buffer("copied", views[0])
        self.register_buffer("copied_row", views[1])
        views[0][1].zero_()
        self.unregistered = torch.rand(3)


class Construction(unittest.TestCase):
    def check(self, construct):
        plain, after = made(construct, False)
        module, after_delayed = made(construct, True)
        self.assertTrue(torch.equal(after, after_delayed), "the generator's end state")
        expected, delayed = tensors_of(plain), tensors_of(module)
        geometry = {name: (t.dtype, t.size(), t.stride(), t.device) for name, t in expected.items()}
        self.assertEqual({name: (t.dtype, t.size(), t.stride(), t.device) for name, t in delayed.items()}, geometry)
        self.assertEqual([p.requires_grad for p in module.parameters()], [p.requires_grad for p in plain.parameters()])
        smp.initialize_parameters(module)
        self.assertTrue(torch.equal(torch.get_rng_state(), after), "values are made without drawing")
        self.assertEqual(without_memory(module), set())
        support.same_bits(self, tensors_of(module), expected, construct)
        return plain, module

    @unittest.mock.patch("warnings.warn")  # the old weight_norm is deprecated
    def test_of_torchs_layers(self, _):
        self.check(Layers)

    def test_of_initialisers(self):
        self.check(Initialisers)

    def test_of_what_constructors_do(self):
        plain, module = self.check(Tricks)
        self.assertEqual((module.largest, module.listed, module.text), (plain.largest, plain.listed, plain.text))
        self.assertIs(module.head.weight, module.scaled)
        self.assertTrue(torch.equal(module.unregistered, plain.unregistered))
        for one, other in (("whole", "row"), ("copied", "copied_row")):
            self.assertEqual(
                getattr(module, one).untyped_storage().data_ptr(), getattr(module, other).untyped_storage().data_ptr()
            )

    def test_of_initialisation_that_the_script_has_replaced(self):
        with unittest.mock.patch.object(nn.Linear, "reset_parameters", lambda self: self.weight.data.normal_(2.0)):
            self.check(lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 3, bias=False)))

    def test_of_views_of_another_type(self):

        class Complex(nn.Module):
            def __init__(self):
                super().__init__()
                pairs = torch.rand(4, 2)
                self.register_buffer("pairs", pairs)
                self.register_buffer("numbers", torch.view_as_complex(pairs))
                for name, copied in zip("ab", copy.deepcopy([self.pairs, self.numbers]), strict=True):
                    self.register_buffer(name, copied)

        self.check(Complex)


if __name__ == "__main__":
    support.main()
