"""What public scripts for SageMaker's library rely on and no other test shows: tests/promises.md has the list."""

import argparse
import copy
import os
import unittest
from unittest import mock

import support
import torch
from checkpoint_test import shared_folder
from support import batch, loss_of, make_step
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off", "sharded_data_parallel_degree": 0})


def make_net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


class Half(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, x):
        return self._orig_mod(x) * 0.5


class PassesOn(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) + 1

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


class Forwards(unittest.TestCase):
    def test_that_are_compiled_keep_the_names_of_the_original(self):
        net = make_net()
        model = smp.DistributedModel(torch.compile(net, backend="eager"))
        self.assertIs(model.get_module(), net)
        make_step()(model, batch())
        make_net().load_state_dict(model.state_dict())

    def test_that_are_compiled_have_their_hooks_on_the_original(self):
        hooked, pre_hooked, patched = (torch.compile(make_net(), backend="eager") for _ in range(3))
        hooked.register_forward_hook(lambda module, args, output: output * 2)
        pre_hooked.register_forward_pre_hook(print)
        patched.forward = lambda x: x
        for compiled, own in ((hooked, "_forward_hooks"), (pre_hooked, "_forward_pre_hooks"), (patched, "forward")):
            with self.assertRaisesRegex(ValueError, f"torch.compile was given, got {own} of the compiled one"):
                smp.DistributedModel(compiled)
        later = torch.compile(make_net(), backend="eager")
        model, evaluate = smp.DistributedModel(later), support.make_evaluation()
        for add, own in (
            (lambda: later.register_forward_hook(lambda module, args, output: output * 2), "_forward_hooks"),
            (lambda: setattr(later, "forward", lambda x: x), "forward"),
        ):
            evaluate(model, batch())
            forward, handle = later.forward, add()
            with self.assertRaisesRegex(ValueError, f"step: .* torch.compile was given, got {own} of the compiled one"):
                evaluate(model, batch())
            later.forward = forward
            if handle is not None:
                handle.remove()
        evaluate(model, batch())
        lazy = torch.compile(nn.Sequential(nn.LazyLinear(3)), backend="eager")
        self.assertIs(smp.DistributedModel(lazy).get_module(), lazy._orig_mod)

    def test_of_wrappers_that_look_like_compiled_modules(self):
        """By an attribute that they have, or pass on as PEFT's do."""
        for module in (Half(make_net()), PassesOn(torch.compile(make_net(), backend="eager"))):
            plain = copy.deepcopy(module)
            outputs = support.make_evaluation()(smp.DistributedModel(module), batch()).outputs
            expected = [plain(part.clone()) for part in batch().chunk(support.MICROBATCHES)]
            support.same_bits(self, outputs, expected, "outputs")

    def test_evaluate_where_training_has_cut_them(self):
        """torch evaluates these layers by one operator of all their parameters, which are on two ranks here."""
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(6, 2, 16, dropout=0.0, batch_first=True)
        plain = copy.deepcopy(layer).eval()
        model = smp.DistributedModel(layer)
        for part, stage in ((layer.self_attn, 0), (layer.linear2, smp.pp_size() - 1)):
            smp.set_partition(part, stage)
        x = batch().unsqueeze(1)
        make_step()(model, x)
        model.eval()
        with torch.no_grad():
            ours = support.make_evaluation()(model, x)
            for fast in (False, True):
                torch.backends.mha.set_fastpath_enabled(fast)
                expected = torch.cat([plain(part) for part in x.chunk(support.MICROBATCHES)])
                self.assertTrue(torch.equal(ours.concat(), expected) if not fast else torch.allclose(ours.concat(), expected))
        self.assertTrue(torch.backends.mha.get_fastpath_enabled())

    def test_are_fed_batches_and_no_loader(self):
        model = smp.DistributedModel(make_net())
        loader = torch.utils.data.DataLoader(batch())
        with self.assertRaisesRegex(ValueError, "got the DataLoader. Loop over it"):
            make_step()(model, loader)


class Optimizers(unittest.TestCase):
    def test_are_of_the_class_that_made_them(self):
        net = make_net()
        model = smp.DistributedModel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.assertNotIsInstance(optimizer, smp.DistributedOptimizer)
        smp.DistributedOptimizer(optimizer)
        self.assertIsInstance(optimizer, smp.DistributedOptimizer)

    def test_have_rates_that_are_set_by_hand_on_every_rank(self):
        net = make_net()
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        train_step = make_step()
        for number in range(3):
            for each in (optimizer, plain_optimizer):
                each.zero_grad()
                for group in each.param_groups:
                    group["lr"] = 0.1 / (1 + number)
            train_step(model, batch(number))
            support.plain_step(plain, loss_of, batch(number))
            optimizer.step(), plain_optimizer.step()
        support.same_bits(self, model.state_dict(), plain.state_dict(), "parameters")
        optimizer.clip_master_grads(1.0)  # as callers do who switch sharding off

    def test_without_a_rate_are_torchs_business(self):
        def end(make):
            try:
                make(torch.optim.SGD(net.parameters(), lr=None)).step()
            except Exception as error:  # noqa: BLE001
                return type(error), str(error)

        net = make_net()
        expected = end(lambda optimizer: optimizer)
        smp.DistributedModel(net)
        self.assertEqual(end(smp.DistributedOptimizer), expected)
        self.assertIsNotNone(expected)

    def test_are_made_of_a_models_parameters_before_its_first_step(self):
        net = make_net()
        plain = copy.deepcopy(net)
        start = make_net().state_dict()
        start = smp.allgather(start, smp.WORLD)[0]
        model = smp.DistributedModel(net).to(torch.device("cpu"))
        names, parameters = zip(*model.named_parameters(), strict=True)
        self.assertEqual(len(names), 4)
        model.load_state_dict({"0.weight": start["0.weight"]}, strict=False)
        plain.load_state_dict({"0.weight": start["0.weight"]}, strict=False)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam([{"params": list(parameters), "weight_decay": 0.1}]))
        plain_optimizer = torch.optim.Adam(plain.parameters(), weight_decay=0.1)
        make_step()(model, batch())
        support.plain_step(plain, loss_of, batch())
        optimizer.step(), plain_optimizer.step()
        support.same_bits(self, model.state_dict(), plain.state_dict(), "parameters")


