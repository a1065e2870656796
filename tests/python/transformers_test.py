"""Models of transformers, built from configurations: six steps against the plain model, bit for bit.

With dropout the plain model draws other numbers, so there one process is the reference of several.
"""

import copy
import os
import pickle
import subprocess
import sys
import tempfile
import unittest

import support
import torch
import torch.nn.functional as F
import transformers as tf

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel import _engine

TOKENS, WORDS, CLASSES, BATCH, STEPS = 12, 50, 3, 8, 6
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
WORDED = {"vocab_size": WORDS, **SIZES}


def family(model, config, dropouts, labels="tokens", **sizes):
    return {"model": model, "config": config, "dropouts": dropouts, "labels": labels, "sizes": sizes}


BERTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
FAMILIES = {
    "gpt2": family(
        tf.GPT2LMHeadModel, tf.GPT2Config, ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        n_layer=4, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ),
    "bert": family(tf.BertForSequenceClassification, tf.BertConfig, BERTS, "classes", num_labels=CLASSES, **WORDED),
    "bert_mlm": family(tf.BertForMaskedLM, tf.BertConfig, BERTS, **WORDED),
    "roberta": family(
        tf.RobertaForSequenceClassification, tf.RobertaConfig, BERTS, "classes",
        num_labels=CLASSES, pad_token_id=1, max_position_embeddings=40, **WORDED,
    ),
    "distilbert": family(
        tf.DistilBertForSequenceClassification, tf.DistilBertConfig,
        ("dropout", "attention_dropout", "seq_classif_dropout"), "classes",
        num_labels=CLASSES, vocab_size=WORDS, dim=32, n_layers=4, n_heads=2, hidden_dim=64,
    ),
    "t5": family(
        tf.T5ForConditionalGeneration, tf.T5Config, ("dropout_rate",),
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0,
    ),
    "vit": family(
        tf.ViTForImageClassification, tf.ViTConfig, BERTS, "images",
        image_size=16, patch_size=4, num_labels=CLASSES, **SIZES,
    ),
    "llama": family(tf.LlamaForCausalLM, tf.LlamaConfig, ("attention_dropout",), num_key_value_heads=1, **WORDED),
    "qwen2": family(tf.Qwen2ForCausalLM, tf.Qwen2Config, ("attention_dropout",), num_key_value_heads=1, **WORDED),
}  # fmt: skip
if int(tf.__version__.split(".")[0]) >= 5:  # before, Mixtral sent tokens to experts by data-dependent shapes
    FAMILIES["mixtral"] = family(
        tf.MixtralForCausalLM, tf.MixtralConfig, ("attention_dropout",), num_key_value_heads=1, num_local_experts=4, **WORDED
    )


def attention_of(name):
    return "eager" if name == "t5" else "sdpa"


def model_of(name, attention, dropout):
    made = FAMILIES[name]
    torch.manual_seed(0)
    rest = dict.fromkeys(made["dropouts"], 0.1 if dropout else 0.0)
    return made["model"](made["config"](attn_implementation=attention, **made["sizes"], **rest)).train()


def batch_of(name, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    if FAMILIES[name]["labels"] == "images":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator), "labels": classes}
    tokens = torch.randint(2, WORDS, (BATCH, TOKENS), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone() if FAMILIES[name]["labels"] == "tokens" else classes}
    if padding:
        lengths = TOKENS - torch.arange(BATCH) % 5
        places = torch.arange(TOKENS) if padding == "right" else torch.arange(TOKENS - 1, -1, -1)
        batch["attention_mask"] = (places < lengths[:, None]).long()
    return batch


def output_of(model, batch):
    """With the model's own loss, or one of its logits where the batch has targets in place of labels."""
    targets = batch.pop("targets", None)
    output = model(**batch)
    if targets is not None:
        loss = F.cross_entropy(output["logits"].flatten(0, -2), targets.flatten())
        output = type(output)(**{**output, "loss": loss})
    return output


@smp.step
def train_step(model, batch):
    output = output_of(model, batch)
    model.backward(output["loss"])
    return output


@smp.step
def evaluate(model, batch):
    return model(**batch)["loss"]


class Models(unittest.TestCase):
    def check(self, name, attention, padding, steps=STEPS, has_labels=True):
        net = model_of(name, attention, dropout=False)
        plain = copy.deepcopy(net)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for number in range(steps):
            batch = batch_of(name, padding, number)
            if not has_labels:
                batch["targets"] = batch.pop("labels")
            optimizer.zero_grad()
            ours = train_step(model, batch)
            optimizer.step()
            plain_optimizer.zero_grad()
            theirs = []
            for m in range(support.MICROBATCHES):
                part = {key: each.chunk(support.MICROBATCHES)[m].clone() for key, each in batch.items()}
                theirs.append(output_of(plain, part))
                (theirs[-1].loss / support.MICROBATCHES).backward()
            plain_optimizer.step()
            self.assertIs(type(ours), type(theirs[0]))
            self.assertEqual(list(ours), list(theirs[0]))
            for key in ("loss", "logits"):
                support.same_bits(self, ours[key].outputs, [each[key] for each in theirs], f"{key} of step {number}")
            if "past_key_values" in ours:
                self.check_caches(ours["past_key_values"], [each.past_key_values for each in theirs])
            for path, parameter in model.local_named_parameters():
                expected = plain.get_parameter(path).grad
                self.assertEqual(parameter.grad is None, expected is None, path)
                if expected is not None:
                    support.same_bits(self, [parameter.grad], [expected], f"gradient of {path}, step {number}")
        state, expected = model.state_dict(), plain.state_dict()
        support.same_bits(self, state, expected, "parameters and buffers")
        sizes = smp.allgather(sum(p.numel() for p in model.local_parameters()), smp.PP_GROUP)
        self.assertGreater(min(sizes), 0, "a rank without parameters")

    def check_caches(self, ours, theirs):
        """One object of transformers per microbatch, with tensors inside."""
        self.assertEqual([type(each) for each in ours], [type(each) for each in theirs])
        for mine, plain in zip(ours, theirs, strict=True):
            tensors = [[], []]
            for cache, found in ((mine, tensors[0]), (plain, tensors[1])):
                for layer in getattr(cache, "self_attention_cache", cache).layers:
                    found += [layer.keys, layer.values]
            support.same_bits(self, *tensors, "cache")

    def test_equal_the_plain_model(self):
        for name in FAMILIES:
            padding = None if name == "vit" else "right"
            for attention in sorted({"eager", attention_of(name)}):
                with self.subTest(name, attention=attention):
                    self.check(name, attention, padding)

    def test_without_and_with_other_padding(self):
        for padding in (None, "left"):
            for name in FAMILIES:
                if FAMILIES[name]["labels"] != "images":
                    with self.subTest(name, padding=padding):
                        self.check(name, attention_of(name), padding, steps=3)

    def test_with_a_loss_of_the_bodys_own(self):
        for name in ("gpt2", "bert", "vit", "llama"):
            with self.subTest(name):
                self.check(name, "sdpa", None if name == "vit" else "left", steps=3, has_labels=False)


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


def setUpModule():
    # One process adds up the gradients of a tied weight in one order only.
    smp.init({"microbatches": support.MICROBATCHES, "exact_tied_weights": True, "log_level": "off"})


if __name__ == "__main__":
    if "--reference" in sys.argv:
        setUpModule()
        results = {name: with_dropout(name) for name in FAMILIES}
        with open(sys.argv[-1], "wb") as output:
            pickle.dump(results, output)
    else:
        support.main()
