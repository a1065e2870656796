"""Two replicas: steps that keep their gradients, hooks in place of the mean, and loops of different lengths."""

import copy
import os
import sys
import types
import unittest
from unittest import mock

import support
import torch
from support import loss_of, make_step
from torch import nn

import smdistributed.modelparallel.torch as smp

WORLD_SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["WORLD_SIZE"])


def setUpModule():
    torch.manual_seed(0)
    smp.init({"pipeline_parallel_degree": WORLD_SIZE // 2, "microbatches": support.MICROBATCHES, "ddp": True, "log_level": "off"})


def make_net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(number, replica=None):
    return support.batch(100 * number + (smp.dp_rank() if replica is None else replica))


class Plain:
    """Both replicas as loops of their own."""

    def __init__(self, net):
        self.nets = [copy.deepcopy(net) for _ in range(2)]

    def step(self, number):
        for replica, net in enumerate(self.nets):
            support.plain_step(net, loss_of, batch(number, replica))

    def average(self, divisor=2):
        for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
            mean = (parameters[0].grad + parameters[1].grad) / divisor
            for parameter in parameters:
                parameter.grad = mean.clone()

    def gradients(self, replica=0):
        return {name: parameter.grad for name, parameter in self.nets[replica].named_parameters()}


class Replicas(unittest.TestCase):
    def setUp(self):
        self.net = make_net()
        self.plain = Plain(self.net)
        self.model = smp.DistributedModel(self.net)
        self.step = make_step()

    def assert_gradients(self, expected, what):
        for name, parameter in self.model.local_named_parameters():
            support.same_bits(self, [parameter.grad], [expected[name]], f"{what}: gradient of {name}")


class Differing(Replicas):
    def test_are_told(self):
        self.step(self.model, batch(0))
        self.model.check_replicas()
        if smp.dp_rank() == 1:
            with torch.no_grad():
                for _, parameter in self.model.local_named_parameters():
                    parameter.view(-1)[0].add_(1)
        with self.assertRaisesRegex(RuntimeError, "parameter '0.weight', got one value on replica 0 and another on replica 1"):
            self.model.check_replicas()


class NoSync(Replicas):
    def test_keeps_gradients_until_a_step_outside(self):
        with self.model.no_sync():
            self.step(self.model, batch(0))
            self.plain.step(0)
            self.assert_gradients(self.plain.gradients(smp.dp_rank()), "within")
        self.step(self.model, batch(1))
        self.plain.step(1)
        self.plain.average()
        self.assert_gradients(self.plain.gradients(), "after")

    def test_ends_with_an_exception(self):
        with self.assertRaises(KeyError), self.model.no_sync():
            raise KeyError
        self.step(self.model, batch(0))
        self.plain.step(0)
        self.plain.average()
        self.assert_gradients(self.plain.gradients(), "after")

    def test_on_one_replica_alone_is_refused(self):
        self.step(self.model, batch(0))
        with self.assertRaisesRegex(ValueError, "gradients kept"):
            if smp.dp_rank() == 1:
                with self.model.no_sync():
                    self.step(self.model, batch(1))
            else:
                self.step(self.model, batch(1))

    def test_every_second_pass(self):
        net = make_net()
        self.plain = Plain(net)
        self.model = smp.DistributedModel(net, backward_passes_per_step=2)
        for number in range(2):
            self.step(self.model, batch(number))
            self.plain.step(number)
        self.plain.average()
        self.assert_gradients(self.plain.gradients(), "second pass")


class OtherTypes(Replicas):
    def test_of_a_model_that_becomes_double_between_steps(self):
        """Its buckets take twice the memory. Where stages hold the model, no rank has all of it."""
        self.step(self.model, batch(0))
        if smp.pp_size() > 1:
            with self.assertRaisesRegex(RuntimeError, "live on pipeline rank"):
                self.net.double()
            return
        self.model.zero_grad()
        for net in (self.net, *self.plain.nets):
            net.double()
        self.step(self.model, batch(1).double())
        for replica, net in enumerate(self.plain.nets):
            support.plain_step(net, loss_of, batch(1, replica).double())
        self.plain.average()
        self.assert_gradients(self.plain.gradients(), "in double")


class CommHook(Replicas):
    def test_gets_sums_over_microbatches_and_replaces_the_mean(self):
        self.step(self.model, batch(0))
        self.model.zero_grad()
        buckets = []

        def hook(state, bucket):
            buckets.append((bucket.index(), bucket.is_last(), bucket.buffer().clone()))
            everyone = smp.allgather(bucket.buffer(), smp.DP_GROUP)
            mean = torch.futures.Future()
            mean.set_result([sum(everyone) / (state * smp.dp_size())])
            return mean

        self.model.register_comm_hook(support.MICROBATCHES, hook)
        self.step(self.model, batch(1))
        self.plain.step(1)
        own = self.plain.gradients(smp.dp_rank())
        expected = [own[name].flatten() * support.MICROBATCHES for name, _ in self.model.local_named_parameters()]
        self.assertEqual([bucket[:2] for bucket in buckets], [(0, True)])
        got = buckets[0][2].split([each.numel() for each in reversed(expected)])  # from the last parameter to the first
        support.same_bits(self, list(got), list(reversed(expected)), "bucket")
        self.plain.average()
        self.assert_gradients(self.plain.gradients(), "hooked")
        self.model.register_comm_hook(None, None)
        self.model.zero_grad()
        self.step(self.model, batch(1))
        self.assert_gradients(self.plain.gradients(), "the mean again")
        self.assertEqual(len(buckets), 1)

    def test_on_one_replica_alone_is_refused(self):
        self.step(self.model, batch(0))
        if smp.dp_rank() == 1:
            self.model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        with self.assertRaisesRegex(ValueError, "communication hook"):
            self.step(self.model, batch(1))

    def test_that_is_none_is_refused(self):
        with self.assertRaisesRegex(TypeError, "int"):
            self.model.register_comm_hook(None, 3)


class HandWrittenSgd(torch.optim.Optimizer):
    """An optimizer of the script's own, with state of all kinds."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.5), "name": "mine"})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = group["betas"][0] * state.get("mean", 0) + parameter.grad
                parameter.data -= group["lr"] / state["count"] * state["mean"]


class Join(Replicas):
    def make(self, kind):
        return smp.DistributedOptimizer(kind(self.net.parameters(), lr=0.01))

    def test_makes_replicas_equal(self):
        for kind in (torch.optim.Adam, HandWrittenSgd):
            self.setUp()
            optimizer = self.make(kind)
            plain_optimizers = [kind(net.parameters(), lr=0.01) for net in self.plain.nets]
            with self.model.join():
                for number in range(2 + smp.dp_rank()):
                    optimizer.zero_grad()
                    self.step(self.model, batch(number))
                    optimizer.step()
            for number in range(3):
                for each in plain_optimizers:
                    each.zero_grad()
                self.plain.step(number)
                if number == 2:  # replica 0 has none: zeros
                    for parameter in self.plain.nets[0].parameters():
                        parameter.grad.zero_()
                self.plain.average()
                for each in plain_optimizers:
                    each.step()
            expected = dict(self.plain.nets[1].named_parameters())
            for name, parameter in self.model.local_named_parameters():
                support.same_bits(self, [parameter], [expected[name]], f"{kind.__name__}: {name}")
                state = plain_optimizers[1].state[expected[name]]
                self.assertEqual(set(optimizer.state[parameter]), set(state))
                for field, value in optimizer.state[parameter].items():
                    support.same_bits(self, [torch.as_tensor(value)], [torch.as_tensor(state[field])], f"{name}: {field}")
                    self.assertIs(type(value), type(state[field]))

    def test_can_end_with_the_shorter_loop(self):
        self.step(self.model, batch(9))
        steps = 0
        with self.assertRaisesRegex(ValueError, "throw_on_early_termination"):
            with self.model.join(throw_on_early_termination=True):
                for number in range(1 + smp.dp_rank()):
                    self.step(self.model, batch(number))
                    steps += 1
        self.assertEqual(steps, 1)
        self.step(self.model, batch(3))

    def test_does_nothing_where_it_is_not_enabled(self):
        with self.model.join(enable=False), self.model.join():
            self.step(self.model, batch(0))

    def test_has_no_scaler(self):
        optimizer, scaler = self.make(torch.optim.SGD), smp.amp.GradScaler()
        self.step(self.model, batch(0))
        with self.model.join(), self.assertRaisesRegex(ValueError, "GradScaler.unscale_: .* in the loop of smp.join"):
            scaler.unscale_(optimizer)

    def test_with_other_options_on_one_rank_is_refused(self):
        with self.assertRaisesRegex(ValueError, "same options"):
            with self.model.join(divide_by_initial_world_size=smp.rank() > 0):
                self.fail("entered")


class Chain(Replicas):
    def test_of_module_is_that_of_ddp(self):
        self.assertIs(self.model.module.module, self.net)
        self.assertIs(self.model.get_module(), self.net)
        self.assertEqual(next(iter(self.model.state_dict())), "0.weight")
        self.model.load_state_dict(self.model.state_dict())
        self.step(self.model, batch(0))


class Options(Replicas):
    def test_without_overlap_gradients_are_the_same(self):
        net = make_net()
        self.plain, self.model = Plain(net), smp.DistributedModel(net, overlapping_allreduce=False)
        self.step(self.model, batch(0))
        self.plain.step(0)
        self.plain.average()
        self.assert_gradients(self.plain.gradients(), "mean")

    def test_buffers_begin_a_step_with_those_of_the_first_replica_or_their_own(self):
        for broadcasts in (True, False):
            net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
            plain, model, step = Plain(net), smp.DistributedModel(net, broadcast_buffers=broadcasts), make_step()
            for number in range(3):
                if broadcasts:
                    plain.nets[1].load_state_dict(plain.nets[0].state_dict())  # nothing else differs: no weight is updated
                plain.step(number)
                step(model, batch(number))
                expected = dict(plain.nets[smp.dp_rank()].named_buffers())
                for name, buffer in model.local_named_buffers():
                    support.same_bits(self, [buffer], [expected[name]], f"{name}, broadcast: {broadcasts}, step {number}")


class Bare(Replicas):
    def test_calls_are_for_evaluation_only(self):
        message = "step body"
        with self.assertRaisesRegex(RuntimeError, message):
            self.model(batch(0))
        with torch.no_grad(), self.assertRaisesRegex(RuntimeError, message):  # values that replicas do not share yet
            self.model(batch(0))
        self.step(self.model, batch(0))
        if smp.pp_size() == 1:
            with torch.no_grad():
                support.same_bits(self, [self.model(batch(0))], [self.plain.nets[0](batch(0))], "evaluation")


class Accelerate(unittest.TestCase):
    """It is to take replicas for processes with data of their own, and stages not."""

    def make_model_with(self, processes):
        state = types.SimpleNamespace(PartialState=types.SimpleNamespace(_shared_state={"num_processes": processes}))
        with mock.patch.dict(sys.modules, {"accelerate.state": state}):
            return smp.DistributedModel(make_net())

    def test_counts_a_pipeline_as_one(self):
        if smp.mp_size() == 1:
            self.assertNotIn("PMI_SIZE", os.environ)
            self.make_model_with(WORLD_SIZE)
            return
        self.assertEqual(os.environ["PMI_SIZE"], "1")
        with self.assertRaisesRegex(RuntimeError, f"got {WORLD_SIZE}, to each"):
            self.make_model_with(WORLD_SIZE)
        with self.assertWarnsRegex(UserWarning, "all 2 replicas the same data"):
            self.make_model_with(1)


if __name__ == "__main__":
    support.main()