class Gradients(unittest.TestCase):
    def test_are_cleared_and_added_up_as_in_torch(self):
        net = make_net()
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        train_step = make_step()

        def unset():
            for parameter in (*net.parameters(), *plain.parameters()):
                parameter.grad = None

        def zero(set_to_none):
            optimizer.zero_grad(set_to_none=set_to_none)
            plain.zero_grad(set_to_none=set_to_none)

        for clear in (unset, lambda: zero(True), lambda: zero(False), lambda: None):  # the last: over two steps
            clear()
            train_step(model, batch())
            support.plain_step(plain, loss_of, batch())
            for name, parameter in model.local_named_parameters():
                support.same_bits(self, [parameter.grad], [plain.get_parameter(name).grad], f"gradient of {name}")


class Modules(unittest.TestCase):
    def test_may_have_an_initialisation_that_the_script_has_replaced(self):
        with mock.patch.object(nn.Linear, "reset_parameters", lambda self: None):
            net = make_net()
            for parameter in net.parameters():
                nn.init.constant_(parameter, 0.25)
            plain = copy.deepcopy(net)
            model = smp.DistributedModel(net)
            losses = make_step()(model, batch())
        support.same_bits(self, losses.outputs, support.plain_step(plain, loss_of, batch()), "losses")

    def test_are_asked_for_what_they_do_not_have(self):
        """By transformers' Trainer, before it trains."""
        model = smp.DistributedModel(make_net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for name in ("is_parallelizable", "hf_device_map", "is_loaded_in_8bit", "is_quantized"):
            self.assertFalse(getattr(model, name, None), name)
        for name in ("train", "eval"):
            self.assertFalse(callable(getattr(optimizer, name, None)), name)

    def test_in_a_list_are_taken_where_they_ask_for_nothing(self):
        modules = nn.ModuleList([make_net()])
        smp.set_tensor_parallelism(modules, False)
        with self.assertRaises(NotImplementedError):
            smp.set_tensor_parallelism(modules)


class Steps(unittest.TestCase):
    def test_take_what_a_script_has_at_hand(self):
        model = smp.DistributedModel(make_net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def train_step(args, model, optimizer, device, x, number, nothing):
            assert args.scale == 2.0 and device.type == "cpu" and number == 3 and nothing is None
            assert optimizer.param_groups[0]["lr"] == 0.1
            loss = loss_of(model, x.to(device)) * args.scale
            model.backward(loss)
            return loss

        arguments = argparse.Namespace(scale=2.0)
        plain = smp.allgather(model.state_dict(), smp.WORLD)[0]
        loss = train_step(arguments, model, optimizer, torch.device("cpu"), batch(), 3, None)
        expected = make_net()
        expected.load_state_dict(plain)
        losses = support.plain_step(expected, lambda net, x: loss_of(net, x) * 2.0, batch())
        support.same_bits(self, loss.outputs, losses, "losses")

    def test_have_results_that_are_every_ranks_own(self):
        model = smp.DistributedModel(make_net())
        train_step = make_step()
        output = train_step(model, batch())
        self.assertIsInstance(output.detach(), smp.StepOutput)
        self.assertEqual(output.detach().stack().cpu().shape, (support.MICROBATCHES,))
        loss = output.reduce_mean()
        value = loss.item()
        self.assertEqual(smp.allgather(value, smp.WORLD), [value] * smp.size())
        loss *= 2
        loss /= 2
        self.assertEqual(loss.item(), value)
        loss += 1
        self.assertEqual(train_step(model, batch()).reduce_mean().item(), value)

    def test_share_a_model(self):
        net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 3))
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)
        train_step = make_step()

        @smp.step
        def evaluate(model, x):
            return model(x)

        @smp.step
        def generate(model, x):
            return model(x).argmax(1)

        for number in range(2):
            train_step(model, batch(number))
            model.eval()
            plain.load_state_dict(model.state_dict())
            plain.eval()
            with torch.no_grad():
                parts = [plain(part.clone()) for part in batch(number).chunk(support.MICROBATCHES)]
                support.same_bits(self, evaluate(model, batch(number)).outputs, parts, "outputs")
                support.same_bits(self, generate(model, batch(number)).outputs, [part.argmax(1) for part in parts], "classes")
            model.train()


class Checkpoints(unittest.TestCase):
    def test_want_no_objects_and_take_tags_as_they_are(self):
        net = make_net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters()))
        train_step = make_step()
        train_step(model, batch())
        optimizer.step()
        with shared_folder() as folder:
            smp.save_checkpoint(folder, tag="last.pt", partial=False, user_content={"epoch": 1})
            state = model.state_dict()
            self.assertIn("last.pt", os.listdir(folder))
            support.same_bits(self, torch.load(os.path.join(folder, "last.pt"), weights_only=True), state, "a plain file")
            optimizer.zero_grad()
            train_step(model, batch(1))
            optimizer.step()
            self.assertEqual(smp.resume_from_checkpoint(folder, tag="last.pt", partial=False), {"epoch": 1})
            support.same_bits(self, model.state_dict(), state, "parameters")
        del optimizer


if __name__ == "__main__":
    support.main()
