"""Trains a language model and a classifier with transformers' Trainer, for trainer_test.py: FOLDER.

The script says nothing of smp: with SageMaker's variables in its environment, transformers takes the way through smp by itself.
The first label of a text is left out, as no position predicts it, since the Trainer counts it on its other way only.
"""

import gc
import json
import pathlib
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import is_sagemaker_mp_enabled

FOLDER = pathlib.Path(sys.argv[1])


class Recorded(Trainer):
    """Keeps the losses, which the Trainer rounds to four digits before it logs them."""

    losses = ()

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*self.losses, loss.item()]
        return loss


def texts(rows):
    tokens = torch.randint(0, 97, (rows, 12))
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in tokens]


def sentences(rows):
    """Of several lengths, with a class each."""
    here = torch.arange(12) < torch.randint(5, 13, (rows, 1))
    columns = zip(torch.randint(0, 97, (rows, 12)), here.long(), torch.randint(0, 3, (rows,)), strict=True)
    return [{"input_ids": tokens, "attention_mask": mask, "labels": label} for tokens, mask, label in columns]


def language_model():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_positions=12, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    )


def classifier():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3,
            max_position_embeddings=12, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def metrics(evaluated):
    """All rows, in their order."""
    logits = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    weights = torch.arange(1, logits.size + 1, dtype=torch.float64).reshape(logits.shape) / logits.size
    return {"rows": len(evaluated.label_ids), "weighed": float((torch.tensor(logits) * weights).mean())}


def run(name, model, rows, checkpoint):
    """What a Trainer of this model has seen, saved to a file of that name."""
    folder = FOLDER / name
    arguments = TrainingArguments(
        str(folder), max_steps=6, save_steps=3, eval_steps=3, eval_strategy="steps", per_device_train_batch_size=8,
        per_device_eval_batch_size=8, learning_rate=1e-3, max_grad_norm=0.5, seed=3, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Recorded(model, arguments, train_dataset=rows(64), eval_dataset=rows(22), compute_metrics=metrics)
    trainer.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
    keys = ("eval_loss", "eval_rows", "eval_weighed")
    evaluations = [[each[key] for key in keys] for each in trainer.state.log_history if "eval_loss" in each]
    trainer.save_model(str(folder / "last"))
    if trainer.is_world_process_zero():
        result = {"losses": trainer.losses, "evaluations": evaluations, "processes": trainer.accelerator.num_processes}
        (FOLDER / f"{name}_{checkpoint}.json").write_text(json.dumps(result))


def refused():
    """What Trainers with losses of their own say on the way through smp."""

    class Thrice(Trainer):
        def compute_loss(self, *args, **kwargs):
            return 3 * super().compute_loss(*args, **kwargs)

    texts_of_errors = []
    for kind, changed, given in (
        (Trainer, {"label_smoothing_factor": 0.1}, {}),
        (Trainer, {}, {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs["logits"].sum()}),
        (Thrice, {}, {}),
    ):
        arguments = TrainingArguments(str(FOLDER / "refused"), max_steps=1, report_to=[], disable_tqdm=True, **changed)
        try:
            kind(classifier(), arguments, train_dataset=sentences(8), **given).train()
        except NotImplementedError as error:
            texts_of_errors.append(str(error))
    (FOLDER / "refused.json").write_text(json.dumps(texts_of_errors))


if is_sagemaker_mp_enabled():
    refused()
for each_name, make, each_rows in (("language_model", language_model, texts), ("classifier", classifier, sentences)):
    for each_checkpoint in (None, "checkpoint-3"):
        torch.manual_seed(0)
        run(each_name, make(), each_rows, each_checkpoint)
        gc.collect()  # the Trainer refers to itself, and a checkpoint is loaded into the one model that there is
