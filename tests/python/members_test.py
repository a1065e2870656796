"""What a model offers beside steps: the share of a rank, placement by hand, options, hooks, moves, calls without a step."""

import copy
import pickle
import threading
import unittest
import xml.etree.ElementTree as ElementTree

import support
import torch
from support import batch, loss_of, make_step
from torch import nn

import smdistributed.modelparallel.torch as smp


def setUpModule():
    torch.manual_seed(0)
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)


train_step = make_step()


class Copies(unittest.TestCase):
    def test_are_refused_with_what_to_take_instead(self):
        model = smp.DistributedModel(Net(), find_unused_parameters=True)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
        for _ in range(2):
            for take in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(TypeError, r"DistributedModel: expected neither copies .* model.state_dict\(\)"):
                    take(model)
                with self.assertRaisesRegex(TypeError, r"Adam: expected neither copies .* optimizer.state_dict\(\)"):
                    take(optimizer)
            train_step(model, batch())


class Share(unittest.TestCase):
    def test_is_all_before_the_first_step_and_a_part_after(self):
        net = Net()
        model = smp.DistributedModel(net, find_unused_parameters=True)
        self.assertEqual(dict(model.local_named_buffers()), dict(net.named_buffers()))
        self.assertEqual(dict(model.local_named_modules()), dict(net.named_modules()))
        train_step(model, batch())
        parts = smp.allgather([name for name, _ in model.local_named_modules()], smp.PP_GROUP)
        owners = ["layers.0", "layers.2", "layers.3", "layers.4"]
        self.assertEqual(sorted(set().union(*parts)), owners)
        buffers = smp.allgather([name for name, _ in model.local_named_buffers()], smp.PP_GROUP)
        self.assertEqual(set().union(*buffers), {name for name, _ in net.named_buffers()})
        modules = list(model.local_modules())
        for tensor in [*model.local_parameters(), *model.local_buffers()]:
            self.assertTrue(any(tensor is own for module in modules for own in module.state_dict(keep_vars=True).values()))
        self.assertIn("layers.0", parts[0])
        self.assertEqual("layers.0" in parts[-1], smp.size() == 1)

    def test_is_asked_for_outside_of_bodies(self):
        model = smp.DistributedModel(Net())

        @smp.step
        def asks(model, x):
            return [*model.local_buffers(), model(x)]

        with self.assertRaisesRegex(ValueError, "named_buffers"):
            asks(model, batch())

    def test_has_no_tensor_parallel_part(self):
        model = smp.DistributedModel(Net())
        parameter = next(model.parameters())
        self.assertFalse(model.is_distributed_parameter(parameter) or model.is_scaled_batch_buffer(parameter))
        self.assertEqual([*model.distributed_modules(), *model.scaled_batch_reducer_named_parameters()], [])
        train_step(model, batch())
        for own in (model.default_reducer_named_parameters(), model.virtual_named_parameters()):
            self.assertEqual(dict(own), dict(model.local_named_parameters()))


