"""Models of transformers: how they are called (padding on the left too), recorded and constructed."""

import copy
import unittest

import support
import torch
import transformers_models
from transformers_models import FAMILIES, attention_of, batch_of, model_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import _engine


@smp.step
def evaluate(model, batch):
    return model(**batch)["loss"]


class Models(transformers_models.Compared):
    def test_equal_the_plain_model_where_padding_is_on_the_left(self):
        for name in FAMILIES:
            if FAMILIES[name]["labels"] != "images":
                with self.subTest(name):
                    self.check(name, attention_of(name), "left", steps=3)


class Calls(torch.overrides.TorchFunctionMode):
    """What a forward asks of torch: functions, with the tensors that they return."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        results = returned if isinstance(returned, (list, tuple)) else [returned]
        tensors = [(tuple(each.shape), each.dtype, each.device) for each in results if isinstance(each, torch.Tensor)]
        self.seen.append((torch.overrides.resolve_name(function) or repr(function), tensors))
        return returned


class Recording(unittest.TestCase):
    def test_asks_for_what_a_run_on_real_tensors_asks_for(self):
        for name in FAMILIES:
            for attention in sorted({"eager", attention_of(name)}):
                with self.subTest(name, attention=attention):
                    net = model_of(name, attention, dropout=True)
                    plain = copy.deepcopy(net)
                    model = smp.DistributedModel(net)
                    ghosts = []

                    @smp.step
                    def step(model, batch, ghosts=ghosts):
                        with Calls() as calls:
                            loss = model(**batch)["loss"]
                        ghosts.append(calls.seen)
                        model.backward(loss)

                    batch = batch_of(name, None if name == "vit" else "left", 0)
                    for _ in range(2):  # recorded, then matched
                        step(model, batch)
                    part = {key: each.chunk(support.MICROBATCHES)[0].clone() for key, each in batch.items()}
                    real = []
                    for _ in range(2):  # a first forward asks for more, as for the kind of problem that labels say
                        with Calls() as calls:
                            plain(**part)
                        real.append(calls.seen)
                    self.assertGreater(len(real[0]), 50)
                    for number, seen in enumerate(ghosts):
                        self.assertEqual(seen, real[min(number, 1)])
                    self.assertEqual(bool(ghosts), smp.pp_rank() == 0)


class DelayedInitialisation(unittest.TestCase):
    def test_makes_the_values_of_an_ordinary_construction(self):
        for name in FAMILIES:
            with self.subTest(name):
                plain = model_of(name, "eager", dropout=False)
                after = torch.get_rng_state()
                with smp.delay_param_initialization():
                    net = model_of(name, "eager", dropout=False)
                self.assertTrue(torch.equal(torch.get_rng_state(), after), "the generator's end state")
                self.assertFalse(any(_engine.has_values(parameter) for parameter in net.parameters()))
                model = smp.DistributedModel(net)
                before = model.state_dict()
                with torch.no_grad():
                    evaluate(model, batch_of(name, None, 0))
                here = {id(tensor) for tensor in (*model.local_parameters(), *model.local_buffers())}
                own = dict(plain.named_parameters(remove_duplicate=False))
                own.update(plain.named_buffers(remove_duplicate=False))
                ours = dict(net.named_parameters(remove_duplicate=False))
                ours.update(net.named_buffers(remove_duplicate=False))
                for path, tensor in ours.items():
                    if id(tensor) in here:
                        support.same_bits(self, [tensor], [own[path]], path)
                for state in (before, model.state_dict()):
                    support.same_bits(self, state, plain.state_dict(), "state")


setUpModule = transformers_models.init


if __name__ == "__main__":
    support.main()
