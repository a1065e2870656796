"""Models of transformers: steps against the plain model, bit for bit.

With dropout the plain model draws other numbers, so there one process is the reference of several.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import unittest

import support
import torch
import transformers_models
from transformers_models import FAMILIES, attention_of, batch_of, model_of, train_step

import smdistributed.modelparallel.torch as smp

STEPS = 6


class Models(transformers_models.Compared):
    def test_equal_the_plain_model(self):
        for name in FAMILIES:
            padding = None if name == "vit" else "right"
            for attention in sorted({"eager", attention_of(name)}):
                with self.subTest(name, attention=attention):
                    self.check(name, attention, padding, STEPS)

    def test_without_padding(self):
        for name in FAMILIES:
            if FAMILIES[name]["labels"] != "images":
                with self.subTest(name):
                    self.check(name, attention_of(name), None, steps=3)

    def test_with_a_loss_of_the_bodys_own(self):
        for name in ("gpt2", "bert", "vit", "llama"):
            with self.subTest(name):
                self.check(name, "sdpa", None if name == "vit" else "left", steps=3, has_labels=False)


def mark_blocks(net):
    """As SageMaker's scripts do."""
    blocks = [module for module in net.modules() if isinstance(module, torch.nn.ModuleList)]
    smp.set_activation_checkpointing(max(blocks, key=len))


def of_a_list_by_twos(net):
    smp.set_activation_checkpointing(net.transformer.h, strategy="group_2")


def enable(net):
    """As Trainer does by gradient_checkpointing=True."""
    net.gradient_checkpointing_enable({"use_reentrant": False})
    net.config.use_cache = False


class Checkpointed(transformers_models.Compared):
    def test_equal_the_plain_model(self):
        marks = {"gpt2": (mark_blocks, of_a_list_by_twos, enable), "bert_mlm": (mark_blocks, enable), "t5": (mark_blocks,),
                 "llama": (mark_blocks,), "vit": (enable,)}  # fmt: skip
        for name, each in marks.items():
            for mark in each:
                with self.subTest(name, mark=mark.__name__):
                    model = self.check(name, attention_of(name), None, STEPS, mark=mark)
                    self.assertIn("operators until their backward, for which it computes", str(model.plan))


def with_dropout(name):
    """Of six steps with dropout: losses, gradients and buffers of this rank by step, and what was trained."""
    model = smp.DistributedModel(model_of(name, attention_of(name), dropout=True))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses, local = [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses += train_step(model, batch_of(name, None, number))["loss"].outputs
        gradients = {f"gradient of {path}": each.grad for path, each in model.local_named_parameters()}
        tensors = {**gradients, **dict(model.local_named_buffers())}
        local.append({what: tensor.clone() for what, tensor in tensors.items() if tensor is not None})
        optimizer.step()
    return losses, local, model.state_dict()


class Dropout(unittest.TestCase):
    """The reference is one process: plain torch draws other numbers."""

    @classmethod
    def setUpClass(cls):
        reference = None
        if smp.rank() == 0:
            launcher = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "RANK", "WORLD_SIZE", "LOCAL_")
            environment = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "reference")
                subprocess.run([sys.executable, __file__, "--reference", path], env=environment, check=True)
                with open(path, "rb") as file:
                    reference = pickle.load(file)
        cls.reference = smp.allgather(reference, smp.WORLD)[0]

    def test_is_that_of_one_process(self):
        for name in FAMILIES:
            with self.subTest(name):
                losses, local, state = with_dropout(name)
                expected_losses, expected, expected_state = self.reference[name]
                support.same_bits(self, losses, expected_losses, "losses")
                for number, (tensors, whole) in enumerate(zip(local, expected, strict=True)):
                    support.same_bits(self, tensors, {what: whole[what] for what in tensors}, f"step {number}")
                    held = smp.allgather(list(tensors), smp.PP_GROUP)
                    self.assertEqual(set().union(*held), set(whole), f"gradients and buffers of step {number}")
                support.same_bits(self, state, expected_state, "parameters and buffers")
                self.assertNotEqual(losses[0], self.loss_without(name), "dropout rests")

    def loss_without(self, name):
        """Of the first microbatch, and with the same bits where dropout rests."""
        part = {key: each.chunk(support.MICROBATCHES)[0].clone() for key, each in batch_of(name, None, 0).items()}
        return model_of(name, attention_of(name), dropout=False)(**part).loss


setUpModule = transformers_models.init


if __name__ == "__main__":
    if "--reference" in sys.argv:
        setUpModule()
        results = {name: with_dropout(name) for name in FAMILIES}
        with open(sys.argv[-1], "wb") as output:
            pickle.dump(results, output)
    else:
        support.main()
