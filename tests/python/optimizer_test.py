"""What an optimizer offers beside updates, an optimizer of the script's own, and a wrapper of one."""

import copy
import os
import unittest

import support
import torch
from checkpoint_test import shared_folder
from support import batch, loss_of, make_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.optimizer import only_optimizer


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


train_step = make_step()


class HandWrittenSgd(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.data -= group["lr"] / state["count"] * parameter.grad


class Wrapper:
    """As scripts wrap optimizers for float16: no torch.optim.Optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.cleared = None

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()

    def state_dict(self):
        return {"inner": self.optimizer.state_dict(), "cleared": self.cleared}

    def load_state_dict(self, state):
        self.cleared = state["cleared"]
        self.optimizer.load_state_dict(state["inner"])

    def zero_grad(self, set_grads_to_None=False):  # noqa: N803
        self.cleared = set_grads_to_None
        self.optimizer.zero_grad(set_grads_to_None)


class Optimizers(unittest.TestCase):
    def setUp(self):
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.plain = copy.deepcopy(self.net)

    def train(self, optimizer, plain_optimizer, model):
        for seed in range(3):
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            train_step(model, batch(seed))
            support.plain_step(self.plain, loss_of, batch(seed))
            optimizer.step()
            plain_optimizer.step()
        support.same_bits(self, model.state_dict(), self.plain.state_dict(), "parameters")

    def test_of_the_scripts_own(self):
        optimizer = HandWrittenSgd(self.net.parameters())  # before wrapping
        model = smp.DistributedModel(self.net)
        optimizer = smp.DistributedOptimizer(
            optimizer, static_loss_scale=None, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 1000}
        )
        self.assertIsInstance(optimizer, HandWrittenSgd)
        self.train(optimizer, HandWrittenSgd(self.plain.parameters()), model)
        self.assertEqual(optimizer.state_dict()["state"], {index: {"count": 3} for index in range(6)})

    def test_of_torch(self):
        for kind in ("Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"):
            with self.subTest(kind):
                self.setUp()
                model = smp.DistributedModel(self.net)
                optimizer = smp.DistributedOptimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.01))
                plain_optimizer = getattr(torch.optim, kind)(self.plain.parameters(), lr=0.01)
                self.train(optimizer, plain_optimizer, model)
                states = [each.state_dict()["state"] for each in (optimizer, plain_optimizer)]
                self.assertEqual(*map(sorted, states))
                for index in states[1]:
                    fields = [{name: torch.as_tensor(value) for name, value in each[index].items()} for each in states]
                    support.same_bits(self, *fields, f"state of parameter {index}")

    def test_keep_state_of_all_kinds(self):
        class Keeping(HandWrittenSgd):
            def step(self):
                super().step()
                for state, parameter in [(state, parameter) for parameter, state in self.state.items() if parameter.grad is not None]:
                    state[7] = (1, 2.5)
                    state["mean"] = parameter.grad.double()
                    state["notes"] = [nn.Parameter(torch.ones(2)), {"none": None}]
                    state["rows"] = torch.arange(6.0).reshape(3, 2).t()
                    state["sparse"] = torch.eye(2).to_sparse()
                    state["scalar"] = torch.tensor(state["count"], dtype=torch.bfloat16)
                    state["beside tensors"] = state["a\udc80"] = torch.ones(3)

        model = smp.DistributedModel(self.net)
        optimizer = smp.DistributedOptimizer(Keeping(self.net.parameters()))
        plain_optimizer = Keeping(self.plain.parameters())
        self.train(optimizer, plain_optimizer, model)
        for _ in range(2):
            found, expected = (each.state_dict()["state"] for each in (optimizer, plain_optimizer))
            self.assertEqual(str(found), str(expected))  # names in their order, types and shapes
            for index, state in found.items():
                support.same_bits(self, [state["mean"]], [expected[index]["mean"]], f"state of parameter {index}")
                self.assertEqual(state["rows"].stride(), (1, 2))
            optimizer.load_state_dict(optimizer.local_state_dict())
            plain_optimizer.load_state_dict(plain_optimizer.state_dict())

    def test_show_state_that_torch_cannot_load(self):
        class Keeping(HandWrittenSgd):
            def step(self):
                self.state.clear()
                super().step()
                for number, parameter in enumerate(self.param_groups[0]["params"]):
                    if parameter.grad is not None:
                        self.state[parameter] = [number, torch.ones(2)] if number % 2 else {"empty": torch.empty(2, device="meta")}

        model = smp.DistributedModel(self.net)
        optimizer, plain_optimizer = smp.DistributedOptimizer(Keeping(self.net.parameters())), Keeping(self.plain.parameters())
        self.train(optimizer, plain_optimizer, model)
        found, expected = (each.state_dict()["state"] for each in (optimizer, plain_optimizer))
        self.assertEqual(str(found), str(expected))

    def test_that_is_a_wrapper(self):
        model = smp.DistributedModel(self.net)
        wrapper = Wrapper(torch.optim.Adam(self.net.parameters()))
        optimizer = smp.DistributedOptimizer(wrapper)
        self.assertIs(optimizer, wrapper)
        self.train(optimizer, Wrapper(torch.optim.Adam(self.plain.parameters())), model)
        optimizer.zero_grad(set_grads_to_None=True)
        self.assertTrue(optimizer.cleared)
        optimizer.param_groups[0]["lr"] = 0.5
        self.assertEqual(optimizer.optimizer.param_groups[0]["lr"], 0.5)

    def test_that_is_a_wrapper_goes_on_from_a_checkpoint(self):
        wrapped = [nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(2)]
        models = [smp.DistributedModel(net) for net in wrapped]
        optimizers = [smp.DistributedOptimizer(Wrapper(torch.optim.Adam(net.parameters()))) for net in wrapped]

        def train(run, *seeds):
            for seed in seeds:
                optimizers[run].zero_grad()
                loss = train_step(models[run], batch(seed))
                optimizers[run].step()
            return loss.outputs

        train(0, 0, 1)
        with shared_folder() as folder:
            smp.save_checkpoint(folder, "a", model=models[0], optimizer=optimizers[0])
            smp.resume_from_checkpoint(folder, model=models[1], optimizer=optimizers[1])
        support.same_bits(self, train(1, 2, 3), train(0, 2, 3), "losses")

    def test_keep_arguments_and_results_of_their_step(self):
        class Scaling(torch.optim.SGD):
            def step(self, closure=None, scale=1.0):
                for parameter in self.param_groups[0]["params"]:
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=scale)
                return "stepped"

        model = smp.DistributedModel(self.net)
        optimizer = smp.DistributedOptimizer(Scaling(self.net.parameters(), lr=0.1))
        train_step(model, batch(0))
        support.plain_step(self.plain, loss_of, batch(0))
        results = [each.step(scale=0.5) for each in (optimizer, Scaling(self.plain.parameters(), lr=0.1))]
        self.assertEqual(results, ["stepped"] * 2)
        support.same_bits(self, model.state_dict(), self.plain.state_dict(), "parameters")

    def test_are_wrapped_once(self):
        model = smp.DistributedModel(self.net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        kind = type(optimizer)
        self.assertIs(smp.DistributedOptimizer(optimizer), optimizer)
        self.assertIs(type(optimizer), kind)

    def test_with_parts_of_a_model_are_not_saved_alone(self):
        model = smp.DistributedModel(self.net)
        parts = [
            smp.DistributedOptimizer(torch.optim.SGD(self.net[layer].parameters(), lr=0.1, momentum=0.9)) for layer in (0, 2)
        ]
        with shared_folder() as folder:
            for call in (smp.save_checkpoint, smp.resume_from_checkpoint):
                with self.assertRaisesRegex(ValueError, "got 2 with parts of them.*optimizer="):
                    call(folder, "a", model=model)
            self.assertEqual(os.listdir(folder), [])
        whole = torch.optim.SGD(self.net.parameters(), lr=0.1)
        smp.DistributedOptimizer(whole)
        self.assertIs(only_optimizer(model), whole)
        del parts

    def test_tell_indices_and_parts(self):
        model = smp.DistributedModel(self.net)
        weights = [each.weight for each in self.net if hasattr(each, "weight")]
        biases = [each.bias for each in self.net if hasattr(each, "bias")]
        optimizer = smp.DistributedOptimizer(torch.optim.Adam([{"params": weights}, {"params": biases}]))
        names = ["0.weight", "2.weight", "4.weight", "0.bias", "2.bias", "4.bias"]
        self.assertEqual(optimizer.param_name_to_index(), {name: index for index, name in enumerate(names)})
        self.assertEqual(optimizer._param_id_to_index()[id(biases[0])], 3)
        train_step(model, batch(0))
        optimizer.step()
        local = optimizer._param_index_to_param_local()
        self.assertEqual({names[index] for index in local}, {name for name, _ in model.local_named_parameters()})
        self.assertEqual(set(optimizer.orig_state_dict()["state"]), set(local))
        self.assertEqual(set(optimizer.state_dict()["state"]), set(range(6)))
        self.assertTrue(optimizer._is_accelerate_prepared)
        self.assertFalse(optimizer.step_was_skipped or optimizer.redefined_params)

    def test_clip_by_the_norm_of_all_ranks(self):
        model = smp.DistributedModel(self.net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.net.parameters(), lr=0.1))
        train_step(model, batch(0))
        support.plain_step(self.plain, loss_of, batch(0))
        expected = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 0.01).item()
        self.assertAlmostEqual(optimizer.clip_grad_norm(0.01), expected, places=6)
        self.assertAlmostEqual(optimizer.clip_master_grads(0.01), 0.01, places=6)


if __name__ == "__main__":
    support.main()
