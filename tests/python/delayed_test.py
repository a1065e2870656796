"""Models made under delay_param_initialization: each rank has the values of an ordinary construction that live there, and no
others."""

import copy
import gc
import io
import pathlib
import threading
import unittest

import support
import torch
from support import made, tensors_of, without_memory
from torch import nn
from torch.nn.utils import parametrizations

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import _engine


def setUpModule():
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off", "delayed_parameter_initialization": True})


def local_names(model):
    return {name for each in (model.local_named_parameters, model.local_named_buffers) for name, _ in each()}


LITERALS = {"norm.num_batches_tracked"}  # torch.tensor(0): numbers of the program, which are there at once


class Net(nn.Module):
    """For batches of support; with a buffer that steps write to, a parametrization and a tensor that is not registered."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.norm = nn.BatchNorm1d(24)
        self.second = nn.Linear(24, 24)
        self.third = parametrizations.weight_norm(nn.Linear(24, 24))
        self.scale = torch.rand(24)
        self.fourth = nn.Linear(24, 6)

    def forward(self, x):
        return self.fourth(self.third(self.second(self.norm(self.first(x)).relu()).relu() * self.scale).relu())


class Steps(unittest.TestCase):
    def setUp(self):
        gc.collect()
        self.plain, self.after = made(Net, False)

    def wrapped(self, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)):
        """The optimizer is made before the model is wrapped, on parameters that have no values."""
        net, after = made(Net, True)
        self.assertTrue(torch.equal(after, self.after))
        ours = optimizer(net.parameters())
        model = smp.DistributedModel(net)
        return model, smp.DistributedOptimizer(ours)

    def train_both(self, model, optimizer, count=3):
        theirs, step = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9), support.make_step()
        for number in range(count):
            optimizer.zero_grad()
            losses = step(model, support.batch(number))
            optimizer.step()
            theirs.zero_grad()
            expected = support.plain_step(self.plain, support.loss_of, support.batch(number))
            theirs.step()
            support.same_bits(self, losses.outputs, expected, f"losses of step {number}")

    def check_places(self, model):
        """Values are where parameters live, and nowhere else."""
        self.assertEqual(without_memory(model.get_module()), set(tensors_of(self.plain)) - local_names(model))
        here = smp.allgather(len(local_names(model)), smp.PP_GROUP)
        self.assertTrue(max(here) < len(tensors_of(self.plain)) or smp.pp_size() == 1, here)

    def test_equal_those_of_a_plain_model(self):
        model, optimizer = self.wrapped()
        self.assertEqual(bool(without_memory(model.get_module())), smp.pp_size() > 1)
        self.train_both(model, optimizer)
        self.check_places(model)
        support.same_bits(self, model.state_dict(), self.plain.state_dict(), "state")
        local, whole = model.local_state_dict(), tensors_of(self.plain)
        for name in local_names(model):
            self.assertTrue(torch.equal(local[name], whole[name]), name)

    def test_state_before_the_first_step(self):
        model, optimizer = self.wrapped()
        for _ in range(2):
            support.same_bits(self, model.state_dict(), self.plain.state_dict(), "state")
        self.assertEqual(bool(without_memory(model.get_module())), smp.pp_size() > 1, "copies, and nothing else")
        self.train_both(model, optimizer)
        self.check_places(model)

    def test_a_load_before_the_first_step(self):
        model, optimizer = self.wrapped()
        self.plain.load_state_dict(Net().state_dict())
        model.load_state_dict(self.plain.state_dict())
        self.train_both(model, optimizer)
        self.check_places(model)
        support.same_bits(self, model.state_dict(), self.plain.state_dict(), "state")

    def test_a_load_in_the_scope(self):
        state = Net().state_dict()
        net, _ = made(Net, True)
        with smp.delay_param_initialization():
            net.load_state_dict(state)
        self.assertEqual(without_memory(net), set(state) - LITERALS)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model = smp.DistributedModel(net)
        self.plain.load_state_dict(state)
        self.train_both(model, smp.DistributedOptimizer(optimizer))
        support.same_bits(self, model.state_dict(), self.plain.state_dict(), "state")

    def test_a_load_of_other_tensors(self):
        net, _ = made(Net, True)
        net.load_state_dict(self.plain.state_dict(), assign=True)
        self.assertEqual(without_memory(net), set())

    def test_a_checkpoint_before_the_first_step(self):
        model, _ = self.wrapped()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        support.same_bits(self, torch.load(file), self.plain.state_dict(), "state")

    def test_optimizers_with_state_of_their_own(self):
        """Adagrad makes its state in its constructor."""
        with smp.delay_param_initialization():
            torch.manual_seed(7)
            net = Net()
            optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.5)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(optimizer)
        theirs = torch.optim.Adagrad(self.plain.parameters(), lr=0.1, initial_accumulator_value=0.5)
        step = support.make_step()
        for number in range(2):
            optimizer.zero_grad(), theirs.zero_grad()
            step(model, support.batch(number))
            support.plain_step(self.plain, support.loss_of, support.batch(number))
            optimizer.step(), theirs.step()
        support.same_bits(self, model.state_dict(), self.plain.state_dict(), "state")

    def test_a_model_that_is_wrapped_again(self):
        """A second model, and the first one once more in a DistributedModel of its own."""
        for _ in range(2):
            self.setUp()
            model, optimizer = self.wrapped()
            self.train_both(model, optimizer, 1)
            support.same_bits(self, model.state_dict(), self.plain.state_dict(), "state")
            del model, optimizer

    def test_calls_outside_of_steps(self):
        model, _ = self.wrapped()
        if smp.pp_size() == 1:
            support.same_bits(self, [model(support.batch())], [self.plain(support.batch())], "outputs")
        with self.assertRaisesRegex(RuntimeError, "expected a tensor with values, got one made by aten::"):
            made(Net, True)[0](support.batch())

    def test_placement_by_hand(self):
        with smp.delay_param_initialization(), smp.partition(smp.pp_size() - 1):
            torch.manual_seed(7)
            net = Net()
        model = smp.DistributedModel(net)
        with torch.no_grad():
            support.make_evaluation()(model, support.batch())
        self.assertEqual(bool(local_names(model)), smp.pp_rank() == smp.pp_size() - 1)
        self.assertEqual(without_memory(net), set(tensors_of(net)) - local_names(model))

    def test_by_the_key(self):
        torch.manual_seed(7)
        with smp.model_creation(tensor_parallelism=False, dtype=torch.float32):
            net = Net()
        self.assertEqual(without_memory(net), set(tensors_of(net)) - LITERALS)
        self.assertTrue(smp.state.cfg.delayed_parameter_initialization)
        smp.initialize_parameters(net)
        support.same_bits(self, tensors_of(net), tensors_of(self.plain), "values")


class Memory(unittest.TestCase):
    def test_holds_what_stays(self):
        """The peak of resident memory: construction takes none, and the first step the share of the rank."""

        def peak_bytes():
            status = pathlib.Path("/proc/self/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024

        def construct(width):
            return made(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(32))), True)[0]

        def run(net, width):
            model = smp.DistributedModel(net)
            with torch.no_grad():
                support.make_evaluation()(model, torch.ones(support.MICROBATCHES, width))
            return model

        run(construct(8), 8)  # loads code
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        whole, before = 32 * 1024 * 1025 * 4, peak_bytes()
        net = construct(1024)
        self.assertLess(peak_bytes() - before, whole / 4, "in the construction")
        model = run(net, 1024)
        share = sum(p.numel() * 4 for p in model.local_parameters())
        self.assertLess(peak_bytes() - before, share + whole / 4, "in the first step")
        self.assertLess(share, whole / smp.pp_size() + whole / 4)


class Refusals(unittest.TestCase):
    def test_of_reads_outside_of_the_scope(self):
        net, _ = made(Net, True)
        weight = net.first.weight
        file = io.BytesIO()
        for read in (
            weight.sum, weight.tolist, weight.detach().numpy, lambda: repr(weight), lambda: float(weight.detach()[0, 0]),
            lambda: f"{weight.detach()[0, 0]}", weight.data_ptr, lambda: torch.save(net.state_dict(), file),
            lambda: copy.deepcopy(net), lambda: net.load_state_dict(Net().state_dict()),
            lambda: nn.init.zeros_(weight), net.half, net.share_memory,
            lambda: torch.utils.dlpack.to_dlpack(weight.detach()), lambda: weight.data.mul_(2), lambda: weight.clone(),
            lambda: copy.deepcopy(weight.detach()), lambda: net.apply(lambda m: m.weight.data.normal_()),
            lambda: nn.utils.parameters_to_vector(net.parameters()), lambda: weight.untyped_storage().tolist(),
            lambda: weight.untyped_storage().resize_(10**6), lambda: weight.untyped_storage().fill_(0),
            lambda: torch.optim.SGD([weight], 0.1).state_dict() and (weight + 1),
        ):  # fmt: skip
            with self.assertRaisesRegex(Exception, "expected a tensor with values, got one made by aten::empty") as caught:
                read()
            self.assertNotIn("::D", str(caught.exception))
        self.assertFalse(weight.is_shared())
        self.assertFalse(weight.untyped_storage().is_shared())

    def test_of_what_cannot_be_recorded(self):
        old, _ = made(Net, True)
        older, _ = made(Net, True)

        def under_autocast():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                torch.ones(4)

        for construct, words in (
            (lambda: torch.ones(4).nonzero(), "aten::nonzero: expected operators whose sizes do not depend on values"),
            (lambda: torch.ones(4)[torch.rand(4) > 0.5], "aten::.*: expected operators whose sizes do not depend on values"),
            (lambda: torch.ones(4).resize_(9), "aten::resize_: expected operators that make or fill"),
            (lambda: torch.cat([old.first.bias, older.first.bias]), "scope, got those of two"),
            (lambda: torch.ones(4).set_(torch.ones(4).untyped_storage(), 0, (9,)), "aten::set_: expected operators that make"),
            (lambda: torch.ones(4).untyped_storage().resize_(64), "expected a tensor with values, got one made by aten::o"),
            (lambda: torch.ones(4).to_sparse(), "sparse"),
            (lambda: torch.polar(torch.ones(4), torch.ones(4)).conj(), "aten::_conj: expected tensors without a lazy sign"),
            (under_autocast, "expected construction without autocast"),
            (lambda: torch.ones(4).data_ptr(), "expected a tensor with values, got one made by aten::ones"),
        ):
            with self.assertRaisesRegex(Exception, words) as caught, smp.delay_param_initialization():
                construct()
            self.assertNotIn("::D", str(caught.exception))

    def test_of_an_end_elsewhere(self):
        scope = smp.delay_param_initialization()
        thread = threading.Thread(target=scope.__enter__)
        thread.start()
        thread.join()
        with self.assertRaisesRegex(RuntimeError, "expected its end on the thread of its beginning"):
            scope.__exit__(None, None, None)

    def test_leave_no_scope_open(self):
        for text in ("not smp's", "no UTF-8: \udcff"):
            try:
                with smp.delay_param_initialization():
                    raise KeyError(text)
            except KeyError as error:
                kept = error  # and with it the frames that it came through
                self.assertTrue(_engine.has_values(torch.ones(2)))
            self.assertEqual(kept.args, (text,))

    def test_of_steps_within(self):
        model = smp.DistributedModel(Net())
        step = support.make_step()
        with self.assertRaisesRegex(ValueError, "smp.delay_param_initialization scopes to end before"):
            with smp.delay_param_initialization():
                step(model, support.batch())

        @smp.step
        def constructs(model, x):
            with smp.delay_param_initialization():
                return model(x)

        with self.assertRaisesRegex(Exception, "delay_param_initialization: expected a call outside of step bodies"):
            constructs(model, support.batch())

    def test_of_a_first_step_that_reads(self):
        net, _ = made(Net, True)
        model = smp.DistributedModel(net)

        @smp.step
        def reads(model, x):
            return model(x).sum().item()

        if smp.pp_size() > 1:
            with self.assertRaisesRegex(Exception, "expected the first step of a model with delayed parameters to read no"):
                reads(model, support.batch())


if __name__ == "__main__":
    support.main()