class Placement(unittest.TestCase):
    def test_by_hand(self):
        """The first layer and the last on the last rank, what is between them on the first."""
        last = smp.pp_size() - 1
        with smp.partition(last):
            first = nn.Linear(6, 16)
            with smp.partition(0):
                between = nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16))
        net = nn.Sequential(first, between, nn.Linear(16, 3))
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)
        smp.set_partition(net[2], last)
        losses = train_step(model, batch())
        support.same_bits(self, losses.outputs, support.plain_step(plain, loss_of, batch()), "losses")
        share = [name for own in (model.local_named_parameters(), model.local_named_buffers()) for name, _ in own]
        wanted = {name: 0 if name.startswith("1") else last for name in net.state_dict()}
        self.assertEqual(set(share), {name for name, rank in wanted.items() if rank == smp.pp_rank()})
        for name, parameter in model.local_named_parameters():
            support.same_bits(self, [parameter.grad], [plain.get_parameter(name).grad], f"gradient of {name}")
        with self.assertRaisesRegex(RuntimeError, "first step"):
            smp.set_partition(net[2], 0)

    def test_by_hand_in_two_threads(self):
        last, together, parts = smp.pp_size() - 1, threading.Barrier(2), {}

        def make(stage, part):
            with smp.partition(stage):
                together.wait()
                parts[part] = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
                together.wait()

        threads = [threading.Thread(target=make, args=arguments) for arguments in ((last, "first"), (0, "second"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model = smp.DistributedModel(nn.ModuleDict(parts))
        smp.step(lambda model, x: model.module["first"](model.module["second"](x)).sum())(model, batch())
        share = {name.split(".")[0] for name, _ in model.local_named_parameters()}
        own = {part for part, stage in (("first", last), ("second", 0)) if stage == smp.pp_rank()}
        self.assertEqual(share, own)

    def test_by_hand_ends_where_it_began(self):
        def layers():
            with smp.partition(0):
                yield nn.Linear(6, 6)
                yield nn.Linear(6, 6)

        with self.assertRaisesRegex(RuntimeError, "opposite order"):
            with smp.partition(0):
                made = layers()
                next(made)
        with self.assertRaisesRegex(RuntimeError, "opposite order"):
            made.close()
        train_step(smp.DistributedModel(Net(), find_unused_parameters=True), batch())  # no block is left


class Options(unittest.TestCase):
    def test_sum_gradients_and_are_accepted_without_effect(self):
        net = Net()
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(
            net,
            trace_device="cpu",
            trace_execution_times=True,
            trace_memory_usage=True,
            overlapping_allreduce=False,
            average_grads_across_microbatches=False,
            gradient_as_bucket_view=True,
        )
        train_step(model, batch())
        for part in batch().chunk(support.MICROBATCHES):
            loss_of(plain, part.clone()).backward()
        for name, parameter in model.local_named_parameters():
            support.same_bits(self, [parameter.grad], [plain.get_parameter(name).grad], f"gradient of {name}")


class Again(unittest.TestCase):
    """One module in two models, as where a notebook's cell is run twice."""

    def trains(self, net, make):
        """make(net): models of it, which are trained in turn."""
        plain = copy.deepcopy(net)
        models = make(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        plains = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(4):
            optimizer.zero_grad(), plains.zero_grad()
            losses = train_step(models[number % len(models)], batch(number)).outputs
            support.same_bits(self, losses, support.plain_step(plain, loss_of, batch(number)), f"losses {number}")
            optimizer.step(), plains.step()
            support.same_bits(self, models[-1].state_dict(), plain.state_dict(), f"state {number}")

    def test_in_place_of_one_without_a_step(self):
        def make(net):
            model = smp.DistributedModel(net)
            model.register_post_partition_hook(lambda *_: self.fail("of the first"))
            model = smp.DistributedModel(net)
            model.register_post_step_hook(lambda *_: called.append(1))
            return [model]

        called = []
        net = Net()
        smp.opaque(net.layers[1])
        self.trains(net, make)
        self.assertEqual(called, [1])

    def test_beside_another(self):
        for steps in (0, 1):

            def make(net, steps=steps):
                first = smp.DistributedModel(net)
                for _ in range(steps):
                    with torch.no_grad():
                        evaluate(first, batch())
                return [smp.DistributedModel(net), first]

            evaluate = support.make_evaluation()
            net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
            self.trains(net, make)


class Hooks(unittest.TestCase):
    def test_are_called_once_in_order_on_every_rank(self):
        net = Net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        called = []

        def note(what):
            def hook(*got):
                self.assertEqual(got, (model, optimizer))
                called.append((what, model.partitioned, len(list(model.local_parameters())), smp.allgather(what, smp.WORLD)[0]))

            return hook

        model.register_post_step_hook(note("stepped"))
        model.register_post_partition_hook(note("first"))
        gone = model.register_post_partition_hook(note("gone"))
        removed = []
        model.register_post_partition_hook(lambda *_: removed.append(late.remove()))
        late = model.register_post_partition_hook(note("late"))
        model.register_post_partition_hook(note("second"))
        gone.remove()
        train_step(model, batch())
        train_step(model, batch())
        here = len(list(model.local_parameters()))
        self.assertEqual(called, [(what, True, here, what) for what in ("first", "second", "stepped")])
        self.assertEqual(removed, [None])

    def test_are_refused_where_they_would_not_be_called(self):
        model = smp.DistributedModel(Net())
        with self.assertRaisesRegex(TypeError, "int"):
            model.register_post_step_hook(3)

        @smp.step
        def registers(model, x):
            model.register_post_step_hook(print)
            return model(x)

        with self.assertRaisesRegex(ValueError, "register_post_step_hook"):
            registers(model, batch())
        train_step(model, batch())
        for register in (model.register_post_partition_hook, model.register_post_step_hook):
            with self.assertRaisesRegex(RuntimeError, "first step"):
                register(print)

    def test_do_not_keep_a_model(self):
        gone = []
        model = smp.DistributedModel(Net())
        model.register_post_step_hook(lambda model, optimizer: None)
        torch.nn.Module.__setattr__(model, "last", type("Last", (), {"__del__": lambda self: gone.append(1)})())
        del model
        smp.DistributedModel(Net())  # whose making collects
        self.assertEqual(gone, [1])


class Moves(unittest.TestCase):
    def test_to_a_device_are_none(self):
        model = smp.DistributedModel(Net())
        for moved in (model.to("cuda:0"), model.cuda(), model.cpu(), model.to(torch.float32), model.float(), model.to("cpu", torch.float32)):
            self.assertIs(moved, model)
        train_step(model, batch())
        for moved in (model.to("cuda"), model.cpu()):
            self.assertIs(moved, model)
        self.assertEqual(bool(model.cpu().state_dict(True)), smp.mp_rank() == 0)

    def test_to_a_type_are_refused(self):
        model = smp.DistributedModel(Net())
        for convert in (model.half, model.double, lambda: model.to(torch.bfloat16), lambda: model.to("meta", torch.float64)):
            with self.assertRaisesRegex(NotImplementedError, r"layers.0.weight from torch.float32"):
                convert()
        train_step(model, batch())


class Bare(unittest.TestCase):
    def test_calls_are_those_of_the_module_on_one_rank(self):
        net = Net()
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)
        if smp.pp_size() > 1:
            with self.assertRaisesRegex(RuntimeError, "step body"):
                model(batch())
            return
        optimizers = [smp.DistributedOptimizer(torch.optim.Adam(net.parameters())), torch.optim.Adam(plain.parameters())]
        for seed in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if seed == 1:
                train_step(model, batch(seed))
                support.plain_step(plain, loss_of, batch(seed))
            else:
                losses = [loss_of(each, batch(seed)) for each in (model, plain)]
                for loss in losses:
                    loss.backward()
                support.same_bits(self, losses[:1], losses[1:], "losses")
            for optimizer in optimizers:
                optimizer.step()
        support.same_bits(self, model.state_dict(), plain.state_dict(), "parameters and buffers")


class Gradients(unittest.TestCase):
    def test_are_cleared_outside_of_bodies(self):
        net = Net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        train_step(model, batch())
        model.zero_grad()
        self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))
        for clear in (model.zero_grad, optimizer.zero_grad):

            @smp.step
            def clears(model, x, clear):
                clear()
                return model(x)

            with self.assertRaisesRegex(ValueError, "zero_grad"):
                clears(model, batch(), clear)


class Plans(unittest.TestCase):
    def test_show_themselves(self):
        model = smp.DistributedModel(Net())
        self.assertFalse(model.plan)
        train_step(model, batch())
        plan = model.plan
        self.assertIn("slowest stage", str(plan))
        self.assertEqual(repr(plan), str(plan))
        self.assertEqual(len(plan.as_dict["stages"]), smp.size())
        shown = plan._repr_html_()
        self.assertEqual(shown.count("<tr>"), len(str(plan).splitlines()))
        self.assertIn("<td>layers.0", shown)
        picture = ElementTree.fromstring(plan.svg)
        bars = [each for each in picture if each.tag.endswith("rect")]
        self.assertEqual(len(bars), 3 * smp.size())  # forward, backward, send
        longest = max(sum(float(bar.get("width")) for bar in bars[3 * s : 3 * s + 3]) for s in range(smp.size()))
        self.assertAlmostEqual(longest, 700, delta=1)
        self.assertIn(plan.svg, shown)

    def test_show_names_with_any_characters(self):
        net = nn.Sequential()
        net.add_module("<b>|&\"'", nn.Linear(6, 6))
        model = smp.DistributedModel(net)
        train_step(model, batch())
        self.assertEqual(ElementTree.fromstring(model.plan.svg)[-1].text, "<b>|&\"'")
        table = ElementTree.fromstring(model.plan._repr_html_().partition("</svg>")[2])
        self.assertEqual([len(row) for row in table[:-1]], [7] * (len(table) - 1))
        self.assertEqual(table[1][2].text, "<b>|&\"'")

    def test_of_time_want_the_key(self):
        with self.assertRaisesRegex(ValueError, "timeline: expected the key timeline in the configuration, got none"):
            smp.timeline()


if __name__ == "__main__":
    support.main()
