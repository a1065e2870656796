"""Models of transformers, built from configurations, and what compares their training with the plain model's."""

import copy
import unittest

import support
import torch
import torch.nn.functional as F
import transformers as tf

import smdistributed.modelparallel.torch as smp

TOKENS, WORDS, CLASSES, BATCH = 12, 50, 3, 8
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


class Compared(unittest.TestCase):
    def check(self, name, attention, padding, steps, has_labels=True, mark=lambda net: None):
        net = model_of(name, attention, dropout=False)
        plain = copy.deepcopy(net)
        mark(net)
        plain.config.use_cache = net.config.use_cache = getattr(net.config, "use_cache", False)  # off with checkpoints
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
        return model

    def check_caches(self, ours, theirs):
        """One object of transformers per microbatch, with tensors inside."""
        self.assertEqual([type(each) for each in ours], [type(each) for each in theirs])
        for mine, plain in zip(ours, theirs, strict=True):
            tensors = [[], []]
            for cache, found in ((mine, tensors[0]), (plain, tensors[1])):
                for layer in getattr(cache, "self_attention_cache", cache).layers:
                    found += [layer.keys, layer.values]
            support.same_bits(self, *tensors, "cache")


def init():
    smp.init({"microbatches": support.MICROBATCHES, "log_level": "off"})
